"""Stopping what runs and what waits: interruptions, cancels of waiting runs, a deleted thread's queue."""

import asyncio

import pytest

from kit.errors import ServiceError
from kit.ids import new_id
from tests.contract.conversation.harness import NO_NATS, Launcher, Person, Service, Sql
from tests.contract.conversation.orphans import an_orphan, insert
from tests.contract.conversation.waiting import HELD, INTERRUPT, ended, enqueue, held, requests, start, texts
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1 import conversation_service_pb2 as api
from threadloom.conversation.v1.message_pb2 import MessageStatus
from threadloom.conversation.v1.run_pb2 import Run, RunStatus

QUEUED, CANCELLED = RunStatus.RUN_STATUS_QUEUED, RunStatus.RUN_STATUS_CANCELLED
ENDLESS = "first [fake chunks=3000 delay=10]"
NEVER_RAN = ["run_started", "run_finished"]


async def cancel(person: Person, **fields: object) -> Run:
    request = api.CancelRunRequest(**fields)  # type: ignore[arg-type]
    found: Run = (await person.call(person.conversation.CancelRun, request)).run
    return found


async def test_the_first_is_stopped_its_text_is_kept_and_the_second_knows_it(
    service: Service, provider: FakeProvider
) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await alice.run(thread, ENDLESS).until(lambda reading: len(reading.text) > 20)
    waiting = await enqueue(alice, thread, "waits [fake chunks=1]")
    second = await alice.run(thread, "second [fake chunks=1]", if_running=INTERRUPT).end()
    assert (await first.end()).events[-1].run_finished.finish_reason == "cancelled"
    await waiting.end()
    asked, kept, *rest = await alice.messages(thread)
    assert (asked.text, kept.text, kept.status) == (ENDLESS, first.text, MessageStatus.MESSAGE_STATUS_CANCELLED)
    said = [ENDLESS, first.text, "second [fake chunks=1]", second.text, "waits [fake chunks=1]"]
    assert [message.text for message in rest] == [*said[2:], waiting.text]
    assert requests(provider) == [said[:1], said[:3], said]


@pytest.mark.parametrize("nats", ["up", "down"])
async def test_a_run_of_another_replica_is_interrupted_with_and_without_nats(
    launch: Launcher, provider: FakeProvider, nats: str
) -> None:
    environ = {} if nats == "up" else {"NATS_URL": NO_NATS}
    one, other = await launch(**environ), await launch(**environ)
    thread = await one.alice.thread()
    first = await one.alice.run(thread, ENDLESS).until(lambda reading: reading.text)
    second = await other.alice.run(thread, "second [fake chunks=1]", if_running=INTERRUPT).end()
    assert second.kinds[-1] == "run_finished"
    assert (await first.end()).events[-1].run_finished.finish_reason == "cancelled"
    assert await texts(one.alice, thread) == [ENDLESS, first.text, "second [fake chunks=1]", second.text]
    assert len(provider.calls) == 2


async def test_a_run_nobody_owns_is_ended_by_who_interrupts_it(service: Service, sql: Sql) -> None:
    thread = await service.alice.thread()
    lost = await insert(service, sql, an_orphan(thread))
    await service.alice.run(thread, "second [fake chunks=1]", if_running=INTERRUPT).end()
    (run,) = await ended(service.alice, [lost])
    assert run.status == CANCELLED


@pytest.mark.usefixtures("quick_lease")
async def test_of_two_interruptions_the_later_one_is_first(service: Service, sql: Sql, provider: FakeProvider) -> None:
    """The active run's owner is frozen meanwhile, so that both are there before it stops."""
    alice, frozen = service.alice, new_id()
    thread = await alice.thread()
    lease = "INSERT INTO conversation.workers (id, lease_until) VALUES (%s, clock_timestamp() + interval '1 hour')"
    await sql.rows(lease, frozen)
    lost = await insert(service, sql, an_orphan(thread, worker=frozen))
    waits = await start(alice, thread, "waits [fake chunks=1]")
    earlier = await start(alice, thread, "earlier [fake chunks=1]", if_running=INTERRUPT)
    later = await start(alice, thread, "later [fake chunks=1]", if_running=INTERRUPT)
    assert {waits.status, earlier.status, later.status} == {QUEUED}
    await sql.rows("DELETE FROM conversation.workers WHERE id = %s", frozen)
    await ended(alice, [lost, waits.id, earlier.id, later.id])
    asked = [text.split()[0] for text in await texts(alice, thread) if "[fake" in text]
    assert asked == ["later", "earlier", "waits"]
    assert len(provider.calls) == 3


