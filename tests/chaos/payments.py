"""The named points of a call's money, and runs that are brought to them: one each, in a project of its own.

Billing books a project's calls one after the other, so that a write held in one project
holds nothing in the others, and a single kill meets several runs at their points.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from deploy.local.secret_file import ProjectKeys
from tests.chaos.direct import direct
from tests.chaos.points import Place, Point, placed
from tests.chaos.record import RunFacts
from tests.chaos.stack import Stack, until
from tests.support.http import Answer, Client

BILLING = "billing"
SETTLE = "NEW.topic = 'billing.settle'"

HOLD = Point("before the hold", "holds", "NEW.status = 'open'", schema=BILLING)
HOLD_COMMIT = Point("at the hold's commit", "holds", "NEW.status = 'open'", at_commit=True, schema=BILLING)
SENT = Point("before the call is marked sent", "api_calls", "NEW.status = 'sent'", "UPDATE")
SENT_COMMIT = Point("at the mark's commit", "api_calls", "NEW.status = 'sent'", "UPDATE", at_commit=True)
MID_ANSWER = Point("in mid-answer")
FINISH = Point("before the finish", "outbox", SETTLE)
FINISH_COMMIT = Point("at the finish's commit", "outbox", SETTLE, at_commit=True)
BOOKING = Point("before the booking", "cost_ledger", schema=BILLING)
BOOKING_COMMIT = Point("at the booking's commit", "cost_ledger", at_commit=True, schema=BILLING)
FORGETTING = Point("before the outbox forgets", "outbox", "OLD.topic = 'billing.settle'", "DELETE")

# A process sends what its outbox holds in one round after the other: of the points of that round only one at a time.
TOGETHER: tuple[tuple[Point, ...], ...] = (
    (HOLD, HOLD_COMMIT, SENT, SENT_COMMIT, MID_ANSWER, FINISH, FINISH_COMMIT, BOOKING),
    (BOOKING_COMMIT,),
    (FORGETTING,),
)
GATE_AT = 3  # deltas by then


class Fate(StrEnum):
    """What became of a call."""

    UNSENT = "not recorded as sent: its hold is free again"
    UNSEEN = "recorded as sent and never seen: booked by estimate, without output"
    BROKEN = "broken off: booked by estimate"
    ANSWERED = "booked as the provider reported it"


FATES = """
SELECT c.id::text, c.status, c.usage_source, h.status, l.tokens_out FROM conversation.api_calls c
LEFT JOIN billing.holds h ON h.api_call_id = c.id LEFT JOIN billing.cost_ledger l ON l.api_call_id = c.id
WHERE c.run_id = %s ORDER BY c.started_at, c.id
"""


@dataclass
class Payment:
    """A run of its own project and its reader. `place` is where the run is brought to."""

    point: Point
    stack: Stack
    project: ProjectKeys
    client: Client
    conversation: str
    place: Place
    answer: Answer = field(default_factory=Answer)
    reading: "asyncio.Task[Answer]" = field(init=False)
    ended: float = 0.0

    @classmethod
    async def prepare(cls, stack: Stack, point: Point, project: ProjectKeys, opened: AsyncExitStack) -> Self:
        """Makes its conversation and holds its point; no run yet."""
        client = await opened.enter_async_context(stack.client(project=project))
        conversation = await client.insist(client.create_conversation)
        row = "OLD" if point.operation == "DELETE" else "NEW"
        place = await opened.enter_async_context(placed(stack, point, f"{row}.project_id = '{project.id}'"))
        return cls(point, stack, project, client, conversation, place)

    async def start(self, owner: int) -> None:
        """Starts the run at a replica, and reads it through a gateway."""
        script = (
            f"[fake chunks=8 delay=5{f' gate={self.place.gate} gate_at={GATE_AT}' if not self.point.table else ''}]"
        )
        async with direct(self.stack, owner, project=self.project) as replica:
            await replica.start(self.conversation, script)
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> Answer:
        answer = await self.client.follow(self.conversation, self.answer)
        self.ended = time.monotonic()
        return answer

    async def reached(self) -> None:
        """Waits until it is there; by then in mid-answer its reader has text."""
        await self.place.held()
        if not self.point.table:
            await until(lambda: self.answer.text)

    def fates(self, run: RunFacts) -> list[Fate]:
        """What became of each of its calls, oldest first. Raises AssertionError for what may not become of one."""
        seen = {call.client_request_id for call in self.stack.provider.calls}
        return [_fate(id in seen, tuple(row)) for id, *row in self.stack.record.rows(FATES, run.id)]


def expected(point: Point, *, is_owner_killed: bool, arrives: bool) -> Sequence[list[Fate]]:
    """What may become of the calls before the one that answered. `arrives`: the held write happened all the same."""
    if not is_owner_killed:
        return ([],)
    match point.name:
        case HOLD.name | HOLD_COMMIT.name:
            return ([Fate.UNSENT],)
        case SENT.name:
            # Of a killed owner's transaction the rest may be on its way, its COMMIT too.
            return ([Fate.UNSENT], [Fate.UNSEEN]) if arrives else ([Fate.UNSENT],)
        case SENT_COMMIT.name:
            return ([Fate.UNSEEN],) if arrives else ([Fate.UNSENT],)
        case MID_ANSWER.name:
            return ([Fate.BROKEN],)
        case FINISH.name:
            return ([Fate.BROKEN], []) if arrives else ([Fate.BROKEN],)
        case FINISH_COMMIT.name:
            return ([],) if arrives else ([Fate.BROKEN],)
    return ([],)  # the answer was finished by then


def _fate(is_seen: bool, row: tuple[str, str, str | None, int | None]) -> Fate:
    match is_seen, row:
        case False, ("cut", "none", "released", None):
            return Fate.UNSENT
        case False, ("cut", "estimated", "settled", 0):
            return Fate.UNSEEN
        case True, ("cut", "estimated", "settled", int(output)) if output > 0:
            return Fate.BROKEN
        case True, ("succeeded", "provider", "settled", int(output)) if output > 0:
            return Fate.ANSWERED
    raise AssertionError(f"a call that was {'' if is_seen else 'not '}seen by the provider: {row}")
