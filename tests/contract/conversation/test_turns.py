"""From one run of a thread to the next: what happens at the same moment, and what is lost in between."""

import asyncio

import psycopg
import pytest

from services.conversation.store.queue import PROMOTE
from tests.contract.conversation.harness import Launcher, Service, Sql, eventually
from tests.contract.conversation.waiting import ended, enqueue, held, start, texts
from tests.fakes.provider import FakeProvider
from tests.support.databases import Database
from tests.support.holds import Hold
from threadloom.conversation.v1.run_pb2 import RunStatus

ROUNDS = 25
WAITS_FOR_LOCK = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
BEGUN = ["run_started", "reply_started"]


async def waits_for_lock(sql: Sql, backends: int) -> None:
    """Until so many backends wait for a row; the held one counts, its lock is an advisory one."""

    async def look() -> bool:
        return bool(await sql.value(WAITS_FOR_LOCK) >= backends)

    await eventually(look)


async def test_a_message_that_comes_while_a_run_commits_its_end_is_answered(
    service: Service, provider: FakeProvider, database: Database, sql: Sql
) -> None:
    """The end has read the queue already: who still took the run for active would wait for ever."""
    thread = await service.alice.thread()
    first = await held(service.alice, thread)
    with Hold(database.admin_url, "ai_runs", "NEW.status <> 'running'", "UPDATE", at_commit=True) as hold:
        provider.open_gate("g")
        await asyncio.to_thread(hold.wait)
        second = service.alice.run(thread, "second [fake chunks=1]", if_running=2)
        await waits_for_lock(sql, 2)
        hold.release()
        await first.end()
        await second.end()
    assert second.kinds[:2] == BEGUN


@pytest.mark.parametrize("ends", ["by itself", "by a cancel"])
async def test_a_run_that_ends_while_a_message_is_put_behind_it_starts_it(
    service: Service, provider: FakeProvider, database: Database, sql: Sql, ends: str
) -> None:
    """The message is in the queue, but not committed: an end that did not wait for it would not see it.

    The cancelled run's only call has ended before, so nothing else of its end locks the thread.
    """
    alice = service.alice
    thread = await alice.thread()
    if ends == "by itself":
        first = await held(alice, thread)
    else:
        first = alice.run(thread, "first [fake error=429 retry_after=9]")
        await first.until(lambda reading: "trace_ended" in reading.kinds)
    with Hold(database.admin_url, "queued_runs", "true", at_commit=True) as hold:
        second = alice.run(thread, "second [fake chunks=1]", if_running=2)
        await asyncio.to_thread(hold.wait)
        provider.open_gate("g")
        cancelling = asyncio.create_task(alice.cancel(first.run_id)) if ends == "by a cancel" else None
        await waits_for_lock(sql, 2)
        hold.release()
        if cancelling is not None:
            await cancelling
        await first.end()
        await second.end()
    assert second.kinds[:2] == BEGUN


async def test_an_interruption_at_the_moment_of_an_end_is_answered(
    service: Service, provider: FakeProvider, database: Database, sql: Sql
) -> None:
    """It waits for the ending run's row, and by then another run is active: that one is interrupted."""
    thread = await service.alice.thread()
    first = await held(service.alice, thread)
    second = await enqueue(service.alice, thread, "second [fake chunks=3000 delay=10]")
    with Hold(database.admin_url, "ai_runs", "NEW.status = 'succeeded'", "UPDATE", at_commit=True) as hold:
        provider.open_gate("g")
        await asyncio.to_thread(hold.wait)
        third = service.alice.run(thread, "third [fake chunks=1]", if_running=3)
        await waits_for_lock(sql, 2)
        hold.release()
        await first.end()
        await third.end()
    assert (await second.end()).events[-1].run_finished.finish_reason == "cancelled"
    assert third.events[-1].run_finished.finish_reason == "stop"


