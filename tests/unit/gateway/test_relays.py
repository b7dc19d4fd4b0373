"""Relays: many readers on one stream, each with its own pace, and every way such a stream can end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import pytest
from prometheus_client import REGISTRY

import kit.serving
from kit.callers import Caller, Role
from services.conversation import limits as service_limits
from services.gateway import relays as relays_module
from services.gateway.clients import Clients
from services.gateway.following import Follower, Target
from services.gateway.limits import BUFFER_BATCHES, BUFFER_BYTES, RELAY_SECONDS, Patience
from services.gateway.relays import Follow, FollowLost, Relays
from services.gateway.wire import sse
from services.gateway.wire.conversations import ConversationsEncoder
from tests.support.slow_proxy import SlowProxy
from tests.unit.gateway.replica import (
    CREDENTIAL,
    MESSAGE_ID,
    PROJECT_ID,
    RUN_ID,
    THREAD_ID,
    Batches,
    Replica,
    batch,
    delta,
    finished,
    play,
    started,
)
from tests.unit.gateway.running import NOWHERE, QUICK, Reply, running_gateway
from threadloom.conversation.v1 import relay_service_pb2 as api
from threadloom.conversation.v1.conversation_service_pb2 import FollowRequest, RunRequest
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import RunEventBatch

ALICE = Caller(Role.USER, UUID(PROJECT_ID), "alice")
RESUME = Target(ALICE, "request-1", THREAD_ID, run_id=RUN_ID)
START = Target(ALICE, "request-1", THREAD_ID, run=RunRequest(thread_id=THREAD_ID, request_id="key-1"))
# As long as a busy machine may take.
LONG = Patience(silence=10.0, start_silence=10.0, unreachable=30.0, reader_stall=60.0)
READERS = 50
MAXIMUM_SECONDS = 30.0


def figure(name: str) -> float:
    """A metric without labels, now."""
    return REGISTRY.get_sample_value(f"threadloom_{name}") or 0.0


async def until(holds: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        await asyncio.sleep(0.01)


async def nothing_is_left() -> None:
    """Both ends have forgotten every follow."""
    await until(lambda: figure("relayed_follows") == 0 and figure("gateway_relays") == 0)


def log_of(length: int, pause: float = 0.0, at: tuple[int, asyncio.Event] | None = None) -> Callable[[Any], Batches]:
    """A run of so many events, one a batch, told from wherever one asks; the event is set at a seq."""

    async def script(request: Any) -> Batches:
        for seq in range(getattr(request, "after_seq", 0) + 1, length + 1):
            yield batch(finished(seq) if seq == length else started(seq) if seq == 1 else delta(seq))
            if at is not None and seq == at[0]:
                at[1].set()
            await asyncio.sleep(pause)

    return script


class Readers:
    """Followers that share a gateway's relays."""

    def __init__(self, *addresses: str, patience: Patience = LONG) -> None:
        self._clients = Clients(addresses, (NOWHERE,), CREDENTIAL)
        self.relays, self._patience = Relays(self._clients.conversation), patience

    async def __aenter__(self) -> "Readers":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clients.close()
        await nothing_is_left()

    def follower(self, target: Target = RESUME) -> Follower:
        return Follower(self.relays, target, self._patience)

    def follow(self, after: int = 0) -> Follow:
        """A bare follow at the first replica."""
        (stubs,) = self.relays.conversation.in_order()
        asked = FollowRequest(run_id=RUN_ID, after_seq=after)
        return self.relays.to(stubs).follow(ALICE, "request-1", asked)


async def rest(follower: Follower) -> list[int]:
    """The seqs until the terminal event."""
    found: list[int] = []
    try:
        async with asyncio.timeout(MAXIMUM_SECONDS):
            while not follower.is_done:
                found += [event.seq for event in await follower.next()]
    finally:
        follower.close()
    return found


async def some(follower: Follower) -> list[int]:
    """The seqs of the next events."""
    async with asyncio.timeout(MAXIMUM_SECONDS):
        while True:
            found = [event.seq for event in await follower.next()]
            if found:
                return found


def sized(seq: int, size: int) -> RunEventBatch:
    """A batch of exactly so many bytes."""
    found = batch(delta(seq, "x"))
    for _ in range(3):  # the length fields grow with the text
        text = found.events[0].text_delta.text
        found.events[0].text_delta.text = "x" * (len(text) + size - found.ByteSize())
    assert found.ByteSize() == size
    return found


# ---------------------------------------------------------------------- slow readers


