"""A run this process owns, as the runner and its model calls share it."""

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

from services.conversation.domain import events
from services.conversation.journal import RunLog
from threadloom.conversation.v1.run_pb2 import RunOptions


class Stop(StrEnum):
    """Why a run is to stop before its end."""

    CANCELLED = "cancelled"
    LOST = "lost"  # another owner has it: nothing may be written
    HAND_OVER = "hand over"  # this process is leaving


@dataclass(eq=False)
class OwnedRun:
    """One answer in the making. Times are monotonic seconds of this process."""

    log: RunLog
    user_id: str
    user_message_id: UUID
    model: str
    options: RunOptions
    system_prompt: str
    started: float
    turn_seconds: float
    is_asked_to_stop: asyncio.Event = field(default_factory=asyncio.Event)
    stop: Stop | None = None
    traces: int = 0  # opened, pending ones included
    attempt: int = 1
    switches: int = 0  # to fallback models, so far
    step: int = 0  # of the newest call that answered
    has_open_step: bool = False
    has_reply: bool = False
    answer_bytes: int = 0  # of text and thinking this process has read

    @property
    def id(self) -> UUID:
        """The run's id."""
        return self.log.run_id

    @property
    def age(self) -> float:
        """Seconds since the run was made, by whichever process."""
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float:
        """Seconds until the turn's limit, at least 0. A takeover does not reset it."""
        return max(0.0, self.turn_seconds - self.age)

    @property
    def next_model(self) -> str | None:
        """The fallback model that comes next, if there is one."""
        left = self.options.fallback_models[self.switches :]
        return left[0] if left else None

    def next_trace(self) -> str:
        """The id for the next trace."""
        self.traces += 1
        return events.trace_id(self.traces)

    def ask_to_stop(self, why: Stop) -> None:
        """Makes the runner stop at its next await. Losing the run beats every other reason."""
        if self.stop is None or why is Stop.LOST:
            self.stop = why
        self.is_asked_to_stop.set()
