"""The named points of a run at which a test kills or freezes something: how a run is brought there and let go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import uuid4

from tests.chaos.stack import Stack
from tests.support.holds import SCHEMA, Hold
from threadloom.conversation.v1.run_event_pb2 import RunEvent

TEXT_DELTA = RunEvent.DESCRIPTOR.fields_by_name["text_delta"].number
RUN_FINISHED = RunEvent.DESCRIPTOR.fields_by_name["run_finished"].number
# By then the client has some text: run_started, reply_started, step_started and trace_started come first.
SOME_TEXT_SEQ = 7
REACHED_SECONDS = 10.0


@dataclass(frozen=True)
class Point:
    """A write that is held, or without a table the provider's gate before its first delta."""

    name: str
    table: str = ""
    condition: str = "true"
    operation: str = "INSERT"
    at_commit: bool = False
    schema: str = SCHEMA

    def __str__(self) -> str:
        return self.name


# The start is one transaction: until its COMMIT nothing of the run exists.
START = Point("before the start", "api_calls")
REQUEST = Point("before the request", "api_calls", at_commit=True)
FIRST_DELTA = Point("before the first delta")
MID_TEXT = Point("in mid-text", "run_events", f"NEW.kind = {TEXT_DELTA} AND NEW.seq > {SOME_TEXT_SEQ}")
LAST_DELTA = Point("after the last delta", "run_events", f"NEW.kind = {RUN_FINISHED}")
FINISH = Point("before the finish", "ai_runs", "NEW.status <> 'running'", "UPDATE", at_commit=True)
# The run before has ended, and its end started the next one; nobody owns that yet.
CLAIM = Point("before the next claim", "ai_runs", "OLD.worker_id IS NULL AND NEW.worker_id IS NOT NULL", "UPDATE")
# Of a webhook's delivery: it is about to be leased, and it was received and is about to be written down.
WEBHOOK_TAKE = Point(
    "before the delivery", "webhook_deliveries", "NEW.state = 'pending' AND NEW.attempts = OLD.attempts", "UPDATE"
)
WEBHOOK_RECORD = Point("before the record of the delivery", "webhook_deliveries", "NEW.state = 'delivered'", "UPDATE")

POINTS = (START, REQUEST, FIRST_DELTA, MID_TEXT, LAST_DELTA, FINISH)


class Place:
    """One run at a point. `gate` is for the run's script."""

    def __init__(self, stack: Stack, point: Point, hold: Hold | None) -> None:
        self.gate = f"gate-{uuid4()}"
        self._stack, self._point, self._hold = stack, point, hold

    @property
    def script(self) -> str:
        """What the message asks of the provider."""
        return f"[fake chunks=12 delay=25{'' if self._hold else f' gate={self.gate}'}]"

    async def reached(self, conversation: str) -> int:
        """Waits until the run is here; returns the number of the replica that has it."""
        await self.held()
        if self._hold is None:
            return await self._stack.owner_of(conversation)
        return self.replica()

    async def held(self) -> None:
        """Waits until a run is here."""
        if self._hold is None:
            await self._stack.provider.until(lambda calls: any(call.held == self.gate for call in calls))
        else:
            await asyncio.to_thread(self._hold.wait, REACHED_SECONDS)

    def replica(self) -> int:
        """The number of the conversation replica whose write is held."""
        assert self._hold is not None
        return self._stack.replica_behind(self._hold.caught()[0])

    def drop(self) -> None:
        """Ends the held backend only: the next one is held again."""
        assert self._hold is not None
        self._hold.drop()

    def open_gate(self) -> None:
        """Lets the provider go on."""
        self._stack.provider.open_gate(self.gate)

    def let_go(self, arrives: bool) -> None:
        """Ends the hold. `arrives`: the held write still happens; otherwise its backend ends with it."""
        if self._hold is not None:
            if not arrives:
                self._hold.drop()
            self._hold.release()


@contextlib.asynccontextmanager
async def placed(stack: Stack, point: Point, also: str = "true") -> AsyncIterator[Place]:
    """Prepares a point for the next run, or for runs whose rows meet `also`."""
    if not point.table:
        yield Place(stack, point, None)
        return
    condition = f"({point.condition}) AND ({also})"
    hold = Hold(
        stack.cluster.database.admin_url, point.table, condition, point.operation, point.at_commit, point.schema
    )
    await asyncio.to_thread(hold.__enter__)
    try:
        yield Place(stack, point, hold)
    finally:
        await asyncio.to_thread(hold.__exit__, None, None, None)
