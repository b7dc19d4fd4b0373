"""An answer that is interrupted by the next message, and messages that leave the queue."""

import asyncio

import pytest

from kit.errors import ServiceError
from services.conversation.cancelling import Cancelling
from tests.contract.conversation.harness import Launcher, Person, Reading, Service, Sql, eventually
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1 import conversation_service_pb2 as api
from threadloom.conversation.v1.run_pb2 import IfRunning, RunStatus

ENQUEUE, INTERRUPT = IfRunning.IF_RUNNING_ENQUEUE, IfRunning.IF_RUNNING_INTERRUPT
CANCELLED = RunStatus.RUN_STATUS_CANCELLED
HELD = "first [fake chunks=4 gate=g gate_at=2]"
NEXT = "second [fake chunks=1]"


async def held(person: Person, thread: str, text: str = HELD) -> Reading:
    return await person.run(thread, text).until(lambda reading: reading.text)


async def ask(person: Person, thread: str, text: str, mode: IfRunning, key: str = "") -> Reading:
    return await person.run(thread, text, key, if_running=mode).until(lambda reading: reading.batches)


async def test_an_interrupt_stops_the_answer_and_keeps_its_text(service: Service, provider: FakeProvider) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    second = await ask(alice, thread, NEXT, INTERRUPT)
    await second.end()
    assert first.events[-1].run_finished.finish_reason == "cancelled"
    assert provider.calls[0].client_closed is not None
    said = [(message["role"], message["content"]) for message in provider.calls[1].body["messages"]]
    assert said == [("user", HELD), ("assistant", first.text), ("user", NEXT)]
    assert [message.text for message in await alice.messages(thread)] == [HELD, first.text, NEXT, second.text]


async def test_an_interrupt_goes_before_what_waits(service: Service) -> None:
    alice = service.alice
    thread = await alice.thread()
    await held(alice, thread)
    waiting = await ask(alice, thread, "third [fake chunks=1]", ENQUEUE)
    urgent = await ask(alice, thread, NEXT, INTERRUPT)
    await waiting.end()
    texts = [message.text for message in await alice.messages(thread)]
    assert texts[2:] == [NEXT, urgent.text, "third [fake chunks=1]", waiting.text]


async def test_an_interrupt_from_another_replica_stops_the_answer(launch: Launcher, provider: FakeProvider) -> None:
    one, other = await launch(), await launch()
    thread = await one.alice.thread()
    first = await held(one.alice, thread)
    second = await ask(other.alice, thread, NEXT, INTERRUPT)
    await asyncio.gather(first.end(), second.end())
    assert (first.events[-1].run_finished.finish_reason, second.kinds[-1]) == ("cancelled", "run_finished")


