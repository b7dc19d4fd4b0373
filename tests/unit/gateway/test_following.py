"""Failover against real gRPC servers that die, fall silent, forget and repeat themselves."""

import asyncio
import socket
import time
from uuid import UUID

import pytest

from kit.callers import Caller, Role
from kit.errors import ServiceError, internal, not_found, thread_not_found, unavailable
from services.gateway.clients import Clients
from services.gateway.following import Follower, Target, Unreachable
from services.gateway.relays import Relays
from tests.unit.gateway.replica import (
    CREDENTIAL,
    PROJECT_ID,
    RUN_ID,
    THREAD_ID,
    Replica,
    batch,
    delta,
    finished,
    play,
    started,
)
from tests.unit.gateway.running import NOWHERE, QUICK
from threadloom.conversation.v1.conversation_service_pb2 import RunRequest
from threadloom.conversation.v1.run_event_pb2 import RunEvent

ALICE = Caller(Role.USER, UUID(PROJECT_ID), "alice")
START = Target(ALICE, "request-1", THREAD_ID, run=RunRequest(thread_id=THREAD_ID, request_id="key-1"))
RESUME = Target(ALICE, "request-1", THREAD_ID, run_id=RUN_ID, after_seq=2)

WHOLE = (batch(started(1), delta(2)), batch(delta(3), delta(4)), batch(finished(5)))


