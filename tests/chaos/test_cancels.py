"""A cancel closes the provider's connection within a second, whoever asks and whatever is away."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from tests.chaos.direct import direct
from tests.chaos.figures import FIGURES
from tests.chaos.stack import REPLICAS, Stack, until, within
from tests.support.http import Answer

CLOSE_SECONDS = 1.0
END_SECONDS = 5.0
LONG_ROUNDS = 20
# A provider that talks, one that fell silent, and one that goes on after we left.
TALKING = "[fake chunks=1000 delay=20]"
SILENT = "[fake chunks=1000 hang=5]"
STUBBORN = "[fake chunks=1000 delay=20 ignore_close=1]"


@dataclass(frozen=True)
class Way:
    """Who cancels what. `gateway` 0: the replica that does not own the run, directly."""

    name: str
    gateway: int
    script: str = TALKING
    has_nats: bool = True

    def __str__(self) -> str:
        return self.name


WAYS = (
    Way("same gateway", 1),
    Way("another gateway", 2),
    Way("another replica", 0),
    Way("another replica, silent provider", 0, SILENT),
    Way("another replica without NATS", 0, has_nats=False),
    Way("another replica without NATS, silent provider", 0, SILENT, has_nats=False),
    Way("another gateway, provider that ignores it", 2, STUBBORN),
)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("rounds", [1, pytest.param(LONG_ROUNDS, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
async def test_a_cancel_closes_the_provider_and_keeps_the_text(stack: Stack, way: Way, rounds: int) -> None:
    assert stack.nats is not None
    await stack.whole()
    if not way.has_nats:
        stack.nats.kill()
    try:
        for _ in range(rounds):
            await cancel_once(stack, way)
    finally:
        if not way.has_nats:
            stack.nats.start()


async def cancel_once(stack: Stack, way: Way) -> None:
    answer = Answer()
    async with stack.client(1) as client:
        conversation = await client.create_conversation()
        reading = asyncio.create_task(client.read_to_end(conversation, way.script, answer=answer))
        await until(lambda: len(answer.text) > 10)
        owner = await stack.owner_of(conversation)
        asked = time.monotonic()
        cancelling = asyncio.create_task(cancel(stack, way, conversation, owner))
        call = stack.provider.calls[-1]
        await stack.provider.until(lambda _: call.client_closed, END_SECONDS)
        closed = (call.client_closed or 0.0) - asked
        await within(END_SECONDS, asyncio.gather(cancelling, reading))
        assert answer.end is not None
        assert (answer.end.event, answer.end.data["finish_reason"]) == ("done", "cancelled")
        _, reply = await client.messages(conversation)
        assert (reply["status"], reply["content"]) == ("cancelled", answer.text)
        again = await client.ask(conversation, "[fake chunks=2]")
    assert again.end is not None
    assert again.end.event == "done"
    assert closed <= CLOSE_SECONDS
    FIGURES[f"cancel, {way}: provider closed"].add(closed)


async def cancel(stack: Stack, way: Way, conversation: str, owner: int) -> None:
    if way.gateway:
        async with stack.client(way.gateway) as client:
            await client.cancel(conversation)
        return
    other = next(number for number in REPLICAS if number != owner)
    async with direct(stack, other) as replica:
        await replica.cancel(conversation)
