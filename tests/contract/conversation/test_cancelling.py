"""Cancel closes the provider within a second, keeps the text and frees the thread (reports.md 21 to 29)."""

import asyncio
import time

import pytest

from tests.contract.conversation.harness import NO_NATS, Launcher, Person, Reading, Service, Sql, eventually
from tests.fakes.provider import FakeProvider
from tests.support.billing import TOKENIZER
from threadloom.conversation.v1.message_pb2 import MessageStatus
from threadloom.conversation.v1.run_pb2 import RunStatus

CANCELLED = MessageStatus.MESSAGE_STATUS_CANCELLED
ENDLESS = "[fake chunks=3000 delay=10]"


async def closed_after(provider: FakeProvider, asked: float) -> float:
    """Seconds from the request to cancel to the provider seeing its connection closed."""
    (call, *_) = await provider.until(lambda calls: calls[0].client_closed)
    assert call.client_closed is not None
    return call.client_closed - asked


async def cancel_and_check(person: Person, run: Reading, thread: str, provider: FakeProvider) -> None:
    """Cancels, and holds what follows against the promise."""
    asked = time.monotonic()
    cancelled = await person.cancel(run.run_id)
    assert cancelled.status == RunStatus.RUN_STATUS_CANCELLED
    assert await closed_after(provider, asked) < 1
    assert (await run.end()).events[-1].run_finished.finish_reason == "cancelled"
    reply = await person.reply(thread)
    assert (reply.status, reply.finish_reason, reply.text) == (CANCELLED, "cancelled", run.text)
    assert provider.calls[0].text.startswith(run.text)
    again = await person.run(thread, "go on [fake chunks=1]").end()
    assert again.kinds[-1] == "run_finished"
    assert len(provider.calls) == 2


async def test_a_cancel_in_mid_text_keeps_what_was_shown(service: Service, provider: FakeProvider, sql: Sql) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, ENDLESS).until(lambda reading: len(reading.text) > 20)
    await cancel_and_check(service.alice, run, thread, provider)
    status, source, written = (
        await sql.rows("SELECT status, usage_source, tokens_out FROM conversation.api_calls ORDER BY started_at")
    )[0]
    assert (status, source) == ("cancelled", "estimated")
    assert written == TOKENIZER.count(run.text)
    assert run.events[-1].run_finished.usage.output_tokens == written


async def test_a_cancel_in_mid_thought_closes_what_is_open(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, "[fake reasoning=3000 delay=10]")
    await run.until(lambda reading: "trace_delta" in reading.kinds)
    await cancel_and_check(service.alice, run, thread, provider)
    assert run.kinds.count("trace_started") == run.kinds.count("trace_ended")
    assert all(trace.HasField("end_time") for trace in await service.alice.traces(thread))


async def test_a_cancel_before_the_first_byte_ends_the_run(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake hang=-1]").until(lambda reading: reading.events)
    await provider.until(lambda calls: calls)
    await cancel_and_check(service.alice, run, thread, provider)
    assert run.kinds == ["run_started", "run_finished"]


async def test_a_cancel_when_nobody_reads_works_the_same(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, ENDLESS).until(lambda reading: reading.text)
    await run.leave()
    asked = time.monotonic()
    await service.alice.cancel(run.run_id)
    assert await closed_after(provider, asked) < 1
    reply = await service.alice.reply(thread)
    assert reply.status == CANCELLED
    assert reply.text.startswith(run.text)


async def test_a_cancel_while_a_retry_is_waited_for_ends_the_wait(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, "[fake error=429 retry_after=9]")
    await run.until(lambda reading: "trace_started" in reading.kinds)
    asked = time.monotonic()
    await service.alice.cancel(run.run_id)
    assert (await run.end()).events[-1].run_finished.finish_reason == "cancelled"
    assert time.monotonic() - asked < 1
    assert len(provider.calls) == 1


async def test_a_second_cancel_changes_nothing(service: Service, sql: Sql) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, ENDLESS).until(lambda reading: reading.text)
    first, second = await asyncio.gather(*(service.alice.cancel(run.run_id) for _ in range(2)))
    before = await sql.contents()
    third = await service.alice.cancel(run.run_id)
    assert first == second == third
    assert await sql.contents() == before