async def test_many_interruptions_at_once_leave_no_run_behind(service: Service, provider: FakeProvider) -> None:
    alice = service.alice
    thread = await alice.thread()
    await alice.run(thread, ENDLESS).until(lambda reading: reading.text)
    asks = (start(alice, thread, f"{n} [fake chunks=3 delay=5]", if_running=INTERRUPT) for n in range(8))
    runs = await ended(alice, [run.id for run in await asyncio.gather(*asks)])
    assert RunStatus.RUN_STATUS_FAILED not in {run.status for run in runs}
    messages = await alice.messages(thread)
    assert [message.position for message in messages] == list(range(1, len(messages) + 1))
    assert {message.status for message in messages} <= {
        MessageStatus.MESSAGE_STATUS_COMPLETE,
        MessageStatus.MESSAGE_STATUS_CANCELLED,
    }
    assert (await alice.get_thread(thread)).queued_runs == 0


@pytest.mark.parametrize("place", ["the same replica", "another replica"])
async def test_a_cancelled_run_leaves_the_queue_and_tells_who_follows_it(
    launch: Launcher, provider: FakeProvider, sql: Sql, place: str
) -> None:
    one = await launch()
    other = await launch() if place == "another replica" else one
    alice = one.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    second = await enqueue(alice, thread, "second [fake chunks=1]", "key")
    third = await enqueue(alice, thread, "third [fake chunks=1]")
    cancelled = await other.alice.cancel(second.run_id)
    assert (cancelled.status, cancelled.last_seq, cancelled.HasField("finish_time")) == (CANCELLED, 2, True)
    assert (await second.end()).kinds == NEVER_RAN
    assert second.events[-1].run_finished.finish_reason == "cancelled"
    assert (await alice.follow(second.run_id).end()).events == second.events
    before = await sql.contents()
    assert await other.alice.cancel(second.run_id) == cancelled
    assert (await alice.run(thread, "second [fake chunks=1]", "key", if_running=2).end()).kinds == NEVER_RAN
    assert await sql.contents() == before
    provider.open_gate("g")
    await third.end()
    said = [f"first {HELD}", first.text, "third [fake chunks=1]", third.text]
    assert await texts(alice, thread) == said
    assert requests(provider)[-1] == said[:3]


async def test_a_cancel_without_a_run_stops_the_active_one_only(service: Service, provider: FakeProvider) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    second = await enqueue(alice, thread, "second [fake chunks=1]")
    assert (await cancel(alice, thread_id=thread)).id == first.run_id
    assert (await second.end()).events[-1].run_finished.finish_reason == "stop"
    assert len(provider.calls) == 2


async def test_a_cancel_of_all_stops_the_active_run_and_all_that_wait(service: Service, provider: FakeProvider) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    waiting = [await enqueue(alice, thread, f"{number}") for number in range(3)]
    cancelled = await cancel(alice, thread_id=thread, include_queued=True)
    assert (cancelled.id, cancelled.status) == (first.run_id, CANCELLED)
    for run in waiting:
        assert (await run.end()).kinds == NEVER_RAN
    assert len(await alice.messages(thread)) == 2
    assert len(provider.calls) == 1
    with pytest.raises(ServiceError) as refused:
        await cancel(alice, thread_id=thread, include_queued=True)
    assert refused.value.reason == "NOT_FOUND"


async def test_a_cancel_of_one_and_of_all_at_once_is_refused(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    first = await held(service.alice, thread)
    with pytest.raises(ServiceError) as refused:
        await cancel(service.alice, thread_id=thread, run_id=first.run_id, include_queued=True)
    assert (refused.value.reason, refused.value.metadata["field"]) == ("INVALID_OPTIONS", "include_queued")
    provider.open_gate("g")
    assert (await first.end()).events[-1].run_finished.finish_reason == "stop"


async def test_others_cannot_cancel_what_waits(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    await held(service.alice, thread)
    second = await enqueue(service.alice, thread, "second [fake chunks=1]")
    for request in ({"run_id": second.run_id}, {"thread_id": thread, "include_queued": True}):
        with pytest.raises(ServiceError) as refused:
            await cancel(service.bob, **request)
        assert refused.value.reason in ("NOT_FOUND", "THREAD_NOT_FOUND")
    provider.open_gate("g")
    assert (await second.end()).kinds[-2:] != NEVER_RAN


async def test_a_deleted_thread_takes_its_queue_along(service: Service, provider: FakeProvider, sql: Sql) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    waiting = [await enqueue(alice, thread, f"{number}") for number in range(3)]
    await alice.delete(thread)
    for run in (first, *waiting):
        assert (await run.end()).events[-1].run_finished.finish_reason == "cancelled"
    assert len(provider.calls) == 1
    for table in ("ai_threads", "ai_runs", "ai_messages", "queued_runs", "run_events"):
        assert await sql.value(f"SELECT count(*) FROM conversation.{table}") == 0, table
