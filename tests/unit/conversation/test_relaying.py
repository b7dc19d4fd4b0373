"""A relay session on its own: what a gateway asks, and what it gets when it does not read."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from kit.errors import ServiceError
from kit.ids import new_id
from services.conversation import limits
from services.conversation.relaying import RelaySession
from threadloom.conversation.v1 import relay_service_pb2 as api
from threadloom.conversation.v1.conversation_service_pb2 import FollowRequest
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import RunEventBatch

PROJECT = str(new_id())
WAITING_BYTES, BATCH_BYTES, FOLLOWS, BATCHES = 64 * 1024, 4 * 1024, 20, 30

Batches = AsyncGenerator[RunEventBatch, None]
Script = Callable[[FollowRequest], Batches]


def relayed() -> float:
    return REGISTRY.get_sample_value("threadloom_relayed_follows") or 0.0


def ask(id: int, run_id: str = "") -> api.RelayRequest:
    caller = api.RelayCaller(role="user", project_id=PROJECT, user_id="alice", request_id=f"request-{id}")
    return api.RelayRequest(follow_id=id, follow=api.RelayFollow(caller=caller, follow=FollowRequest(run_id=run_id)))


def unfollow(id: int) -> api.RelayRequest:
    return api.RelayRequest(follow_id=id, unfollow=api.RelayUnfollow())


async def no_start(_: Any) -> Batches:
    raise AssertionError
    yield


async def for_ever(_: FollowRequest) -> Batches:
    await asyncio.Event().wait()
    yield RunEventBatch()


class Line:
    """The gateway's end. Asks are heard in one go, as they are when they came while the loop was busy."""

    def __init__(self, follow: Script, *asks: api.RelayRequest) -> None:
        self._asks: asyncio.Queue[api.RelayRequest | None] = asyncio.Queue()
        for one in asks:
            self._asks.put_nowait(one)
        self.told = RelaySession(no_start, follow).serve(self._hear())

    def end(self) -> None:
        """It asks no more."""
        self._asks.put_nowait(None)

    async def _hear(self) -> AsyncIterator[api.RelayRequest]:
        while (one := await self._asks.get()) is not None:
            yield one

    async def rest(self) -> list[api.RelayItem]:
        """Everything that is told from here on."""
        async with asyncio.timeout(10):
            return [item async for response in self.told for item in response.items]


async def test_a_gateway_that_does_not_read_holds_the_follows_and_then_gets_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RELAY_WAITING_BYTES", WAITING_BYTES)
    made = 0

    async def script(_: FollowRequest) -> Batches:
        nonlocal made
        for seq in range(1, BATCHES + 1):
            event = RunEvent(seq=seq)
            event.text_delta.text = "x" * BATCH_BYTES
            made += 1
            yield RunEventBatch(events=[event], last_seq=seq)

    line = Line(script, *(ask(id) for id in range(1, FOLLOWS + 1)))
    first = await anext(line.told)
    for _ in range(1000):  # the follows have every chance to go on
        await asyncio.sleep(0)
    taken = sum(item.HasField("batch") for item in first.items)
    # Behind the bound each follow waits with one batch in hand.
    assert FOLLOWS < made - taken <= WAITING_BYTES // BATCH_BYTES + 1 + FOLLOWS < FOLLOWS * BATCHES // 2

    found = list(first.items)
    async for response in line.told:
        found += response.items
        if sum(item.HasField("end") for item in found) == FOLLOWS:
            line.end()
    for id in range(1, FOLLOWS + 1):
        own = [item for item in found if item.follow_id == id]
        assert [item.batch.last_seq for item in own[:-1]] == list(range(1, BATCHES + 1))
        assert own[-1].HasField("end")


async def test_a_message_is_closed_once_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RELAY_MESSAGE_BYTES", 3 * BATCH_BYTES)

    async def script(_: FollowRequest) -> Batches:
        for seq in range(1, 11):
            event = RunEvent(seq=seq)
            event.text_delta.text = "x" * BATCH_BYTES
            yield RunEventBatch(events=[event], last_seq=seq)

    line = Line(script, ask(1))
    sizes = []
    async for response in line.told:
        sizes.append(len(response.items))
        if response.items[-1].HasField("end"):
            line.end()
    assert sizes == [3, 3, 3, 2]


@pytest.mark.parametrize("ids", [(0,), (-1,), (1, 1), (2, 1)])
async def test_follow_ids_that_do_not_rise_end_the_stream_with_all_its_follows(ids: tuple[int, ...]) -> None:
    line = Line(for_ever, *(ask(id) for id in ids))
    with pytest.raises(ServiceError) as found:
        await line.rest()
    assert (found.value.reason, found.value.metadata) == ("INVALID_OPTIONS", {"field": "follow_id"})
    assert relayed() == 0


async def test_a_follow_that_is_left_before_it_began_is_forgotten() -> None:
    line = Line(for_ever, ask(1), unfollow(1), unfollow(7), ask(2), unfollow(2))
    line.end()
    assert await line.rest() == []
    assert relayed() == 0


async def test_a_stream_that_ends_while_its_follows_wait_for_room_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RELAY_WAITING_BYTES", 1)

    async def stubborn(_: FollowRequest) -> Batches:
        """One that answers a cancel with an error, as a query does that is cut by its deadline."""
        yield RunEventBatch(last_seq=1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ServiceError("UNAVAILABLE", "The database is away.") from None

    line = Line(stubborn, *(ask(id) for id in range(1, 6)))
    await anext(line.told)
    for _ in range(100):
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await line.told.aclose()  # type: ignore[attr-defined]
    assert relayed() == 0
