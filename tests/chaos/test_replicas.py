"""A conversation replica dies or freezes for good under attached clients: their one response goes on to `done`."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.chaos.direct import direct
from tests.chaos.figures import FIGURES
from tests.chaos.record import check_answer
from tests.chaos.stack import Stack, until
from tests.support.cluster import Cluster
from tests.support.http import Answer

READERS = 6
END_SECONDS = 15.0
SCRIPT = "[fake chunks=100 delay=20]"


HARMS: dict[str, Callable[[Cluster, str, int], None]] = {"killed": Cluster.kill, "frozen": Cluster.pause}


@pytest.mark.parametrize(
    ("whose", "harm"),
    [
        ("the owner", "frozen"),
        ("another replica", "killed"),
        pytest.param("the owner", "killed", marks=pytest.mark.long),
        pytest.param("another replica", "frozen", marks=pytest.mark.long),
    ],
)
async def test_attached_clients_do_not_notice(stack: Stack, whose: str, harm: str) -> None:
    cluster = stack.cluster
    # A new gateway suspects nobody, so that it spreads its streams over both replicas.
    cluster.kill("gateway", 1)
    await stack.whole()
    answers = [Answer() for _ in range(READERS)]
    victim = 1 if whose == "the owner" else 2
    async with stack.client(1) as client, direct(stack, 1) as owner:
        conversation = await client.create_conversation()
        await owner.start(conversation, SCRIPT)
        reading = [asyncio.create_task(client.follow(conversation, answer)) for answer in answers]
        await until(lambda: all(answer.text for answer in answers))
        before = await failovers(stack)
        harmed = time.monotonic()
        HARMS[harm](cluster, "conversation", victim)
        try:
            await asyncio.wait(reading, timeout=END_SECONDS)
            seconds = time.monotonic() - harmed
            assert all(task.done() and task.exception() is None for task in reading), reading
            moved = await failovers(stack) - before
            for answer in answers:
                await check_answer(stack.record, client, conversation, answer)
        finally:
            cluster.kill("conversation", victim)
    assert 0 < moved < READERS, "nobody was attached to it, or everybody"
    assert all(answer.connections == 1 for answer in answers)
    withdrawals = answers[0].withdrawals
    assert withdrawals == (whose == "the owner")
    stack.record.check_at_rest()
    stack.record.check_ledger(stack.provider.calls)
    FIGURES[f"{whose} {harm} under {READERS} readers"].add(seconds, moved=int(moved), superseded=withdrawals)


async def failovers(stack: Stack) -> float:
    """How often a stream went on at another replica, by the gateway's count."""
    async with stack.client(1) as client:
        text = await client.text("/metrics")
    lines = [line for line in text.splitlines() if line.startswith("threadloom_gateway_failovers_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