async def test_messages_that_come_again_and_again_as_runs_end_are_all_answered_one_after_another(
    launch: Launcher, provider: FakeProvider, sql: Sql
) -> None:
    replicas = [await launch(), await launch()]
    thread = await replicas[0].alice.thread()
    runs: list[str] = []
    for number in range(ROUNDS):
        # Two at once, at about the moment at which the run before ends.
        asks = (start(one.alice, thread, f"{number} [fake chunks=1]") for one in replicas)
        runs += [run.id for run in await asyncio.gather(*asks)]
        await ended(replicas[0].alice, runs[-2:-1])
    found = await ended(replicas[0].alice, runs)
    assert {run.status for run in found} == {RunStatus.RUN_STATUS_SUCCEEDED}
    assert len(provider.calls) == len(runs) == 2 * ROUNDS
    messages = await replicas[0].alice.messages(thread)
    assert [message.position for message in messages] == list(range(1, 4 * ROUNDS + 1))
    assert {run.takeovers for run in found} == {0}
    assert await sql.value("SELECT count(*) FROM conversation.queued_runs") == 0
    overlaps = (
        "SELECT count(*) FROM conversation.api_calls a JOIN conversation.api_calls b"
        " ON a.id < b.id AND a.started_at < b.ended_at AND b.started_at < a.ended_at"
    )
    assert await sql.value(overlaps) == 0


async def test_an_end_that_is_written_twice_starts_one_run(
    service: Service, provider: FakeProvider, database: Database
) -> None:
    thread = await service.alice.thread()
    first = await held(service.alice, thread)
    waiting = [await enqueue(service.alice, thread, f"{number} [fake chunks=1]") for number in range(2)]
    async with await psycopg.AsyncConnection.connect(database.admin_url) as connection:
        await connection.execute("UPDATE conversation.ai_runs SET status = 'failed' WHERE id = %s", [first.run_id])
        started = [(await connection.execute(PROMOTE, {"thread": thread})).rowcount for _ in range(3)]
        assert started == [1, 0, 0]
        await connection.rollback()
    provider.open_gate("g")
    for run in (first, *waiting):
        await run.end()


@pytest.mark.usefixtures("quick_lease")
async def test_the_queue_of_a_process_that_leaves_goes_on_elsewhere(launch: Launcher, provider: FakeProvider) -> None:
    one, other = await launch(THREADLOOM_DRAIN_SECONDS="10"), await launch()
    thread = await one.alice.thread()
    first = await held(one.alice, thread)
    runs = [await start(one.alice, thread, f"{number} [fake chunks=1]") for number in range(3)]
    one.ask_to_stop()
    provider.open_gate("g")
    found = await ended(other.alice, [first.run_id, *(run.id for run in runs)])
    assert {(run.status, run.takeovers) for run in found} == {(RunStatus.RUN_STATUS_SUCCEEDED, 0)}
    asked = [text for text in await texts(other.alice, thread) if "[fake" in text][1:]
    assert asked == [f"{number} [fake chunks=1]" for number in range(3)]


async def test_a_run_that_nobody_has_begun_is_cancelled_with_a_whole_log(
    launch: Launcher, provider: FakeProvider
) -> None:
    one = await launch(THREADLOOM_DRAIN_SECONDS="10")
    thread = await one.alice.thread()
    first = await held(one.alice, thread)
    second = await start(one.alice, thread, "second [fake chunks=1]")
    one.ask_to_stop()
    provider.open_gate("g")
    await first.end()
    await one.stop()
    other = await launch()  # its lease is too young to claim anything by itself
    assert (await other.alice.get_run(second.id)).status == RunStatus.RUN_STATUS_RUNNING
    assert (await other.alice.cancel(second.id)).status == RunStatus.RUN_STATUS_CANCELLED
    assert (await other.alice.follow(second.id).end()).kinds == ["run_started", "run_finished"]
    assert len(provider.calls) == 1