def dead_address() -> str:
    """An address nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


async def seqs(target: Target, *addresses: str) -> list[int]:
    """The seqs a follower gives, to the end."""
    clients = Clients(addresses, (NOWHERE,), CREDENTIAL)
    follower = Follower(Relays(clients.conversation), target, QUICK)
    events: list[RunEvent] = []
    try:
        async with asyncio.timeout(10):
            while not follower.is_done:
                events += await follower.next()
    finally:
        follower.close()
        await clients.close()
    return [event.seq for event in events]


async def test_a_run_is_read_to_its_end() -> None:
    async with Replica(run=play(*WHOLE)) as one:
        assert await seqs(START, one.address) == [1, 2, 3, 4, 5]
    assert [run.request_id for run in one.runs] == ["key-1"]
    assert one.callers == [ALICE]


async def test_a_dead_replica_is_passed_over_with_the_same_key() -> None:
    async with Replica(run=play(*WHOLE)) as one:
        assert await seqs(START, dead_address(), one.address) == [1, 2, 3, 4, 5]
    assert [run.request_id for run in one.runs] == ["key-1"]


async def test_a_replica_that_dies_in_mid_run_is_replaced_from_the_last_seq() -> None:
    async with Replica() as dying, Replica(follow=play(batch(delta(3)), batch(finished(4)))) as other:
        dying.run = play(batch(started(1), delta(2)), 60.0)

        async def kill() -> None:
            await dying.asked.wait()
            await asyncio.sleep(0.1)
            await dying.die()

        killing = asyncio.create_task(kill())
        assert await seqs(START, dying.address, other.address) == [1, 2, 3, 4]
        await killing
    assert [(follow.run_id, follow.after_seq) for follow in other.follows] == [(RUN_ID, 2)]
    assert not other.runs


async def test_a_silent_replica_is_left() -> None:
    async with Replica(run=play(batch(started(1)), 60.0)) as silent, Replica(follow=play(batch(finished(2)))) as other:
        begin = time.monotonic()
        assert await seqs(START, silent.address, other.address) == [1, 2]
        assert time.monotonic() - begin >= QUICK.silence
        assert [follow.after_seq for follow in other.follows] == [1]
        async with asyncio.timeout(2):
            await silent.cancelled.wait()


async def test_a_replica_silent_from_the_start_is_left_with_the_same_key() -> None:
    async with Replica(run=play(60.0)) as silent, Replica(run=play(*WHOLE)) as other:
        assert await seqs(START, silent.address, other.address) == [1, 2, 3, 4, 5]
    assert [run.request_id for run in (*silent.runs, *other.runs)] == ["key-1", "key-1"]


async def test_heartbeats_keep_a_quiet_replica() -> None:
    beats = [step for _ in range(6) for step in (0.2, batch(last_seq=1))]
    async with Replica(run=play(batch(started(1)), *beats, batch(finished(2)))) as one, Replica() as other:
        assert await seqs(START, one.address, other.address) == [1, 2]
    assert not other.follows


async def test_repeated_events_are_dropped() -> None:
    script = play(batch(started(1), delta(2)), batch(delta(2), delta(3)), batch(delta(1)), batch(delta(3), finished(4)))
    async with Replica(run=script) as one:
        assert await seqs(START, one.address) == [1, 2, 3, 4]
    assert not one.follows


async def test_a_gap_is_asked_for_again() -> None:
    async with Replica(run=play(batch(started(1)), batch(delta(3), finished(4)), 60.0)) as one:
        one.follow = play(batch(delta(2), delta(3), finished(4)))
        assert await seqs(START, one.address) == [1, 2, 3, 4]
    assert [follow.after_seq for follow in one.follows] == [1]


async def test_a_gap_inside_a_batch_is_asked_for_again() -> None:
    async with Replica(run=play(batch(started(1), delta(2), delta(4)), 60.0)) as one:
        one.follow = play(batch(delta(3), delta(4)), batch(finished(5)))
        assert await seqs(START, one.address) == [1, 2, 3, 4, 5]
    assert [follow.after_seq for follow in one.follows] == [2]


async def test_an_end_without_a_terminal_event_is_no_end() -> None:
    async with Replica(run=play(batch(started(1)))) as one, Replica(follow=play(batch(finished(2)))) as other:
        assert await seqs(START, one.address, other.address) == [1, 2]


async def test_two_heartbeats_that_know_more_mean_lost_events() -> None:
    lossy = play(batch(started(1)), batch(last_seq=3), 0.05, batch(last_seq=3), 60.0)
    async with Replica(run=lossy) as one, Replica(follow=play(batch(delta(2), finished(3)))) as other:
        assert await seqs(START, one.address, other.address) == [1, 2, 3]
    assert [follow.after_seq for follow in other.follows] == [1]


@pytest.mark.parametrize("refusal", [thread_not_found(), not_found("run"), internal()])
async def test_a_refusal_is_final(refusal: ServiceError) -> None:
    async with Replica(run=play(refusal)) as one, Replica(run=play(*WHOLE)) as other:
        with pytest.raises(ServiceError) as found:
            await seqs(START, one.address, other.address)
    assert found.value.reason == refusal.reason
    assert len(one.runs) + len(other.runs) == 1


async def test_unavailable_is_asked_elsewhere_once() -> None:
    busy = play(unavailable("The database is away."))
    async with Replica(run=busy) as one, Replica(run=busy) as other:
        with pytest.raises(ServiceError) as found:
            await seqs(START, one.address, other.address)
        assert (len(one.runs), len(other.runs)) == (1, 1)
        other.run = play(*WHOLE)
        assert await seqs(START, one.address, other.address) == [1, 2, 3, 4, 5]
    assert found.value.message == "The database is away."


async def test_unavailable_in_mid_run_is_waited_out() -> None:
    attempts = 0

    async def away_twice(_: object):  # type: ignore[no-untyped-def]
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            raise unavailable("The database is away.")
        yield batch(finished(2))

    async with Replica(run=play(batch(started(1))), follow=away_twice) as one:
        assert await seqs(START, one.address) == [1, 2]


async def test_nobody_there_ends_after_the_patience() -> None:
    begin = time.monotonic()
    with pytest.raises(Unreachable):
        await seqs(START, dead_address(), dead_address())
    assert QUICK.unreachable <= time.monotonic() - begin < QUICK.unreachable + 2


async def test_a_resume_names_its_run_and_seq() -> None:
    async with Replica(follow=play(batch(delta(3), finished(4)))) as one:
        assert await seqs(RESUME, one.address) == [3, 4]
    assert [(follow.thread_id, follow.run_id, follow.after_seq) for follow in one.follows] == [(THREAD_ID, RUN_ID, 2)]


async def test_a_deleted_run_ends_a_stream_that_ran() -> None:
    async with Replica(run=play(batch(started(1)), not_found("run"))) as one:
        with pytest.raises(ServiceError, match="NOT_FOUND"):
            await seqs(START, one.address)
