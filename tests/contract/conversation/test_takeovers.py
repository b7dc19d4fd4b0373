"""A run whose owner is gone is ended by another, and nothing shown is taken away in silence (durability.md 7 to 11)."""

from dataclasses import replace

import pytest

from kit.ids import new_id
from services.conversation import limits
from tests.contract.conversation.harness import Launcher, Reading, Service, Sql, eventually
from tests.contract.conversation.orphans import SHOWN, Orphan, an_orphan, insert
from tests.fakes.provider import FakeProvider
from tests.support.billing import TOKENIZER
from threadloom.conversation.v1.message_pb2 import MessageStatus
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import RunStatus

pytestmark = pytest.mark.usefixtures("quick_lease")

CALL = "SELECT id::text, status, usage_source, tokens_in, tokens_out, attempt, step FROM conversation.api_calls"


async def followed(service: Service, sql: Sql, orphan: Orphan) -> Reading:
    """The orphan, inserted and followed to its end."""
    return await service.alice.follow(await insert(service, sql, orphan)).end()


def the(reading: Reading, kind: str) -> RunEvent:
    """The only event of a kind."""
    (found,) = [event for event in reading.events if event.HasField(kind)]  # type: ignore[arg-type]
    return found


async def test_a_cut_run_is_claimed_superseded_and_finished(service: Service, provider: FakeProvider, sql: Sql) -> None:
    thread = await service.alice.thread()
    orphan = an_orphan(thread)
    run = await followed(service, sql, orphan)
    (call,) = provider.calls
    superseded = the(run, "step_superseded").step_superseded
    assert (superseded.step, superseded.shown_chars, superseded.kept_chars) == (1, len(SHOWN), 0)
    assert superseded.usage.estimated
    finished = the(run, "run_finished").run_finished
    assert finished.text == run.text == call.text
    assert finished.usage.estimated
    reply = await service.alice.reply(thread)
    assert (reply.text, reply.status) == (call.text, MessageStatus.MESSAGE_STATUS_COMPLETE)
    assert reply.usage == finished.usage
    assert run.kinds.count("reply_started") == 1
    assert [event.seq for event in run.events] == list(range(1, len(run.events) + 1))
    stored = await service.alice.get_run(run.run_id)
    assert (stored.status, stored.takeovers) == (RunStatus.RUN_STATUS_SUCCEEDED, 1)


async def test_the_superseded_step_stays_in_the_record(service: Service, sql: Sql) -> None:
    thread = await service.alice.thread()
    run = await followed(service, sql, an_orphan(thread))
    assert SHOWN in "".join(event.text_delta.text for event in run.events)
    traces = await service.alice.traces(thread)
    assert [trace.WhichOneof("payload") for trace in traces] == ["thinking", "llm_request", "retry", "llm_request"]
    assert all(trace.HasField("end_time") for trace in traces)
    assert (traces[2].retry.attempt, traces[2].retry.withdrawn_chars) == (2, len(SHOWN))


