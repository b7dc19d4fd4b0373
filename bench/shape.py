"""What a stream of the bench looks like: the words both the provider and the load client know.

A request's message names its stream, `bench:DELTAS:INTERVAL_MS`, so that every subject
asks the provider for it without knowing of the bench. Each delta is DELTA_CHARS long and
differs from its neighbours: the text that arrives tells how many deltas did, however they
were merged on the way.
"""

import functools
import re
from dataclasses import dataclass

DELTA_CHARS = 5
DELTAS_MAX = 10_000  # four digits and a space
NAMED = re.compile(rb"bench:(\d{1,5}):(\d{1,6})")


@dataclass(frozen=True)
class Shape:
    """`interval_ms` is between two deltas; 0 writes as fast as they are read."""

    deltas: int
    interval_ms: int = 0

    def __str__(self) -> str:
        return f"bench:{self.deltas}:{self.interval_ms}"

    @property
    def seconds(self) -> float:
        """How long the provider takes from its first delta to its last, when paced."""
        return (self.deltas - 1) * self.interval_ms / 1000


def shape_in(body: bytes) -> Shape | None:
    """The shape the last message of a request names; None when none does."""
    found = NAMED.findall(body)
    if not found:
        return None
    deltas, interval = map(int, found[-1])
    return Shape(deltas, interval) if 1 <= deltas <= DELTAS_MAX else None


@functools.cache
def text_of(deltas: int) -> str:
    """The whole text of a stream."""
    return "".join(delta(index) for index in range(deltas))


def delta(index: int) -> str:
    """The text of one delta."""
    return f"{index:04d} "
