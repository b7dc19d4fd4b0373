"""An owner that lost its run writes nothing more and asks nobody more (durability.md 2, 6, 7)."""

import asyncio

import pytest

from tests.contract.conversation.harness import Reading, Service, Sql, eventually
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1.run_pb2 import RunStatus

# Somebody else has the run from now on, and lives; so nobody else claims it.
STEAL = """
WITH ghost AS (
    INSERT INTO conversation.workers (id, lease_until)
    VALUES (gen_random_uuid(), clock_timestamp() + interval '1 hour') RETURNING id
)
UPDATE conversation.ai_runs r SET epoch = epoch + 1, worker_id = ghost.id FROM ghost WHERE r.id = %s
"""


async def steal(sql: Sql, run: str) -> dict[str, list[str]]:
    """Gives the run to somebody else; returns all rows as they were then."""
    await sql.rows(STEAL, run)
    return await sql.contents()


async def check_untouched(sql: Sql, service: Service, run: Reading, stolen: dict[str, list[str]]) -> None:
    """Two renewals later, nothing but the row's owner is different."""
    renewed = (
        "SELECT max(lease_until) FROM conversation.workers WHERE lease_until < clock_timestamp() + interval '1 min'"
    )
    before = await sql.value(renewed)

    async def later() -> bool:
        return bool((await sql.value(renewed) - before).total_seconds() > 1.1)

    await eventually(later)
    assert await sql.contents() == stolen
    stored = await service.alice.get_run(run.run_id)
    assert (stored.status, stored.takeovers) == (RunStatus.RUN_STATUS_RUNNING, 0)


async def test_an_owner_that_lost_its_run_in_mid_text_stops_and_closes_the_provider(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake chunks=3000 delay=5]").until(lambda reading: len(reading.text) > 30)
    stolen = await steal(sql, run.run_id)
    await provider.until(lambda calls: calls[0].client_closed, 1.5)
    await check_untouched(sql, service, run, stolen)
    assert len(provider.calls) == 1
    stored = "SELECT count(*) FROM conversation.run_events WHERE run_id = %s"
    assert len(run.events) == await sql.value(stored, run.run_id)  # nothing was shown that is not stored
    await run.leave()


async def test_an_owner_that_lost_its_run_in_silence_stops_too(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake hang=-1]").until(lambda reading: reading.events)
    await provider.until(lambda calls: calls)
    stolen = await steal(sql, run.run_id)
    await provider.until(lambda calls: calls[0].client_closed, 1.5)
    await check_untouched(sql, service, run, stolen)
    await run.leave()


@pytest.mark.parametrize("script", ["error=429 retry_after=0.4", "close=0"])
async def test_an_owner_that_lost_its_run_makes_no_retry(
    service: Service, provider: FakeProvider, sql: Sql, script: str
) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, f"[fake {script}]")
    await run.until(lambda reading: "trace_ended" in reading.kinds)
    stolen = await steal(sql, run.run_id)
    await check_untouched(sql, service, run, stolen)
    assert len(provider.calls) == 1
    await run.leave()


async def test_an_owner_that_lost_its_run_at_the_end_does_not_end_it(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake chunks=3 gate=g gate_at=3]").until(lambda reading: reading.text)
    await provider.until(lambda calls: calls[0].held)
    await run.until(lambda reading: reading.text == provider.calls[0].text)
    stolen = await steal(sql, run.run_id)
    provider.open_gate("g")
    await check_untouched(sql, service, run, stolen)
    assert "run_finished" not in run.kinds
    await run.leave()


async def test_losing_one_run_leaves_its_neighbours_alone(service: Service, provider: FakeProvider, sql: Sql) -> None:
    threads = [await service.alice.thread() for _ in range(6)]
    runs = [service.alice.run(thread, "[fake chunks=60 delay=10]") for thread in threads]
    for run in runs:
        await run.until(lambda reading: reading.text)
    await steal(sql, runs[0].run_id)
    for thread, run in zip(threads[1:], runs[1:], strict=True):
        await run.end()
        assert (await service.alice.reply(thread)).text == run.text
        assert run.events[-1].run_finished.finish_reason == "stop"
    assert len(provider.calls) == 6
    await runs[0].leave()


async def test_a_thread_deleted_under_its_owner_stops_the_run_and_its_followers(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake chunks=3000 delay=10]").until(lambda reading: reading.text)
    await sql.rows("DELETE FROM conversation.ai_threads")
    await sql.rows("DELETE FROM conversation.run_events")
    await provider.until(lambda calls: calls[0].client_closed, 1.5)
    assert (await run.refusal()).reason == "NOT_FOUND"
    assert await sql.value("SELECT count(*) FROM conversation.run_events") == 0
    await asyncio.wait_for(service.alice.thread(), 1)
