"""Wherever a reader joins a run, it gets exactly what follows (reports.md 1 to 19; durability.md 15 to 18)."""

import asyncio
from typing import Any
from uuid import UUID

import psycopg_pool
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict
from grpc import aio

from kit.bus import Bus
from kit.errors import ServiceError
from kit.sealing import KeyRing
from services.conversation import limits
from services.conversation.following import Followed, Hub
from services.conversation.sweeper import Sweeper
from tests.contract.conversation.harness import NO_NATS, Launcher, Reading, Service, Sql, project_id, text_of
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1 import conversation_service_pb2 as api
from threadloom.conversation.v1.message_pb2 import MessageStatus
from threadloom.conversation.v1.run_event_pb2 import RunEvent


@pytest_asyncio.fixture
async def trim(engine_pool: psycopg_pool.AsyncConnectionPool) -> Sweeper:
    """A sweeper that keeps nothing of what ended."""
    return Sweeper(engine_pool, kept_seconds=0.001, kept_bytes=1, ring=KeyRing({}))


def plain(events: list[RunEvent]) -> list[dict[str, object]]:
    return [MessageToDict(event) for event in events]


def check_suffix(reading: Reading, whole: Reading, after: int) -> None:
    assert plain(reading.events) == plain(whole.events[after:])
    assert [event.seq for event in reading.events] == list(range(after + 1, len(whole.events) + 1))


async def many_events(service: Service, provider: FakeProvider, thread: str, script: str) -> Reading:
    """A running run whose deltas were committed one by one, held at a gate."""
    run = service.alice.run(thread, f"[fake {script}]")
    await provider.until(lambda calls: calls and calls[-1].held)
    return await run.until(lambda reading: reading.text.endswith(provider.calls[-1].text))


