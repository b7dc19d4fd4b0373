"""Messages that wait for the answers before theirs: order, bounds, ends of every kind (durability.md 22)."""

import asyncio

import pytest

from kit.errors import ServiceError
from services.conversation import limits
from tests.contract.conversation.harness import Launcher, Service, Sql
from tests.contract.conversation.waiting import (
    ENQUEUE,
    HELD,
    INTERRUPT,
    REJECT,
    ended,
    enqueue,
    held,
    requests,
    start,
    texts,
)
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1.message_pb2 import MessageRole
from threadloom.conversation.v1.run_pb2 import IfRunning, Run, RunStatus

QUEUED, SUCCEEDED = RunStatus.RUN_STATUS_QUEUED, RunStatus.RUN_STATUS_SUCCEEDED
STARTED = ["run_started", "reply_started"]


async def test_messages_are_answered_in_order_and_each_sees_the_answers_before(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    second = await enqueue(alice, thread, "second [fake chunks=2]")
    third = await enqueue(alice, thread, "third [fake chunks=2]")
    assert (second.events, second.batches[0].last_seq, second.batches[0].message_id != "") == ([], 0, True)
    assert await texts(alice, thread) == [f"first {HELD}", first.text]
    waiting = await alice.get_run(third.run_id)
    assert (waiting.status, waiting.last_seq, waiting.HasField("finish_time")) == (QUEUED, 0, False)
    assert (await alice.get_thread(thread)).queued_runs == 2
    assert await sql.value("SELECT count(*) FROM conversation.api_calls") == 1
    provider.open_gate("g")
    for run in (first, second, third):
        await run.end()
        assert run.kinds[:2] == STARTED
        assert [event.seq for event in run.events] == list(range(1, len(run.events) + 1))
    found = await alice.messages(thread)
    assert [message.position for message in found] == [1, 2, 3, 4, 5, 6]
    said = [f"first {HELD}", first.text, "second [fake chunks=2]", second.text, "third [fake chunks=2]", third.text]
    assert [message.text for message in found] == said
    assert [message.run_id for message in found][::2] == [first.run_id, second.run_id, third.run_id]
    assert [message.id for message in found][3::2] == [second.batches[0].message_id, third.batches[0].message_id]
    times = [message.create_time.ToNanoseconds() for message in found]
    assert times == sorted(set(times))
    assert requests(provider) == [said[:1], said[:3], said[:5]]
    assert (await alice.get_thread(thread)).queued_runs == 0
    assert await sql.rows("SELECT attempt, step FROM conversation.api_calls") == [(1, 1)] * 3
    assert [run.takeovers for run in await ended(alice, [second.run_id, third.run_id])] == [0, 0]


@pytest.mark.parametrize("mode", [ENQUEUE, INTERRUPT])
async def test_in_a_thread_at_rest_a_message_is_answered_at_once(service: Service, mode: IfRunning, sql: Sql) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello", if_running=mode).end()
    assert run.kinds[:2] == STARTED
    assert await sql.value("SELECT begun_at FROM conversation.ai_runs") is None


@pytest.mark.parametrize("mode", [IfRunning.IF_RUNNING_UNSPECIFIED, REJECT])
async def test_who_does_not_want_to_wait_is_refused(service: Service, mode: IfRunning, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    first = await held(service.alice, thread)
    refused = await service.alice.run(thread, "second", if_running=mode).refusal()
    assert (refused.reason, refused.metadata["run_id"]) == ("RUN_IN_PROGRESS", first.run_id)
    provider.open_gate("g")
    await first.end()


async def test_an_unknown_wish_is_refused(service: Service) -> None:
    thread = await service.alice.thread()
    refused = await service.alice.run(thread, "x", if_running=7).refusal()
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_OPTIONS", "if_running")


async def test_ten_wait_and_the_eleventh_is_refused(service: Service, provider: FakeProvider, sql: Sql) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    waiting = [await start(alice, thread, f"{number} [fake chunks=1]") for number in range(limits.QUEUED_RUNS)]
    assert {run.status for run in waiting} == {QUEUED}
    before = await sql.contents()
    for mode in (ENQUEUE, INTERRUPT):
        with pytest.raises(ServiceError, match="10 messages wait") as refused:
            await start(alice, thread, "too many", "key", mode)
        assert (refused.value.reason, refused.value.metadata["run_id"]) == ("RUN_IN_PROGRESS", first.run_id)
    assert await sql.contents() == before
    provider.open_gate("g")
    await ended(alice, [run.id for run in waiting])
    said = [text for text in await texts(alice, thread) if "[fake" in text]
    assert said == [f"first {HELD}", *(f"{number} [fake chunks=1]" for number in range(limits.QUEUED_RUNS))]


async def test_twenty_at_once_are_accepted_up_to_eleven_and_answered_in_the_order_of_their_places(
    service: Service, provider: FakeProvider
) -> None:
    alice = service.alice
    thread = await alice.thread()
    asks = (start(alice, thread, f"{number} [fake chunks=1 gate=g]") for number in range(20))
    found = await asyncio.gather(*asks, return_exceptions=True)
    accepted = [run for run in found if isinstance(run, Run)]
    assert {error.reason for error in found if isinstance(error, ServiceError)} == {"RUN_IN_PROGRESS"}
    assert len(accepted) == 1 + limits.QUEUED_RUNS
    provider.open_gate("g")
    runs = await ended(alice, [run.id for run in accepted])
    assert {run.status for run in runs} == {SUCCEEDED}
    messages = await alice.messages(thread)
    assert [message.position for message in messages] == list(range(1, 2 * len(accepted) + 1))
    asked = [message for message in messages if message.role == MessageRole.MESSAGE_ROLE_USER]
    assert [words[-1] for words in requests(provider)] == [message.text for message in asked]
    assert {message.run_id for message in asked} == {run.id for run in accepted}


@pytest.mark.parametrize(
    "script", ["[fake chunks=1 gate=g]", "[fake cut=1 chunks=2 gate=g]", "[fake error=400 gate=g first=300]"]
)
async def test_the_next_is_answered_however_the_run_before_ended(
    service: Service, provider: FakeProvider, script: str
) -> None:
    thread = await service.alice.thread()
    first = await service.alice.run(thread, script).until(lambda reading: reading.batches)
    second = await enqueue(service.alice, thread, "second [fake chunks=1]")
    provider.open_gate("g")
    await first.end()
    assert (await second.end()).kinds[-1] == "run_finished"


async def test_a_run_whose_start_fails_before_its_reply_frees_its_key_and_lets_the_next_begin(
    service: Service, provider: FakeProvider
) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    failing = "second [fake error=400 times=1 key=k]"
    second = await enqueue(alice, thread, failing, "key-2")
    third = await enqueue(alice, thread, "third [fake chunks=1]")
    provider.open_gate("g")
    assert (await second.end()).events[-1].run_failed.before_reply
    await third.end()
    again = await alice.run(thread, failing, "key-2", if_running=ENQUEUE).end()
    assert again.run_id != second.run_id
    found = await texts(alice, thread)
    assert found == [f"first {HELD}", first.text, failing, "third [fake chunks=1]", third.text, again.text]


async def test_a_kept_message_may_wait_again(service: Service, provider: FakeProvider) -> None:
    alice = service.alice
    thread = await alice.thread()
    failing = "once [fake error=400 times=1 key=w]"
    await alice.run(thread, failing, "key", if_running=ENQUEUE).end()
    first = await held(alice, thread)
    again = await enqueue(alice, thread, failing, "key")
    assert await texts(alice, thread) == [failing, f"first {HELD}", first.text]
    provider.open_gate("g")
    await again.end()
    assert await texts(alice, thread) == [failing, f"first {HELD}", first.text, again.text]


async def test_a_key_is_one_run_while_it_waits(service: Service, provider: FakeProvider, sql: Sql) -> None:
    alice = service.alice
    thread = await alice.thread()
    await held(alice, thread)
    second = await enqueue(alice, thread, "second [fake chunks=1]", "key")
    same = await enqueue(alice, thread, "second [fake chunks=1]", "key")
    unary = await start(alice, thread, "second [fake chunks=1]", "key")
    assert (same.run_id, unary.id, unary.status) == (second.run_id, second.run_id, QUEUED)
    other = await alice.run(thread, "other", "key", if_running=ENQUEUE).refusal()
    assert other.reason == "IDEMPOTENCY_KEY_REUSED"
    assert await sql.value("SELECT count(*) FROM conversation.queued_runs") == 1
    provider.open_gate("g")
    assert (await same.end()).events == (await second.end()).events
    assert (await start(alice, thread, "second [fake chunks=1]", "key")).status == SUCCEEDED


async def test_twenty_equal_requests_at_once_wait_once(service: Service, provider: FakeProvider, sql: Sql) -> None:
    alice = service.alice
    thread = await alice.thread()
    await held(alice, thread)
    found = await asyncio.gather(*(start(alice, thread, "second [fake chunks=1]", "key") for _ in range(20)))
    assert len({run.id for run in found}) == 1
    assert await sql.value("SELECT count(*) FROM conversation.queued_runs") == 1
    provider.open_gate("g")
    await ended(alice, [found[0].id])


async def test_a_run_started_alone_is_as_one_that_is_followed(service: Service) -> None:
    thread = await service.alice.thread()
    run = await start(service.alice, thread, "hello [fake chunks=3]", "key", REJECT)
    assert run.status in (RunStatus.RUN_STATUS_RUNNING, SUCCEEDED)
    followed = await service.alice.follow(run.id).end()
    assert (followed.kinds[:2], (await service.alice.reply(thread)).text) == (STARTED, followed.text)


async def test_following_a_waiting_run_waits_with_heartbeats_and_goes_on_with_its_events(
    service: Service, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = await service.alice.thread()
    await held(service.alice, thread)
    run = await start(service.alice, thread, "second [fake chunks=1]")
    follower = service.alice.follow(run.id)
    await follower.until(lambda reading: len(reading.batches) >= 2)
    assert ({batch.last_seq for batch in follower.batches}, follower.events) == ({0}, [])
    refused = await service.alice.follow(run.id, after=1).refusal()
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_OPTIONS", "after_seq")
    provider.open_gate("g")
    assert (await follower.end()).kinds[:2] == STARTED


async def test_the_turn_clock_begins_when_the_turn_comes(launch: Launcher, provider: FakeProvider, sql: Sql) -> None:
    service = await launch(THREADLOOM_TURN_SECONDS="3")
    thread = await service.alice.thread()
    await held(service.alice, thread)
    second = await enqueue(service.alice, thread, "second [fake chunks=1]")
    await sql.rows("UPDATE conversation.ai_runs SET created_at = created_at - interval '1 hour'")
    provider.open_gate("g")
    assert (await second.end()).kinds[-1] == "run_finished"
    assert second.events[-1].run_finished.latency.ToSeconds() < 3


async def test_nothing_is_held_while_a_run_waits(service: Service, provider: FakeProvider, sql: Sql) -> None:
    thread = await service.alice.thread()
    await held(service.alice, thread)
    second = await enqueue(service.alice, thread, "second [fake chunks=1]")
    assert await sql.value("SELECT count(*) FROM billing.holds") == 1
    provider.open_gate("g")
    await second.end()