async def test_a_slow_reader_among_fifty_delays_nobody_and_gets_everything() -> None:
    length = BUFFER_BATCHES + 100
    async with Replica(follow=log_of(length, pause=0.001)) as one, Readers(one.address) as readers:
        slow, overflows = readers.follower(), figure("gateway_overflows_total")
        first = await some(slow)
        others = await asyncio.gather(*(rest(readers.follower()) for _ in range(READERS - 1)))
        assert others == [list(range(1, length + 1))] * (READERS - 1)
        await until(lambda: figure("gateway_overflows_total") > overflows)
        assert first + await rest(slow) == list(range(1, length + 1))
    assert one.follows[-1].after_seq > BUFFER_BATCHES  # what had waited was not asked for again


@pytest.mark.parametrize(
    ("batches", "is_lost"),
    [
        ([batch(delta(seq)) for seq in range(1, BUFFER_BATCHES + 1)], False),
        ([batch(delta(seq)) for seq in range(1, BUFFER_BATCHES + 2)], True),
        ([sized(1, BUFFER_BYTES - 1000), sized(2, 1000)], False),
        ([sized(1, BUFFER_BYTES - 1000), sized(2, 1001)], True),
    ],
    ids=["as many batches as may wait", "one more", "as many bytes as may wait", "one byte more"],
)
async def test_a_buffer_holds_what_it_may_and_no_more(batches: list[RunEventBatch], is_lost: bool) -> None:
    async with Replica(follow=play(*batches, batch(finished(999)))) as one, Readers(one.address) as readers:
        one.follow = play(*batches)
        follow = readers.follow()
        one_more = readers.follow()  # what it gets is behind all of the first
        await until(lambda: len(one.follows) == 2)
        assert await one_more.read() is not None
        found = [await follow.read() for _ in batches]
        assert found == batches
        if is_lost:
            with pytest.raises(FollowLost, match="slow"):
                await follow.read()
        else:
            assert await follow.read() is None
        one_more.cancel()