async def test_the_cut_call_is_closed_as_cut_with_an_estimate(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread(system_prompt="x" * 40)
    orphan = an_orphan(thread, text="y" * 41)
    run = await followed(service, sql, orphan)
    first, second = await sql.rows(f"{CALL} ORDER BY started_at")
    thinking = TOKENIZER.count("hm")
    read = TOKENIZER.count_input([{"content": "x" * 40}, {"content": "y" * 41}])
    assert first == (str(orphan.call), "cut", "estimated", read, TOKENIZER.count(SHOWN) + thinking, 1, 1)
    assert second[:3] == (provider.calls[0].client_request_id, "succeeded", "provider")
    assert second[5:] == (2, 2)
    total = await sql.rows("SELECT sum(tokens_in)::int, sum(tokens_out)::int FROM conversation.api_calls")
    usage = run.events[-1].run_finished.usage
    assert total == [(usage.input_tokens, usage.output_tokens)]


async def test_the_model_is_not_shown_superseded_text(service: Service, provider: FakeProvider, sql: Sql) -> None:
    thread = await service.alice.thread()
    await followed(service, sql, an_orphan(thread))
    await service.alice.run(thread, "and now?").end()
    assert all(SHOWN.strip() not in str(call.body["messages"]) for call in provider.calls)


async def test_a_run_cut_before_its_reply_is_made_again_without_withdrawing(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await followed(service, sql, an_orphan(thread, is_begun=False))
    assert run.kinds[:4] == ["run_started", "trace_started", "trace_ended", "reply_started"]
    assert not run.events[-1].run_finished.HasField("text")
    assert run.text == provider.calls[0].text
    assert (await sql.rows(f"{CALL} ORDER BY started_at"))[0][1] == "cut"


async def test_a_run_that_was_handed_over_is_claimed_and_not_counted_as_a_takeover(service: Service, sql: Sql) -> None:
    thread = await service.alice.thread()
    run = await followed(service, sql, replace(an_orphan(thread), worker=None))
    assert (await service.alice.get_run(run.run_id)).takeovers == 0


async def test_a_run_of_a_worker_whose_lease_ran_out_is_claimed_and_of_one_that_lives_is_not(
    service: Service, sql: Sql
) -> None:
    threads = [await service.alice.thread() for _ in range(2)]
    dead, alive = new_id(), new_id()
    lease = (
        "INSERT INTO conversation.workers (id, lease_until) VALUES (%s, clock_timestamp() + make_interval(secs => %s))"
    )
    await sql.rows(lease, alive, 60)
    await sql.rows(lease, dead, 60)
    left = await insert(service, sql, an_orphan(threads[0], worker=dead))
    kept = await insert(service, sql, an_orphan(threads[1], worker=alive))
    await sql.rows("UPDATE conversation.workers SET lease_until = clock_timestamp() WHERE id = %s", dead)
    await service.alice.follow(left).end()
    run = await service.alice.get_run(kept)
    assert (run.status, run.takeovers, run.last_seq) == (RunStatus.RUN_STATUS_RUNNING, 0, 8)


async def test_the_third_takeover_ends_the_run_with_its_text_kept(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await followed(service, sql, an_orphan(thread, takeovers=limits.TAKEOVERS_MAX - 1))
    assert run.events[-1].run_failed.error.code == "INTERNAL"
    assert not run.events[-1].run_failed.before_reply
    reply = await service.alice.reply(thread)
    assert (reply.text, reply.status, reply.error.code) == (SHOWN, MessageStatus.MESSAGE_STATUS_FAILED, "INTERNAL")
    assert provider.calls == []
    assert (await sql.rows(CALL))[0][1:3] == ("cut", "estimated")
    await service.alice.run(thread, "and now?").end()


async def test_the_third_takeover_of_a_run_without_a_reply_leaves_none_and_frees_its_key(
    service: Service, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await followed(service, sql, an_orphan(thread, is_begun=False, takeovers=limits.TAKEOVERS_MAX - 1))
    assert run.events[-1].run_failed.before_reply
    assert len(await service.alice.messages(thread)) == 1


async def test_a_takeover_does_not_reset_the_turns_time(launch: Launcher, provider: FakeProvider, sql: Sql) -> None:
    service = await launch(THREADLOOM_TURN_SECONDS="30")
    thread = await service.alice.thread()
    run = await followed(service, sql, an_orphan(thread, seconds_ago=31.0))
    assert run.events[-1].run_failed.error.code == "TURN_TIMEOUT"
    assert (await service.alice.reply(thread)).text == SHOWN
    assert provider.calls == []


async def test_a_run_cancelled_while_nobody_owned_it_ends_cancelled_by_whoever_claims_it(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await followed(service, sql, an_orphan(thread, is_cancelled=True))
    assert run.events[-1].run_finished.finish_reason == "cancelled"
    assert "step_superseded" not in run.kinds
    reply = await service.alice.reply(thread)
    assert (reply.text, reply.status) == (SHOWN, MessageStatus.MESSAGE_STATUS_CANCELLED)
    assert provider.calls == []


async def test_a_cancel_ends_a_run_without_an_owner_at_once(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch, sql: Sql, provider: FakeProvider
) -> None:
    monkeypatch.setattr(limits, "LEASE_SECONDS", 60.0)  # nobody claims by itself within this test
    service = await launch()
    thread = await service.alice.thread()
    run = await insert(service, sql, an_orphan(thread))
    ended = await service.alice.cancel(run)
    assert ended.status == RunStatus.RUN_STATUS_CANCELLED
    assert (await service.alice.reply(thread)).text == SHOWN
    assert (await sql.rows(CALL))[0][1] == "cut"
    assert provider.calls == []


async def test_a_thread_is_deleted_with_a_run_nobody_owns(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch, sql: Sql
) -> None:
    monkeypatch.setattr(limits, "LEASE_SECONDS", 60.0)
    service = await launch()
    thread = await service.alice.thread()
    await insert(service, sql, an_orphan(thread))
    await service.alice.delete(thread)
    for table in ("ai_threads", "ai_messages", "ai_runs", "run_events", "trace_events"):
        assert await sql.value(f"SELECT count(*) FROM conversation.{table}") == 0


async def test_a_run_of_our_own_whose_start_was_lost_is_adopted(
    service: Service, provider: FakeProvider, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ADOPT_AFTER_SECONDS", 1.0)
    thread = await service.alice.thread()
    own = await sql.value("SELECT id FROM conversation.workers")
    orphan = an_orphan(thread, is_begun=False, worker=own, seconds_ago=0.0)
    run = await followed(service, sql, orphan)
    assert run.text == provider.calls[0].text
    age = "SELECT extract(epoch FROM finished_at - created_at)::float8 FROM conversation.ai_runs"
    assert await sql.value(age) >= 1.0


async def test_nothing_is_claimed_before_a_whole_lease_of_own_renewals(
    launch: Launcher, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEASE_SECONDS", 1.0)
    service = await launch()
    thread = await service.alice.thread()
    await followed(service, sql, an_orphan(thread))
    waited = (
        "SELECT extract(epoch FROM (SELECT max(started_at) FROM conversation.api_calls) - started_at)::float8"
        " FROM conversation.workers"
    )
    assert await sql.value(waited) >= 0.8  # the worker counts from before its row was written


async def test_the_runs_of_a_dead_process_are_spread_and_each_is_made_once(
    launch: Launcher, provider: FakeProvider, sql: Sql
) -> None:
    services = [await launch(), await launch()]
    alice, dead = services[0].alice, new_id()
    threads = [await alice.thread() for _ in range(12)]
    runs = [await insert(services[0], sql, an_orphan(thread, worker=dead)) for thread in threads]
    for run in runs:
        await alice.follow(run).end()
    assert len(provider.calls) == 12
    assert (
        await sql.value("SELECT count(*) FROM conversation.ai_runs WHERE takeovers = 1 AND status = 'succeeded'") == 12
    )
    texts = {(await alice.reply(thread)).text for thread in threads}
    assert texts == {call.text for call in provider.calls}


async def test_a_process_that_leaves_hands_its_runs_over_and_its_readers_lose_nothing(
    launch: Launcher, provider: FakeProvider, sql: Sql
) -> None:
    leaving, staying = await launch(), await launch()
    thread = await leaving.alice.thread()
    run = await leaving.alice.run(thread, "[fake chunks=6 gate=g gate_at=3]").until(lambda reading: reading.text)
    reader = await staying.alice.follow(run.run_id).until(lambda reading: reading.text)
    await leaving.stop()
    provider.open_gate("g")
    await reader.end()
    reply = await staying.alice.reply(thread)
    assert reader.text == reply.text == provider.calls[1].text
    assert (await staying.alice.get_run(run.run_id)).takeovers == 0
    statuses = await sql.rows("SELECT id::text, status FROM conversation.api_calls ORDER BY started_at")
    assert statuses == [
        (provider.calls[0].client_request_id, "cut"),
        (provider.calls[1].client_request_id, "succeeded"),
    ]
    assert await eventually(lambda: sql.rows("SELECT 1 FROM conversation.workers HAVING count(*) = 1"))
