"""What every dialect shares: the frame, its cursor, and what a resumed reader still needs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kit.errors import ServiceError
from kit.ids import parse_id
from threadloom.conversation.v1.run_event_pb2 import RunEvent

# Above the frames any event gives: a cursor with this index means "all of this event was seen".
WHOLE_EVENT = 9

TERMINAL_KINDS = frozenset(("run_finished", "run_failed"))

_CURSOR = re.compile(r"([0-9a-f-]{36}):([0-9]{1,19})\.([0-9]{1,4})", re.ASCII)
_LAST_SEQ = 2**63 - 1


class Frame(NamedTuple):
    """One unit on the wire, as bytes that hold no line break. `id` is empty for a frame no reader can resume at."""

    id: bytes
    event: bytes
    data: bytes


class Encoder(Protocol):
    """Events of one run to frames of one dialect. Pure: same events in, same bytes out."""

    def encode(self, event: RunEvent) -> Sequence[Frame]:
        """The frames of one event; none for a kind the dialect does not show or this code does not know."""

    def refused(self, error: ServiceError) -> Frame:
        """The terminal frame for a run that can no longer be followed."""


@dataclass(frozen=True)
class Cursor:
    """A place in a stream: after the `index`-th frame (from 1) of event `seq` of a run."""

    run_id: str
    seq: int
    index: int

    def __str__(self) -> str:
        return f"{self.run_id}:{self.seq}.{self.index}"


def parse_cursor(text: str) -> Cursor | None:
    """The cursor written as `{run_id}:{seq}.{index}`, None when the text is none."""
    found = _CURSOR.fullmatch(text)
    if found is None or parse_id(found[1]) is None or int(found[2]) > _LAST_SEQ:
        return None
    return Cursor(found[1], int(found[2]), int(found[3]))


def is_terminal(event: RunEvent) -> bool:
    """Whether the run ended with this event."""
    return event.WhichOneof("kind") in TERMINAL_KINDS


def unseen(frames: Sequence[Frame], event: RunEvent, cursor: Cursor) -> Sequence[Frame]:
    """The frames of `event` that a reader at `cursor` still needs.

    The terminal frame is never dropped: a reader that comes back at the very end
    learns again that this was the end.
    """
    if event.seq != cursor.seq:
        return frames
    seen = min(cursor.index, len(frames) - 1) if is_terminal(event) else cursor.index
    return frames[seen:]