async def test_a_finished_run_is_followed_from_every_seq(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    whole = await service.alice.run(thread, "[fake chunks=8 delay=10 reasoning=2]").end()
    end = len(whole.events)
    assert end > 10
    readings = [service.alice.follow(whole.run_id, after) for after in range(end)]
    for after, reading in enumerate(readings):
        check_suffix(await reading.end(), whole, after)
    for beyond in (end, end + 1, 2**40):
        check_suffix(await service.alice.follow(whole.run_id, beyond).end(), whole, end - 1)


async def test_a_live_run_is_followed_from_every_seq_by_two_at_once_at_two_replicas(
    launch: Launcher, provider: FakeProvider
) -> None:
    services = [await launch(), await launch()]
    thread = await services[0].alice.thread()
    run = await many_events(services[0], provider, thread, "chunks=16 delay=10 gate=g gate_at=8")
    reached = len(run.events)
    readings = [(after, each.alice.follow(run.run_id, after)) for after in range(reached + 1) for each in services]
    provider.open_gate("g")
    await run.end()
    for after, reading in readings:
        check_suffix(await reading.end(), run, after)
    assert len(provider.calls) == 1


async def test_a_run_is_followed_at_a_replica_that_hears_nothing(
    launch: Launcher, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 0.2)
    owner, deaf = await launch(), await launch(NATS_URL=NO_NATS)
    thread = await owner.alice.thread()
    run = await many_events(owner, provider, thread, "chunks=4 gate=g gate_at=2")
    reading = await deaf.alice.follow(run.run_id).until(lambda reading: reading.text)
    provider.open_gate("g")
    await run.end()
    check_suffix(await reading.end(), run, 0)


async def test_the_active_run_of_a_thread_is_followed_by_the_threads_name(
    service: Service, provider: FakeProvider
) -> None:
    thread = await service.alice.thread()
    assert (await service.alice.follow("", thread=thread).refusal()).reason == "NOT_FOUND"
    run = await many_events(service, provider, thread, "chunks=4 gate=g gate_at=2")
    reading = await service.alice.follow("", thread=thread).until(lambda reading: reading.text)
    provider.open_gate("g")
    check_suffix(await reading.end(), await run.end(), 0)
    assert (await service.alice.follow("", thread=thread).refusal()).reason == "NOT_FOUND"


async def test_a_cursor_a_live_run_has_not_reached_is_refused(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await many_events(service, provider, thread, "chunks=4 gate=g gate_at=2")
    reached = run.batches[-1].last_seq
    for after in (reached + 1, 2**62, -1):
        refusal = await service.alice.follow(run.run_id, after).refusal()
        assert (refusal.reason, refusal.metadata) == ("INVALID_OPTIONS", {"field": "after_seq"})
    at_the_end = service.alice.follow(run.run_id, reached)
    provider.open_gate("g")
    await run.end()
    check_suffix(await at_the_end.end(), run, reached)


async def test_a_silent_run_beats_with_the_seq_it_reached(
    launch: Launcher, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 0.2)
    service = await launch()
    thread = await service.alice.thread()
    run = await many_events(service, provider, thread, "chunks=4 gate=g gate_at=2")
    before = len(run.batches)
    await run.until(lambda reading: len(reading.batches) >= before + 2, 1.0)
    for beat in run.batches[before:]:
        assert (list(beat.events), beat.last_seq, beat.run_id) == ([], run.events[-1].seq, run.run_id)
    provider.open_gate("g")
    await run.end()


async def test_a_slow_reader_gets_every_event(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await many_events(service, provider, thread, "chunks=600 size=2000 gate=g gate_at=1")
    request = api.FollowRequest(run_id=run.run_id)
    call: Any = service.alice.conversation.Follow(request, metadata=service.alice.metadata)
    first = await call.read()
    provider.open_gate("g")
    await run.end()  # 1.2 MB went by while the other did not read
    events = [*first.batch.events]
    while (response := await call.read()) is not aio.EOF:
        events += response.batch.events
    assert text_of(events) == run.text == provider.calls[0].text


async def test_a_cursor_inside_a_trimmed_run_has_expired_and_one_at_its_end_gets_the_end(
    service: Service, trim: Sweeper
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello", key="a").end()
    end = len(run.events)
    await trim.sweep()
    for after in range(end - 1):
        refusal = await service.alice.follow(run.run_id, after).refusal()
        assert refusal.reason == "CURSOR_EXPIRED"
        assert refusal.metadata == {"messages_url": f"/v1/conversations/{thread}/messages"}
    for after in (end - 1, end, end + 1):
        check_suffix(await service.alice.follow(run.run_id, after).end(), run, end - 1)
    assert (await service.alice.reply(thread)).text == run.text
    assert len(await service.alice.traces(thread)) == 1


async def test_an_equal_request_after_trimming_is_told_that_the_events_are_gone(
    service: Service, provider: FakeProvider, trim: Sweeper
) -> None:
    thread = await service.alice.thread()
    await service.alice.run(thread, "hello", key="a").end()
    await trim.sweep()
    assert (await service.alice.run(thread, "hello", key="a").refusal()).reason == "CURSOR_EXPIRED"
    assert len(provider.calls) == 1


async def test_trimming_spares_what_runs_and_what_fits(
    service: Service, provider: FakeProvider, engine_pool: psycopg_pool.AsyncConnectionPool, sql: Sql
) -> None:
    threads = [await service.alice.thread() for _ in range(3)]
    old, new = [await service.alice.run(thread, "hello").end() for thread in threads[:2]]
    running = await many_events(service, provider, threads[2], "chunks=4 gate=g gate_at=2")
    size = await sql.value("SELECT log_bytes FROM conversation.ai_runs WHERE id = %s", new.run_id)
    await Sweeper(engine_pool, kept_seconds=3600, kept_bytes=size, ring=KeyRing({})).sweep()
    assert (await service.alice.follow(old.run_id).refusal()).reason == "CURSOR_EXPIRED"
    check_suffix(await service.alice.follow(new.run_id).end(), new, 0)
    await Sweeper(engine_pool, kept_seconds=0.001, kept_bytes=1, ring=KeyRing({})).sweep()
    late = service.alice.follow(running.run_id)
    provider.open_gate("g")
    check_suffix(await late.end(), await running.end(), 0)


async def test_a_follower_that_trimming_overtakes_is_told_and_not_given_a_gap(
    service: Service, trim: Sweeper, engine_pool: psycopg_pool.AsyncConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PAGE_EVENTS", 5)
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake chunks=10 size=32000]").end()
    hub = Hub(engine_pool, Bus(NO_NATS))
    project = project_id(service.alice.caller)
    followed = Followed(UUID(run.run_id), project, UUID(thread), UUID(run.batches[0].message_id))
    batches = hub.follow(followed, 0)
    assert [event.seq for event in (await anext(batches)).events] == [1, 2, 3, 4, 5]
    await trim.sweep()
    with pytest.raises(ServiceError) as caught:
        await anext(batches)
    assert caught.value.reason == "CURSOR_EXPIRED"


async def test_a_streaming_message_and_its_cursor_are_the_whole_text(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, "[fake chunks=60 delay=25]")
    joined: list[tuple[str, int, Reading]] = []
    for chars in range(0, 300, 20):
        await run.until(lambda reading, chars=chars: len(reading.text) > chars)  # type: ignore[misc]
        message = (await service.alice.messages(thread))[-1]
        assert message.status == MessageStatus.MESSAGE_STATUS_STREAMING
        follower = service.alice.follow(message.run_id, message.cursor_seq)
        joined.append((message.text, message.cursor_seq, follower))
    await run.end(20)
    final = (await service.alice.reply(thread)).text
    assert final == provider.calls[0].text
    for text, _, follower in joined:
        assert text_of((await follower.end()).events, text) == final
    cursors = [cursor for _, cursor, _ in joined]
    assert cursors == sorted(cursors)
    assert cursors[0] < cursors[-1]


async def test_nothing_of_a_reply_is_listed_before_the_provider_answered(
    service: Service, provider: FakeProvider
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake hang=-1]").until(lambda reading: reading.events)
    await provider.until(lambda calls: calls)
    (asked,) = await service.alice.messages(thread)
    assert asked.parts
    assert await service.alice.traces(thread) == []
    assert (await service.alice.get_thread(thread)).active_run_id == run.run_id
    await service.alice.cancel(run.run_id)


async def test_an_answered_reply_is_listed_before_its_first_word(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, "[fake chunks=2 gate=g]")
    await run.until(lambda reading: "step_started" in reading.kinds)
    reply = await service.alice.reply(thread)
    assert (reply.text, reply.cursor_seq) == ("", run.events[-1].seq)
    provider.open_gate("g")
    await run.end()


async def test_traces_of_a_live_run_are_listed_and_paged_with_the_stored_ones(
    service: Service, provider: FakeProvider
) -> None:
    thread = await service.alice.thread()
    await service.alice.run(thread, "[fake reasoning=1]").end()
    run = await many_events(service, provider, thread, "chunks=3 reasoning=1 gate=g gate_at=2")
    whole = await service.alice.traces(thread)
    assert [trace.WhichOneof("payload") for trace in whole] == ["thinking", "llm_request"] * 2
    assert [trace.HasField("end_time") for trace in whole] == [True, True, True, False]
    paged, token = [], ""
    for _ in whole:
        request = api.ListTracesRequest(thread_id=thread, page_size=1, page_token=token)
        page = await service.alice.call(service.alice.conversation.ListTraces, request)
        paged += page.traces
        token = page.next_page_token
    assert (paged, token) == (whole, "")
    only = api.ListTracesRequest(thread_id=thread, message_id=run.batches[0].message_id)
    assert list((await service.alice.call(service.alice.conversation.ListTraces, only)).traces) == whole[2:]
    provider.open_gate("g")
    await run.end()
    assert len(await service.alice.traces(thread)) == 4


async def test_messages_and_threads_are_paged_without_loss(service: Service) -> None:
    threads = [await service.alice.thread(title=str(at)) for at in range(5)]
    for _ in range(3):
        await service.alice.run(threads[0], "[fake chunks=1]").end()
    conversation, person = service.alice.conversation, service.alice
    found: list[str] = []
    token, rounds = "", 0
    while token or not rounds:
        request = api.ListThreadsRequest(page_size=2, page_token=token)
        page = await person.call(conversation.ListThreads, request)
        found += [thread.id for thread in page.threads]
        token, rounds = page.next_page_token, rounds + 1
    assert (found, rounds) == ([threads[0], *threads[:0:-1]], 3)
    positions: list[int] = []
    token, rounds = "", 0
    while token or not rounds:
        listing = api.ListMessagesRequest(thread_id=threads[0], page_size=4, page_token=token)
        answer = await person.call(conversation.ListMessages, listing)
        positions += [message.position for message in answer.messages]
        token, rounds = answer.next_page_token, rounds + 1
    assert (positions, rounds) == ([1, 2, 3, 4, 5, 6], 2)


async def test_30_followers_at_once_see_one_run(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await many_events(service, provider, thread, "chunks=20 delay=5 gate=g gate_at=5")
    followers = [service.alice.follow(run.run_id) for _ in range(30)]
    provider.open_gate("g")
    await asyncio.gather(*(follower.end() for follower in followers))
    await run.end()
    for follower in followers:
        check_suffix(follower, run, 0)
    assert len(provider.calls) == 1