async def test_an_interrupt_that_was_cut_off_before_its_cancel_is_finished_by_its_retry(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies between the commit of the queued run and the cancel: the client sends its request again."""
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    with monkeypatch.context() as patch:
        patch.setattr(Cancelling, "interrupt", cut_off)
        refused = await alice.run(thread, NEXT, "key", if_running=INTERRUPT).refusal()
    assert refused.reason == "INTERNAL"
    assert not first.is_over
    retried = await alice.run(thread, NEXT, "key", if_running=INTERRUPT).end()
    assert first.events[-1].run_finished.finish_reason == "cancelled"
    assert [message.text for message in await alice.messages(thread)] == [HELD, first.text, NEXT, retried.text]


async def cut_off(*_: object) -> None:
    raise RuntimeError("killed")


async def test_a_run_that_waits_can_be_cancelled(service: Service, provider: FakeProvider) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    second = await ask(alice, thread, NEXT, ENQUEUE)
    third = await ask(alice, thread, "third [fake chunks=1]", ENQUEUE)
    request = api.CancelRunRequest(thread_id=thread, run_id=second.run_id)
    for _ in range(2):
        cancelled = (await alice.call(alice.conversation.CancelRun, request)).run
        assert (cancelled.status, cancelled.last_seq) == (CANCELLED, 2)
    assert (await second.end()).kinds == ["run_started", "run_finished"]
    assert (await alice.follow(second.run_id).end()).events == second.events
    provider.open_gate("g")
    await third.end()
    texts = [message.text for message in await alice.messages(thread)]
    assert texts == [HELD, first.text, "third [fake chunks=1]", third.text]
    assert len(provider.calls) == 2


async def test_cancelling_a_thread_leaves_what_waits_unless_that_is_asked_for(
    service: Service, provider: FakeProvider
) -> None:
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    second = await ask(alice, thread, HELD.replace("gate=g", "gate=h"), ENQUEUE)
    third = await ask(alice, thread, "third [fake chunks=1]", ENQUEUE)
    await alice.call(alice.conversation.CancelRun, api.CancelRunRequest(thread_id=thread))
    await first.end()
    await second.until(lambda reading: reading.text)
    request = api.CancelRunRequest(thread_id=thread, include_queued=True)
    await alice.call(alice.conversation.CancelRun, request)
    assert [(await run.end()).events[-1].run_finished.finish_reason for run in (second, third)] == ["cancelled"] * 2
    assert len(provider.calls) == 2
    request = api.CancelRunRequest(thread_id=thread, run_id=third.run_id, include_queued=True)
    with pytest.raises(ServiceError) as refused:
        await alice.call(alice.conversation.CancelRun, request)
    assert refused.value.metadata["field"] == "include_queued"


async def test_deleting_a_thread_takes_what_waits_along(service: Service, provider: FakeProvider, sql: Sql) -> None:
    alice = service.alice
    thread = await alice.thread()
    await held(alice, thread)
    for number in range(3):
        await ask(alice, thread, f"{number} [fake chunks=1]", ENQUEUE)
    await alice.delete(thread)
    assert len(provider.calls) == 1
    for table in ("queued_runs", "ai_runs", "run_events", "ai_messages"):
        assert await sql.value(f"SELECT count(*) FROM conversation.{table}") == 0


async def test_a_promoted_run_whose_claim_was_lost_is_begun_by_anybody(launch: Launcher, sql: Sql) -> None:
    """The process that ended the run before died before it could take the next one on."""
    one, other = await launch(), await launch()
    thread = await one.alice.thread()
    await held(one.alice, thread)
    second = await ask(other.alice, thread, NEXT, ENQUEUE)
    lost = (
        "UPDATE conversation.ai_runs SET status = 'cancelled', finished_at = now(), epoch = epoch + 1, worker_id = NULL"
    )
    await sql.rows(f"{lost} WHERE id <> %s", second.run_id)
    promote = "UPDATE conversation.ai_runs SET status = 'running', begun_at = now() WHERE id = %s"
    await sql.rows(promote, second.run_id)
    reply = (
        "INSERT INTO conversation.ai_messages (id, project_id, user_id, thread_id, run_id, position, role, status,"
        " text, created_at) SELECT CASE n WHEN 3 THEN user_message_id ELSE reply_message_id END, project_id, user_id,"
        " thread_id, id, n, CASE n WHEN 3 THEN 'user' ELSE 'assistant' END, CASE n WHEN 3 THEN 'complete' ELSE"
        " 'streaming' END, CASE n WHEN 3 THEN %s ELSE '' END, now() FROM conversation.ai_runs, generate_series(3, 4) n"
        " WHERE id = %s"
    )
    await sql.rows(reply, NEXT, second.run_id)
    await sql.rows("DELETE FROM conversation.queued_runs")
    await second.end()
    assert second.kinds[:2] == ["run_started", "reply_started"]
    assert await eventually(
        lambda: sql.value("SELECT takeovers = 0 FROM conversation.ai_runs WHERE begun_at IS NOT NULL")
    )


async def test_enqueueing_while_answers_end_loses_nothing_and_starts_nothing_twice(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    """Each message is sent just as the answer before it ends: some start at once, some wait, all are answered."""
    alice = service.alice
    thread = await alice.thread()
    runs = [alice.run(thread, "0 [fake chunks=1]")]
    for number in range(1, 40):
        await runs[-1].until(lambda reading: reading.text)
        runs.append(alice.run(thread, f"{number} [fake chunks=1]", if_running=ENQUEUE))
    assert [(await run.end()).kinds[-1] for run in runs] == ["run_finished"] * 40
    asked = [message.text for message in await alice.messages(thread)][::2]
    assert asked == [f"{number} [fake chunks=1]" for number in range(40)]
    assert len(provider.calls) == 40
