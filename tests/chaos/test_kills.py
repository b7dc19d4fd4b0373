"""kill -9 of every kind of process at every named point of a run: nothing shown is lost, nothing hangs."""

import asyncio
import time

import pytest

from tests.chaos.figures import FIGURES
from tests.chaos.points import POINTS, Point, placed
from tests.chaos.record import check_answer
from tests.chaos.stack import Stack, within
from tests.support.http import Answer

VICTIMS = ("conversation", "gateway", "postgres", "nats")
# From the kill to the client's terminal frame.
END_SECONDS = 15.0
LONG_ROUNDS = 20


@pytest.mark.parametrize("point", POINTS, ids=str)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize(
    "rounds", [1, pytest.param(LONG_ROUNDS, marks=[pytest.mark.long, pytest.mark.timeout(LONG_ROUNDS * 60)])]
)
async def test_a_client_of_a_killed_process_ends_with_the_stored_text(
    supervised: Stack, victim: str, point: Point, rounds: int
) -> None:
    for number in range(rounds):
        # In turn the held write is lost with its sender, or it happens and only the answer is lost.
        await kill_at(supervised, victim, point, arrives=(number + POINTS.index(point)) % 2 == 1)


async def kill_at(stack: Stack, victim: str, point: Point, arrives: bool) -> None:
    cluster, answer = stack.cluster, Answer()
    await cluster.ready()
    unseen = stack.record.check_ledger(stack.provider.calls)
    cluster.settle()
    async with stack.client() as client:
        conversation = await client.insist(client.create_conversation)
        async with placed(stack, point) as place:
            asking = client.read_to_end(conversation, place.script, seconds=60.0, answer=answer)
            reading = asyncio.create_task(asking)
            owner = await place.reached(conversation)
            killed = time.monotonic()
            cluster.kill(victim, owner if victim == "conversation" else 1)
            place.open_gate()
            if victim != "postgres":  # that one took the held write and the hold with it
                place.let_go(arrives)
            try:
                await within(killed + END_SECONDS - time.monotonic(), reading)
                seconds = time.monotonic() - killed
            finally:
                reading.cancel()
        run = await check_answer(stack.record, client, conversation, answer)
    stack.record.check_at_rest()
    unseen = stack.record.check_ledger(stack.provider.calls) - unseen
    if victim == "conversation":
        assert answer.connections == 1, "the client noticed"
    elif victim != "postgres":
        assert answer.withdrawals == 0, "text was withdrawn although its owner lived"
    FIGURES[f"kill {victim} {point}"].add(
        seconds,
        superseded=answer.withdrawals,
        takeovers=run.takeovers,
        broken_transfers=answer.connections - 1,
        calls_the_provider_never_saw=unseen,
    )