async def test_cancelling_what_ended_leaves_it_as_it_ended(service: Service) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello").end()
    assert (await service.alice.cancel(run.run_id)).status == RunStatus.RUN_STATUS_SUCCEEDED
    assert (await service.alice.reply(thread)).status == MessageStatus.MESSAGE_STATUS_COMPLETE


async def test_a_cancel_works_while_attached_by_resume(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, ENDLESS).until(lambda reading: reading.text)
    await run.leave()
    resumed = await service.alice.follow(run.run_id).until(lambda reading: reading.text)
    await cancel_and_check(service.alice, resumed, thread, provider)


@pytest.mark.parametrize("nats", ["up", "down"])
async def test_a_cancel_at_another_replica_works_with_and_without_nats(
    launch: Launcher, provider: FakeProvider, nats: str
) -> None:
    environ = {"NATS_URL": NO_NATS} if nats == "down" else {}
    first, second = await launch(**environ), await launch(**environ)
    thread = await first.alice.thread()
    run = await first.alice.run(thread, ENDLESS).until(lambda reading: reading.text)
    await cancel_and_check(second.alice, run, thread, provider)


async def test_a_silent_run_at_another_replica_is_cancelled_without_nats(
    launch: Launcher, provider: FakeProvider
) -> None:
    first, second = await launch(NATS_URL=NO_NATS), await launch(NATS_URL=NO_NATS)
    thread = await first.alice.thread()
    run = await first.alice.run(thread, "[fake hang=-1]").until(lambda reading: reading.events)
    await provider.until(lambda calls: calls)
    await cancel_and_check(second.alice, run, thread, provider)


async def test_a_provider_that_goes_on_after_the_close_does_not_hold_the_thread(
    service: Service, provider: FakeProvider
) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, "[fake chunks=3000 delay=10 ignore_close=1]")
    await run.until(lambda reading: reading.text)
    await cancel_and_check(service.alice, run, thread, provider)


async def test_many_cancels_leave_no_run_behind(service: Service, sql: Sql) -> None:
    threads = [await service.alice.thread() for _ in range(20)]
    runs = [service.alice.run(thread, ENDLESS) for thread in threads]
    for run in runs:
        await run.until(lambda reading: reading.text)
    await asyncio.gather(*(service.alice.cancel(run.run_id) for run in runs))
    for run in runs:
        await run.end()
    assert await sql.rows("SELECT status, count(*) FROM conversation.ai_runs GROUP BY 1") == [("cancelled", 20)]


async def test_deleting_a_thread_ends_its_run_and_its_followers(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, ENDLESS, key="a").until(lambda reading: reading.text)
    follower = await service.alice.follow(run.run_id).until(lambda reading: reading.text)
    asked = time.monotonic()
    await service.alice.delete(thread)
    assert await closed_after(provider, asked) < 1
    for reading in (run, follower):
        assert (await reading.end()).events[-1].run_finished.finish_reason == "cancelled"
    await check_gone(sql, thread, run.run_id)


async def test_deleting_a_thread_at_another_replica_takes_its_run_from_the_owner(
    launch: Launcher, provider: FakeProvider, sql: Sql
) -> None:
    owner, other = await launch(), await launch()
    thread = await owner.alice.thread()
    run = await owner.alice.run(thread, ENDLESS).until(lambda reading: reading.text)
    asked = time.monotonic()
    await other.alice.delete(thread)
    assert await closed_after(provider, asked) < 1
    await asyncio.wait({run.task}, timeout=5)
    assert run.is_over or (run.error and run.error.reason == "NOT_FOUND")
    await check_gone(sql, thread, run.run_id)
    assert len(provider.calls) == 1


async def check_gone(sql: Sql, thread: str, run: str) -> None:
    """Nothing of the thread is left but the account of its calls, which holds no text."""

    async def rows() -> dict[str, list[str]]:
        return {
            name: rows for name, rows in (await sql.contents()).items() if any(thread in r or run in r for r in rows)
        }

    async def only_calls() -> bool:
        return set(await rows()) <= {"api_calls", "idempotency_keys"}

    assert await eventually(only_calls, 1)
    assert await sql.value("SELECT count(*) FROM conversation.api_calls WHERE status = 'started'") == 0
