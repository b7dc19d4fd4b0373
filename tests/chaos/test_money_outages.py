"""Billing is away for long: new runs are refused in time, those under way end, nothing is lost, all is booked later."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest

from kit.money import format_usd
from services.conversation.limits import HOLD_WAIT_SECONDS
from tests.chaos.figures import FIGURES
from tests.chaos.record import check_answer
from tests.chaos.stack import Stack, until, within
from tests.support.cluster import Cluster
from tests.support.http import Answer, Client, Refused

# What a refusal may take beyond the wait itself.
GRACE_SECONDS = 1.0
DONE_SECONDS = 1.0
CANCEL_SECONDS = 1.0
ASKING = 3
LONG_ROUNDS = 20

HARMS: dict[str, tuple[Callable[[Cluster, str], None], Callable[[Cluster, str], None]]] = {
    "killed": (Cluster.kill, Cluster.restart),
    "frozen": (Cluster.pause, Cluster.resume),
}
OF_RUN = """
SELECT c.status, c.usage_source, h.status, l.cost_nano FROM conversation.api_calls c
LEFT JOIN billing.holds h ON h.api_call_id = c.id LEFT JOIN billing.cost_ledger l ON l.api_call_id = c.id
WHERE c.run_id = %s ORDER BY c.started_at, c.id
"""
# Its call was asked for and is not recorded as sent.
IS_WAITING = """
SELECT r.id FROM conversation.ai_runs r JOIN conversation.api_calls c ON c.run_id = r.id
WHERE r.thread_id = %s AND c.status = 'started' AND r.created_at < clock_timestamp() - interval '0.5 s'
"""


@dataclass
class Asked:
    """A message that was sent while billing was away, and what became of it."""

    conversation: str
    text: str
    key: str
    refusal: Refused
    seconds: float


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(
    "rounds", [1, pytest.param(LONG_ROUNDS, marks=[pytest.mark.long, pytest.mark.timeout(LONG_ROUNDS * 60)])]
)
async def test_without_billing_nothing_new_is_begun_and_nothing_is_lost(stack: Stack, harm: str, rounds: int) -> None:
    for _ in range(rounds):
        await go_without(stack, harm)


async def go_without(stack: Stack, harm: str) -> None:
    await stack.whole()
    await stack.told()
    begin, mend = HARMS[harm]
    async with stack.client() as client:
        under_way, gate, answer = await client.create_conversation(), f"gate-{uuid4()}", Answer()
        script = f"[fake chunks=8 delay=5 gate={gate} gate_at=3]"
        reading = asyncio.create_task(client.read_to_end(under_way, script, answer=answer))
        await until(lambda: answer.text)
        begin(stack.cluster, "billing")
        try:
            asked = await asyncio.gather(*(ask(client) for _ in range(ASKING)))
            cancelled = await cancel_while_waiting(stack, client)
            stack.provider.open_gate(gate)
            opened = time.monotonic()
            await within(DONE_SECONDS, reading)
            ended = time.monotonic() - opened
            run = await check_answer(stack.record, client, under_way, answer)
            # `done` came, with its cost, and billing has not heard of it yet.
            assert answer.end is not None
            ((_, _, hold, booked),) = stack.record.rows(OF_RUN, run.id)
            assert (hold, booked) == ("open", None)
            assert float(answer.end.data["cost_usd"]) > 0
            for one in asked:
                await check_refused(stack, client, one)
        finally:
            mend(stack.cluster, "billing")
        await stack.cluster.ready("billing")
        back = time.monotonic()
        await stack.told()  # however long the outage was
        told = time.monotonic() - back
        ((status, source, hold, booked),) = stack.record.rows(OF_RUN, run.id)
        assert (status, source, hold) == ("succeeded", "provider", "settled")
        assert format_usd(booked) == answer.end.data["cost_usd"]
        assert stack.record.rows(OF_RUN, cancelled) == [("cancelled", "none", "released", None)]
        for one in asked:
            await ask_again(stack, client, one)
    await stack.check_books()
    FIGURES[f"billing {harm}: a new run refused"].add(max(one.seconds for one in asked))
    FIGURES[f"billing {harm}: done of a run under way"].add(ended)
    FIGURES[f"billing {harm}: all booked after its return"].add(told)


async def ask(client: Client) -> Asked:
    """Asks, and is refused in time."""
    conversation, key, text = await client.create_conversation(), str(uuid4()), "[fake chunks=2]"
    begun = time.monotonic()
    with pytest.raises(Refused) as refused:
        await client.ask(conversation, text, key=key)
    return Asked(conversation, text, key, refused.value, time.monotonic() - begun)


async def check_refused(stack: Stack, client: Client, asked: Asked) -> None:
    """The client was told in time; its message is kept and costs nothing."""
    assert (asked.refusal.status, asked.refusal.body["code"]) == (503, "UNAVAILABLE")
    assert asked.seconds <= HOLD_WAIT_SECONDS + GRACE_SECONDS
    run = await stack.run_of(asked.conversation)
    assert run.status == "failed"
    assert stack.calls_of(run.id) == []
    ((status, source, _, booked),) = stack.record.rows(OF_RUN, run.id)
    assert (status, source, booked) == ("failed", "none", None)
    assert [content(message) for message in await client.messages(asked.conversation)] == [("user", asked.text)]


async def ask_again(stack: Stack, client: Client, asked: Asked) -> None:
    """The same request, with the same key: the message that was kept gets its answer."""
    run = await stack.run_of(asked.conversation)
    assert stack.record.rows(OF_RUN, run.id) == [("failed", "none", "released", None)]
    answer = await client.ask(asked.conversation, asked.text, key=asked.key)
    await check_answer(stack.record, client, asked.conversation, answer)


async def cancel_while_waiting(stack: Stack, client: Client) -> UUID:
    """Cancels a run that waits for its hold: it ends at once. Returns the run."""
    conversation, answer = await client.create_conversation(), Answer()
    reading = asyncio.create_task(client.read_to_end(conversation, "[fake chunks=2]", answer=answer))
    ((run,),) = await until(lambda: stack.record.rows(IS_WAITING, conversation))
    asked = time.monotonic()
    await within(CANCEL_SECONDS, asyncio.gather(client.cancel(conversation), reading))
    FIGURES["billing away: a cancel"].add(time.monotonic() - asked)
    assert answer.end is not None
    assert (answer.end.event, answer.end.data["finish_reason"]) == ("done", "cancelled")
    return run


def content(message: dict[str, Any]) -> tuple[str, str]:
    """Who says what."""
    return message["role"], message["content"]
