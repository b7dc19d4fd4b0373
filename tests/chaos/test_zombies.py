"""An owner frozen beyond its lease: others finish its runs, and when it wakes up it writes and asks nothing."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field

import pytest

from tests.chaos.direct import Direct, direct
from tests.chaos.figures import FIGURES
from tests.chaos.payments import HOLD, SENT
from tests.chaos.points import LAST_DELTA, MID_TEXT, START, Place, Point, placed
from tests.chaos.record import check_answer
from tests.chaos.stack import Stack, until
from tests.support.http import Answer, Client

FROZEN = 1
END_SECONDS = 15.0
# How long it is watched after it woke up.
AWAKE_SECONDS = 10.0
LONG_ROUNDS = 10

RETRY = Point("between the record of an attempt and its request", "api_calls", "NEW.attempt = 2")


@dataclass(frozen=True)
class Freeze:
    """Where a run is when its owner freezes. `arrives`: the held write still happens, as it would; else never."""

    name: str
    point: Point | None = None
    arrives: bool = True
    script: str = ""

    @property
    def knows_thread(self) -> bool:
        """Whether it holds a row that knows its thread, so that it can be placed before the run is known."""
        return self.point is not None and self.point.table in ("api_calls", "holds")


FREEZES = (
    Freeze("in mid-text"),
    Freeze("inside the finish's transaction", LAST_DELTA, arrives=False),
    Freeze("between an attempt's record and its request", RETRY, script="error=500 times=1"),
    Freeze("inside the start's transaction", START),
    Freeze("while it is given its hold", HOLD),
    Freeze("between its hold and its request", SENT),
    # Last, for it stops the lane that all runs of a process share.
    Freeze("inside an append", MID_TEXT),
)


@dataclass
class Frozen:
    """One run of the replica that will be frozen, and its reader."""

    freeze: Freeze
    conversation: str
    answer: Answer = field(default_factory=Answer)
    place: Place | None = None
    reading: asyncio.Task[None] = field(init=False)
    ended: float = 0.0

    @property
    def gate(self) -> str:
        """Where its provider waits after three deltas."""
        return f"gate-{self.conversation}"

    @property
    def script(self) -> str:
        """What its message asks of the provider."""
        return f"[fake chunks=10 delay=10 gate={self.gate} gate_at=3 key={self.conversation} {self.freeze.script}]"


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(LONG_ROUNDS, marks=[pytest.mark.long, pytest.mark.timeout(LONG_ROUNDS * 60)])]
)
async def test_an_owner_that_wakes_up_after_its_lease_writes_and_asks_nothing(stack: Stack, rounds: int) -> None:
    for _ in range(rounds):
        await freeze_and_wake(stack)


async def freeze_and_wake(stack: Stack) -> None:
    cluster = stack.cluster
    await stack.whole()
    async with stack.client() as client, direct(stack, FROZEN) as replica, contextlib.AsyncExitStack() as opened:
        # All triggers first: making one waits for the transactions that others hold.
        runs = [await prepare(stack, client, replica, freeze, opened) for freeze in FREEZES]
        for run in runs:
            await bring_to_its_point(stack, client, replica, run)
            opened.callback(run.reading.cancel)
        frozen = time.monotonic()
        cluster.pause("conversation", FROZEN)
        try:
            await finish_elsewhere(stack, client, runs, frozen)
            # What the new owners told billing is booked by then, so that its tables stand still as well.
            await stack.told()
            before, calls = stack.record.snapshot(), len(stack.provider.calls)
        finally:
            cluster.resume("conversation", FROZEN)
        await nothing_happens(stack, before, calls)
        assert not cluster.has_ended("conversation", FROZEN)


async def prepare(
    stack: Stack, client: Client, replica: Direct, freeze: Freeze, opened: contextlib.AsyncExitStack
) -> Frozen:
    """The run at its gate, and its hold; a run whose start is to be held is not started yet."""
    run = Frozen(freeze, await client.create_conversation())
    also = f"NEW.thread_id = '{run.conversation}'" if freeze.knows_thread else ""
    if not freeze.knows_thread:
        also = f"NEW.run_id = '{await replica.start(run.conversation, run.script)}'"
        run.reading = asyncio.create_task(timed(run, client.follow(run.conversation, run.answer)))
        await stack.provider.until(lambda calls: any(call.held == run.gate for call in calls))
    if freeze.point is not None:
        run.place = await opened.enter_async_context(placed(stack, freeze.point, also))
    return run


async def timed(run: Frozen, reading: Awaitable[Answer]) -> None:
    await reading
    run.ended = time.monotonic()


async def bring_to_its_point(stack: Stack, client: Client, replica: Direct, run: Frozen) -> None:
    if run.place is None:
        await until(lambda: run.answer.text)
        return
    if run.freeze.point is START:
        run.reading = asyncio.create_task(
            timed(run, client.read_to_end(run.conversation, run.script, answer=run.answer))
        )
    elif run.freeze.knows_thread:
        await replica.start(run.conversation, run.script)
        run.reading = asyncio.create_task(timed(run, client.follow(run.conversation, run.answer)))
    else:
        stack.provider.open_gate(run.gate)
    if run.freeze.point is HOLD:  # held in billing, which does what this owner asked for
        await run.place.held()
        return
    while await run.place.reached(run.conversation) != FROZEN:
        run.place.drop()  # the gateway asks the other replica


async def finish_elsewhere(stack: Stack, client: Client, runs: list[Frozen], frozen: float) -> None:
    for run in runs:
        stack.provider.open_gate(run.gate)
        if run.place is not None and run.freeze.arrives:
            run.place.let_go(arrives=True)
    for run in runs:
        if run.place is not None and not run.freeze.arrives:
            # Its own session gives up; the new owner must not be held at the same point.
            await until(lambda: is_taken_over(stack, run.conversation))  # noqa: B023
            run.place.let_go(arrives=False)
    await asyncio.wait([run.reading for run in runs], timeout=frozen + END_SECONDS - time.monotonic())
    open_still = {run.freeze.name: stack.record.run(run.conversation) for run in runs if not run.reading.done()}
    assert open_still == {}
    for run in runs:
        facts = await check_answer(stack.record, client, run.conversation, run.answer)
        assert run.answer.connections == 1, "the client noticed"
        FIGURES[f"frozen {run.freeze.name}"].add(
            run.ended - frozen, takeovers=facts.takeovers, superseded=run.answer.withdrawals
        )
    stack.record.check_at_rest()
    stack.record.check_ledger(stack.provider.calls)


def is_taken_over(stack: Stack, conversation: str) -> bool:
    run = stack.record.run(conversation)
    return run is not None and run.epoch > 1


async def nothing_happens(stack: Stack, before: object, calls: int) -> None:
    until_then = time.monotonic() + AWAKE_SECONDS
    while time.monotonic() < until_then:
        await asyncio.sleep(1)
        assert await asyncio.to_thread(stack.record.snapshot) == before
        assert len(stack.provider.calls) == calls