async def test_a_message_larger_than_the_buffer_brings_its_reader_further() -> None:
    pages = [sized(seq, BUFFER_BYTES * 9 // 10) for seq in range(1, 9)]
    pages.append(batch(finished(9)))

    async def script(request: FollowRequest) -> Batches:
        for page in pages[request.after_seq :]:
            yield page

    async with Replica(follow=script) as one, Readers(one.address, patience=QUICK) as readers:
        assert await rest(readers.follower()) == list(range(1, 10))


async def test_what_a_reader_took_for_itself_is_no_silence_of_the_replicas() -> None:
    async with (
        Replica(run=play(batch(started(1)), 60.0)) as dying,
        Replica(follow=play(batch(finished(2)))) as other,
        Readers(dying.address, other.address, patience=QUICK) as readers,
    ):
        follower = readers.follower(START)
        assert await some(follower) == [1]
        await dying.die()
        await asyncio.sleep(QUICK.unreachable + 0.1)  # time must pass: the reader takes nothing meanwhile
        assert await rest(follower) == [2]


# ---------------------------------------------------------------------- a relay that breaks


def wire(length: int) -> bytes:
    events: list[RunEvent] = [started(1), *(delta(seq) for seq in range(2, length)), finished(length)]
    encoder = ConversationsEncoder(RUN_ID, MESSAGE_ID)
    return b"".join(sse.to_bytes(frame) for event in events for frame in encoder.encode(event))


async def read_by_fifty(*addresses: str) -> list[Reply]:
    """Fifty clients, none of which connects twice."""
    async with running_gateway(*addresses, patience=LONG) as gateway:
        path = f"/v1/conversations/{THREAD_ID}/messages"
        asks = [gateway.ask("POST", path, {"content": "Hello"}) for _ in range(READERS)]
        return await asyncio.gather(*asks)


@pytest.mark.parametrize("how", ["killed", "reset", "stopped", "aged"])
async def test_fifty_readers_of_a_relay_that_is_cut_get_their_text_once(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, reached = 60, asyncio.Event()
    if how == "aged":  # GOAWAY, and then the end of what is still open
        monkeypatch.setattr(
            kit.serving,
            "SERVER_OPTIONS",
            [("grpc.max_connection_age_ms", 300), ("grpc.max_connection_age_grace_ms", 200)],
        )
    script = log_of(length, pause=0.02, at=(10, reached))
    async with Replica(run=script, follow=script) as cut:
        monkeypatch.undo()
        async with Replica(run=script, follow=script) as other:
            with SlowProxy(int(cut.address.partition(":")[2])) as proxy:
                reading = asyncio.create_task(read_by_fifty(f"127.0.0.1:{proxy.port}", other.address))
                await asyncio.wait_for(reached.wait(), MAXIMUM_SECONDS)
                if how == "killed":
                    await cut.die()
                elif how == "stopped":
                    await cut.stop(0.2)
                elif how == "reset":
                    await asyncio.to_thread(proxy.cut)
                replies = await asyncio.wait_for(reading, MAXIMUM_SECONDS)
        moved = len(other.follows) + len(cut.follows)
    assert moved > 0  # it was cut under some of them
    assert {(reply.status, reply.is_whole) for reply in replies} == {(200, True)}
    assert {reply.body for reply in replies} == {wire(length)}
    assert len({run.request_id for run in (*cut.runs, *other.runs)}) == READERS  # no new key: nobody asked again
    await nothing_is_left()


async def test_a_frozen_replica_is_left_by_all_its_followers() -> None:
    async with Replica(follow=play(batch(started(1)), 60.0)) as frozen, Replica(follow=log_of(2)) as other:
        with SlowProxy(int(frozen.address.partition(":")[2])) as proxy:
            async with Readers(f"127.0.0.1:{proxy.port}", other.address, patience=QUICK) as readers:
                followers = [readers.follower() for _ in range(10)]
                firsts = [await some(follower) for follower in followers]
                proxy.to_client_seconds = 3600.0
                began = time.monotonic()
                rests = await asyncio.gather(*(rest(follower) for follower in followers))
                assert time.monotonic() - began < QUICK.silence + 5.0
    assert [first + more for first, more in zip(firsts, rests, strict=True)] == [[1, 2]] * 10


class DeadAtFirst(Replica):
    """Its first relay takes every ask and tells nothing, as one whose other end is frozen does."""

    relays = 0

    async def Relay(self, request_iterator: Any, context: Any) -> AsyncIterator[api.RelayResponse]:  # type: ignore[override]
        self.relays += 1
        if self.relays == 1:
            async for _ in request_iterator:
                pass
        async for response in super().Relay(request_iterator, context):
            yield response


async def test_a_dead_stream_is_not_asked_for_ever() -> None:
    async with DeadAtFirst(follow=log_of(3)) as one, Readers(one.address, patience=QUICK) as readers:
        found = await asyncio.gather(*(rest(readers.follower()) for _ in range(5)))
        assert found == [[1, 2, 3]] * 5
        assert await rest(readers.follower()) == [1, 2, 3]
        assert one.relays == 2  # one of them for all who left the first


# ---------------------------------------------------------------------- the life of a relay


async def test_a_relay_retires_and_ends_with_its_last_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays_module, "RELAY_SECONDS", 0.3)
    async with Replica(follow=play(batch(started(1)), 60.0)) as one, Readers(one.address) as readers:
        (stubs,) = readers.relays.conversation.in_order()
        old = readers.relays.to(stubs)
        first, second = readers.follow(), readers.follow()
        assert await first.read() is not None
        await until(lambda: not old.is_open)
        third = readers.follow()
        assert await third.read() is not None
        assert figure("gateway_relays") == 2
        first.cancel()
        assert await second.read() is not None  # a follow keeps the old one open
        assert figure("gateway_relays") == 2
        second.cancel()
        await until(lambda: figure("gateway_relays") == 1)
        third.cancel()


def test_a_relay_ends_before_its_connection_is_cut() -> None:
    turn_seconds = 120.0
    grace = dict(kit.serving.SERVER_OPTIONS)["grpc.max_connection_age_grace_ms"] / 1000
    assert RELAY_SECONDS + turn_seconds < grace


async def test_a_reader_that_leaves_ends_its_follow_at_the_replica() -> None:
    async with Replica(follow=play(batch(started(1)), 60.0)) as one, Readers(one.address) as readers:
        leaving, staying = readers.follow(), readers.follow()
        assert await leaving.read() is not None
        assert await staying.read() is not None
        leaving.cancel()
        await until(lambda: figure("relayed_follows") == 1, seconds=1.0)
        assert one.cancelled.is_set()
        staying.cancel()


async def test_a_gateway_that_is_gone_ends_all_its_follows_though_it_never_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_limits, "RELAY_WAITING_BYTES", 64 * 1024)
    large = [sized(seq, 256 * 1024) for seq in range(1, 100)]
    async with Replica(follow=play(*large, 60.0)) as one:
        with SlowProxy(int(one.address.partition(":")[2])) as proxy:
            async with Readers(f"127.0.0.1:{proxy.port}") as readers:
                follows = [readers.follow()]
                assert await follows[0].read() is not None
                proxy.to_client_seconds = 3600.0
                follows += [readers.follow() for _ in range(19)]
                await until(lambda: figure("relayed_follows") == 20)
                await asyncio.to_thread(proxy.cut)
                await until(lambda: figure("relayed_follows") == 0)


async def test_a_start_whose_answer_is_lost_is_asked_again_under_its_key() -> None:
    async with (
        Replica(run=play(60.0)) as dying,
        Replica(run=log_of(3)) as other,
        Readers(dying.address, other.address) as readers,
    ):
        reading = asyncio.create_task(rest(readers.follower(START)))
        await dying.asked.wait()
        await dying.die()
        assert await reading == [1, 2, 3]
        assert [run.request_id for run in (*dying.runs, *other.runs)] == ["key-1", "key-1"]
