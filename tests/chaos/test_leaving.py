"""An answer ends without followers: over HTTP, through two gateways, whatever dies (durability.md 20)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.stack import Stack, until
from tests.support.http import Answer, Client

SECONDS = 5.0
LATEST = SECONDS + 3.0 + 1.0  # a busy machine has the last second
LEASE = 8.0  # more, when a process died with its clients and said nothing
SCRIPT = "[fake chunks=3000 delay=20]"
OPTION = {"cancel_after_s": SECONDS}


@asynccontextmanager
async def reader(client: Client, conversation: str, *, starts: bool = False) -> AsyncIterator[Answer]:
    """A client that has text, meanwhile; then its connection is closed."""
    answer = Answer()

    async def read() -> None:
        stream = client.post(conversation, SCRIPT, on_disconnect=OPTION) if starts else client.resume(conversation)
        async with stream as frames:
            async for frame in frames:
                answer.add(frame)

    task = asyncio.create_task(read())
    try:
        await until(lambda: answer.text or task.done())
        assert answer.text
        yield answer
    finally:
        task.cancel()
        await asyncio.wait({task})


async def closed_after(stack: Stack, since: float, within: float) -> float:
    """Seconds until the provider's connection was closed."""
    call = stack.provider.calls[-1]
    await stack.provider.until(lambda _: call.client_closed, within + 2)
    assert call.client_closed is not None
    return call.client_closed - since


async def check_cancelled(stack: Stack, conversation: str) -> None:
    async with stack.client(2) as client:
        _, reply = await client.messages(conversation)
    assert reply["status"] == "cancelled"
    stack.record.check_at_rest()


async def test_it_lives_while_one_of_two_gateways_has_a_client(stack: Stack) -> None:
    await stack.whole()
    async with stack.client(1) as one, stack.client(2) as two:
        conversation = await one.create_conversation()
        first = reader(one, conversation, starts=True)
        await first.__aenter__()
        async with reader(two, conversation) as second:
            await first.__aexit__(None, None, None)
            await asyncio.sleep(LATEST)  # time must pass: what is proven is that nothing happens in it
            assert second.end is None
            assert stack.provider.calls[-1].client_closed is None
        left = time.monotonic()
        assert SECONDS <= await closed_after(stack, left, LATEST) <= LATEST
    await check_cancelled(stack, conversation)


async def test_a_gateway_that_is_killed_has_no_clients(stack: Stack) -> None:
    await stack.whole()
    async with stack.client(1) as one:
        conversation = await one.create_conversation()
        async with reader(one, conversation, starts=True):
            killed = time.monotonic()
            stack.cluster.kill("gateway", 1)
            assert SECONDS <= await closed_after(stack, killed, LATEST + LEASE) <= LATEST + LEASE
    await check_cancelled(stack, conversation)


@pytest.mark.long
async def test_an_owner_s_death_is_no_leaving(stack: Stack) -> None:
    await stack.whole()
    async with stack.client(1) as one:
        conversation = await one.create_conversation()
        async with reader(one, conversation, starts=True) as answer:
            stack.cluster.kill("conversation", await stack.owner_of(conversation))
            await until(lambda: answer.withdrawals, 15.0)
            await asyncio.sleep(LATEST)  # as above
            assert answer.end is None
            assert stack.provider.calls[-1].client_closed is None
            await one.cancel(conversation)
            await until(lambda: answer.end, 15.0)
