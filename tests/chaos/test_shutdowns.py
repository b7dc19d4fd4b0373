"""SIGTERM: a drain that is long enough cuts nothing, a shorter one hands over, a gateway's client goes elsewhere."""

import asyncio
import time
from uuid import uuid4

from tests.chaos.direct import direct
from tests.chaos.figures import FIGURES
from tests.chaos.record import check_answer
from tests.chaos.stack import Stack, until, within
from tests.support.http import Answer

OWNER = 1
# From the end of a drain that was too short to the next call of the provider.
HAND_OVER_SECONDS = 3.0
END_SECONDS = 15.0


async def test_a_drain_that_is_long_enough_cuts_no_answer(stack: Stack) -> None:
    cluster, answer = stack.cluster, Answer()
    await stack.whole()
    async with stack.client(1) as client, direct(stack, OWNER) as owner:
        conversation = await client.create_conversation()
        await owner.start(conversation, "[fake chunks=40 delay=20]")
        reading = asyncio.create_task(client.follow(conversation, answer))
        await until(lambda: answer.text)
        cluster.terminate("conversation", OWNER)
        await within(END_SECONDS, reading)
        run = await check_answer(stack.record, client, conversation, answer)
    await ended_in_order(stack)
    assert (run.epoch, run.takeovers, answer.withdrawals, answer.connections) == (1, 0, 0, 1)


async def test_a_drain_that_is_too_short_hands_the_run_over(stack: Stack) -> None:
    cluster, answer, gate = stack.cluster, Answer(), f"gate-{uuid4()}"
    await stack.whole()
    async with stack.client(1) as client, direct(stack, OWNER) as owner:
        conversation = await client.create_conversation()
        run_id = await owner.start(conversation, f"[fake chunks=20 delay=10 gate={gate} gate_at=10]")
        reading = asyncio.create_task(client.follow(conversation, answer))
        await until(lambda: answer.text)
        asked = time.monotonic()
        cluster.terminate("conversation", OWNER)
        # The drain ends when the old owner lets the provider go.
        (first,) = stack.calls_of(run_id)
        await stack.provider.until(lambda _: first.client_closed, END_SECONDS)
        second = (await until(lambda: stack.calls_of(run_id)[1:]))[0]
        stack.provider.open_gate(gate)
        await within(END_SECONDS, reading)
        ended = time.monotonic()
        run = await check_answer(stack.record, client, conversation, answer)
    await ended_in_order(stack)
    handed_over = second.arrived - (first.client_closed or 0.0)
    assert handed_over <= HAND_OVER_SECONDS
    # A hand-over is no takeover: nothing went wrong.
    assert (run.epoch, run.takeovers, answer.withdrawals, answer.connections) == (2, 0, 1, 1)
    stack.record.check_ledger(stack.provider.calls)
    FIGURES["drain too short: from its end to the next call"].add(handed_over)
    FIGURES["drain too short: from SIGTERM to the end"].add(ended - asked)


async def test_a_client_of_a_stopped_gateway_goes_on_at_another(stack: Stack) -> None:
    cluster, answer = stack.cluster, Answer()
    await stack.whole()
    async with stack.client(1, 2) as client:
        conversation = await client.create_conversation()
        asking = client.read_to_end(conversation, "[fake chunks=150 delay=20]", answer=answer)
        reading = asyncio.create_task(asking)
        await until(lambda: answer.text)
        cluster.terminate("gateway", 1)
        await within(END_SECONDS, reading)
        await check_answer(stack.record, client, conversation, answer)
    assert (answer.withdrawals, answer.connections) == (0, 2)
    await until(lambda: cluster.has_ended("gateway", 1))


async def ended_in_order(stack: Stack) -> None:
    """The stopped owner ends by itself and leaves nothing open."""
    await until(lambda: stack.cluster.has_ended("conversation", OWNER))
    stack.record.check_at_rest()
