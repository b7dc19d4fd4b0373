"""The event stream on the wire: head, frames, holds, breaks, resumes."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kit.errors import ServiceError, not_found, thread_not_found, unavailable
from services.gateway.wire import sse
from services.gateway.wire.conversations import ConversationsEncoder
from tests.unit.gateway.replica import MESSAGE_ID, RUN_ID, THREAD_ID, Replica, batch, delta, finished, play, started
from tests.unit.gateway.running import (
    ALICE,
    QUICK,
    Gateway,
    read_chunk,
    read_head,
    read_reply,
    request,
    running_gateway,
)
from threadloom.conversation.v1.run_event_pb2 import RunEvent

MESSAGES = f"/v1/conversations/{THREAD_ID}/messages"
STREAM = f"/v1/conversations/{THREAD_ID}/stream"
SAY = {"content": "Hello"}


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with Replica() as found:
        yield found


@pytest.fixture
async def gateway(replica: Replica) -> AsyncIterator[Gateway]:
    async with running_gateway(replica.address) as found:
        yield found


def accepted(seq: int = 1) -> RunEvent:
    event = RunEvent(seq=seq)
    event.run_started.model = "m"
    return event


def failed(seq: int, before_reply: bool, code: str = "AI_RATE_LIMITED") -> RunEvent:
    event = RunEvent(seq=seq)
    event.run_failed.before_reply = before_reply
    event.run_failed.error.code = code
    event.run_failed.error.message = "429 Too Many Requests: slow down, please"
    event.run_failed.error.provider = "openai"
    event.run_failed.error.retry_after.FromMilliseconds(4200)
    return event


def retried(seq: int) -> RunEvent:
    event = RunEvent(seq=seq)
    event.trace_started.trace_id = "evt_001"
    event.trace_started.retry.attempt = 2
    return event


def wire(*events: RunEvent) -> bytes:
    encoder = ConversationsEncoder(RUN_ID, MESSAGE_ID)
    return b"".join(sse.to_bytes(frame) for event in events for frame in encoder.encode(event))


async def test_a_run_streams_batch_by_batch(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(accepted(), started(2), delta(3)), batch(delta(4), delta(5), delta(6)), batch(finished(7)))
    reply = await gateway.ask("POST", MESSAGES, SAY)
    assert reply.status == 200
    assert reply.is_whole
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache, no-transform"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-run-id"] == RUN_ID
    # One write a batch.
    assert reply.chunks == [wire(delta(3)), wire(delta(4), delta(5), delta(6)), wire(finished(7))]


async def test_a_connection_serves_another_request_after_a_stream(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(started(1), finished(2)))
    reader, writer = await gateway.open(request("POST", MESSAGES, SAY))
    assert (await read_reply(reader)).is_whole
    writer.write(request("GET", "/healthz"))
    assert (await read_reply(reader)).status == 200
    writer.close()


async def test_a_failure_before_the_reply_is_a_status(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(accepted(), retried(2)), batch(failed(3, before_reply=True)))
    reply = await gateway.ask("POST", MESSAGES, SAY)
    assert reply.status == 429
    assert reply.headers["retry-after"] == "5"
    assert reply.json == {
        "code": "rate_limit",
        "message": "429 Too Many Requests: slow down, please",
        "request_id": reply.headers["x-request-id"],
        "retry_after": 4.2,
        "provider": "openai",
    }


async def test_a_failure_after_it_is_an_event(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(started(1), delta(2)), batch(failed(3, before_reply=False)))
    reply = await gateway.ask("POST", MESSAGES, SAY)
    assert reply.status == 200
    assert reply.is_whole
    assert reply.body == wire(delta(2), failed(3, before_reply=False))


async def test_the_head_waits_for_the_reply_only_so_long(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(accepted(), retried(2)), 0.3, batch(last_seq=2), 0.3, batch(failed(3, before_reply=True)))
    begin = time.monotonic()
    reader, writer = await gateway.open(request("POST", MESSAGES, SAY))
    status, _ = await read_head(reader)
    assert status == 200
    assert QUICK.hold <= time.monotonic() - begin < 0.55
    # What came meanwhile was kept, and comes with the head.
    assert await read_chunk(reader) == wire(retried(2))
    assert await read_chunk(reader) == wire(failed(3, before_reply=True))
    assert await read_chunk(reader) == b""
    writer.close()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (thread_not_found(), 404),
        (ServiceError("RUN_IN_PROGRESS", "This conversation already runs.", {"run_id": RUN_ID}), 409),
        (ServiceError("IDEMPOTENCY_KEY_REUSED", "The key was used for something else."), 422),
        (ServiceError("AI_PROVIDER_NOT_CONFIGURED", "No provider is set."), 409),
        (ServiceError("CONTENT_TOO_LARGE", "Too long.", {"field": "parts", "limit": "200000"}), 413),
    ],
)
async def test_a_refusal_is_a_status(gateway: Gateway, replica: Replica, error: ServiceError, status: int) -> None:
    replica.run = play(error)
    reply = await gateway.ask("POST", MESSAGES, SAY)
    assert (reply.status, reply.json["code"]) == (status, error.reason)
    assert reply.json.get("run_id") == error.metadata.get("run_id")
    assert len(replica.runs) == 1


async def test_the_death_of_a_replica_does_not_show(replica: Replica) -> None:
    replica.run = play(batch(started(1), delta(2)))
    replica.follow = play(batch(delta(3)), batch(finished(4)))
    # Whichever of the two is asked first: they play the same run.
    async with (
        Replica(replica.run, replica.follow) as other,
        running_gateway(replica.address, other.address) as gateway,
    ):
        reply = await gateway.ask("POST", MESSAGES, SAY)
    assert reply.is_whole
    assert reply.body == wire(delta(2), delta(3), finished(4))


async def test_a_stream_nobody_can_continue_is_broken_not_ended(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(started(1), delta(2)), 0.1)
    reader, writer = await gateway.open(request("POST", MESSAGES, SAY))
    status, _ = await read_head(reader)
    assert status == 200
    assert await read_chunk(reader) == wire(delta(2))
    await replica.die()
    rest = await asyncio.wait_for(reader.read(), QUICK.unreachable + 3)
    # The last chunk of a whole response is "0\r\n\r\n": it must not come.
    assert not rest.endswith(b"0\r\n\r\n")
    assert rest.replace(b"e\r\n" + sse.KEEP_ALIVE + b"\r\n", b"") == b""
    writer.close()


async def test_before_the_head_it_is_503(gateway: Gateway, replica: Replica) -> None:
    assert (await gateway.ask("GET", "/v1/conversations")).status == 200  # the project is known now
    await replica.die()
    reply = await gateway.ask("POST", MESSAGES, SAY)
    assert (reply.status, reply.json["code"], reply.headers["retry-after"]) == (503, "UNAVAILABLE", "1")


async def test_a_resume_every_replica_refuses_is_503_not_an_ended_stream(replica: Replica) -> None:
    refusal = play(unavailable("The database does not answer."))
    replica.follow = refusal
    async with Replica(follow=refusal) as second, running_gateway(replica.address, second.address) as gateway:
        reply = await gateway.ask("GET", STREAM, last_event_id=f"{RUN_ID}:3.1")
    assert (reply.status, reply.json["code"]) == (503, "UNAVAILABLE")
    assert len(replica.follows) == len(second.follows) == 1


async def test_a_run_that_is_gone_ends_its_stream_with_an_error(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(started(1), delta(2)), not_found("run"))
    reply = await gateway.ask("POST", MESSAGES, SAY)
    assert reply.is_whole
    assert reply.chunks[-1] == b'event: error\ndata: {"code":"NOT_FOUND","message":"This run does not exist."}\n\n'


async def test_a_client_that_leaves_ends_the_call(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(started(1), delta(2)), 60.0)
    reader, writer = await gateway.open(request("POST", MESSAGES, SAY))
    await read_head(reader)
    writer.close()
    await asyncio.wait_for(replica.cancelled.wait(), 1)


async def test_a_client_that_leaves_before_the_head_ends_the_call(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(accepted()), 60.0)
    _, writer = await gateway.open(request("POST", MESSAGES, SAY))
    await asyncio.wait_for(replica.asked.wait(), 5)
    writer.close()
    await asyncio.wait_for(replica.cancelled.wait(), 1)


async def test_a_client_that_stops_reading_is_left(replica: Replica) -> None:
    flood = [batch(delta(seq, "x" * 500_000)) for seq in range(2, 60)]
    replica.run = play(batch(started(1)), *flood, 60.0)
    async with running_gateway(replica.address, patience=replace(QUICK, reader_stall=0.5)) as gateway:
        _, writer = await gateway.open(request("POST", MESSAGES, SAY))
        await asyncio.wait_for(replica.cancelled.wait(), 5)
        writer.close()


async def test_a_silent_stream_gets_comments(gateway: Gateway, replica: Replica) -> None:
    beats = [step for _ in range(8) for step in (0.1, batch(last_seq=1))]
    replica.run = play(batch(started(1)), *beats, batch(finished(2)))
    reply = await gateway.ask("POST", MESSAGES, SAY)
    assert 2 <= reply.chunks.count(sse.KEEP_ALIVE) <= 4
    assert reply.chunks[-1] == wire(finished(2))


async def test_a_stream_resumes_inside_an_event(gateway: Gateway, replica: Replica) -> None:
    replica.follow = play(batch(retried(2), delta(3)), batch(finished(4)))
    whole = wire(retried(2), delta(3), finished(4))
    for seen, cursor in ((1, f"{RUN_ID}:2.1"), (2, f"{RUN_ID}:2.2"), (2, f"{RUN_ID}:2.9")):
        rest = b"\n\n".join(whole.split(b"\n\n")[seen:])
        assert (await gateway.ask("GET", STREAM, last_event_id=cursor)).body == rest
        assert (await gateway.ask("GET", f"{STREAM}?after={cursor}")).body == rest
        # The header wins: an EventSource keeps its URL.
        assert (await gateway.ask("GET", f"{STREAM}?after={RUN_ID}:9.9", last_event_id=cursor)).body == rest
    assert {(follow.run_id, follow.after_seq) for follow in replica.follows} == {(RUN_ID, 1)}


async def test_a_cursor_at_the_end_gets_the_end_again(gateway: Gateway, replica: Replica) -> None:
    replica.follow = play(batch(finished(4)))
    for index in (1, 9):
        reply = await gateway.ask("GET", f"{STREAM}?after={RUN_ID}:4.{index}")
        assert reply.body == wire(finished(4))
        assert reply.is_whole


async def test_a_cursor_behind_the_end_gets_the_end_again(gateway: Gateway, replica: Replica) -> None:
    replica.follow = play(batch(finished(4)))
    assert (await gateway.ask("GET", f"{STREAM}?after={RUN_ID}:7.1")).body == wire(finished(4))


async def test_without_a_cursor_the_active_run_is_played_from_its_start(gateway: Gateway, replica: Replica) -> None:
    replica.follow = play(batch(accepted(), started(2), delta(3)), batch(finished(4)))
    reply = await gateway.ask("GET", STREAM)
    assert reply.headers["x-run-id"] == RUN_ID
    assert reply.body == wire(delta(3), finished(4))
    assert [(follow.thread_id, follow.run_id, follow.after_seq) for follow in replica.follows] == [(THREAD_ID, "", 0)]


async def test_attaching_does_not_wait_for_the_reply(gateway: Gateway, replica: Replica) -> None:
    replica.follow = play(batch(accepted()), 0.2, batch(failed(2, before_reply=True)))
    reply = await gateway.ask("GET", STREAM)
    assert reply.status == 200
    assert reply.body == wire(failed(2, before_reply=True))


async def test_nothing_to_attach_to_is_204(gateway: Gateway, replica: Replica) -> None:
    reply = await gateway.ask("GET", STREAM)
    assert (reply.status, reply.body) == (204, b"")
    replica.follow = play(thread_not_found())
    assert (await gateway.ask("GET", STREAM)).json["code"] == "THREAD_NOT_FOUND"


async def test_a_cursor_of_no_run_is_404(gateway: Gateway) -> None:
    reply = await gateway.ask("GET", f"{STREAM}?after={RUN_ID}:1.1")
    assert (reply.status, reply.json["code"], reply.json["kind"]) == (404, "NOT_FOUND", "run")


async def test_an_expired_cursor_names_the_messages(gateway: Gateway, replica: Replica) -> None:
    replica.follow = play(ServiceError("CURSOR_EXPIRED", "These events are no longer kept.", {"messages_url": ""}))
    reply = await gateway.ask("GET", f"{STREAM}?after={RUN_ID}:1.1")
    assert (reply.status, reply.json["code"], reply.json["messages_url"]) == (410, "CURSOR_EXPIRED", MESSAGES)


@pytest.mark.parametrize("cursor", ["x", "1.1", f"{RUN_ID}:1", f"{RUN_ID}:1.1.1", f"{RUN_ID}:-1.1"])
async def test_a_malformed_cursor_is_400(gateway: Gateway, replica: Replica, cursor: str) -> None:
    assert (await gateway.ask("GET", f"{STREAM}?after={cursor}")).json["field"] == "after"
    assert (await gateway.ask("GET", STREAM, last_event_id=cursor)).json["field"] == "Last-Event-ID"
    assert not replica.follows


async def test_a_drain_breaks_what_does_not_end(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(started(1), delta(2)), 60.0)
    reading = asyncio.create_task(gateway.ask("POST", MESSAGES, SAY))
    await asyncio.wait_for(replica.asked.wait(), 5)
    await asyncio.sleep(0.1)
    draining = asyncio.create_task(gateway.app.drain(0.3))
    await asyncio.sleep(0.05)
    ready = await gateway.ask("GET", "/readyz", headers={})
    assert (ready.status, ready.json) == (503, {"status": "draining"})
    assert not reading.done()
    await draining
    reply = await reading
    assert (reply.status, reply.is_whole) == (200, False)


async def test_a_drain_waits_for_what_ends(gateway: Gateway, replica: Replica) -> None:
    replica.run = play(batch(started(1), delta(2)), 0.3, batch(finished(3)))
    reading = asyncio.create_task(gateway.ask("POST", MESSAGES, SAY))
    await asyncio.wait_for(replica.asked.wait(), 5)
    begin = time.monotonic()
    await gateway.app.drain(5)
    assert time.monotonic() - begin < 2
    assert (await reading).is_whole


async def test_many_streams_at_once_are_exact(gateway: Gateway, replica: Replica) -> None:
    events = [started(1), *(delta(seq) for seq in range(2, 500)), finished(500)]
    batches = [batch(*events[at : at + 7]) for at in range(0, len(events), 7)]
    replica.run = play(*batches)
    replies = await asyncio.gather(*(gateway.ask("POST", MESSAGES, SAY, headers=ALICE) for _ in range(20)))
    assert {reply.body for reply in replies} == {wire(*events)}
