"""What is shown is stored, whatever happens to the commit (durability.md 1 to 5)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest
from prometheus_client import REGISTRY

from services.conversation import limits
from tests.contract.conversation.harness import Launcher, Reading, Service, Sql, eventually
from tests.fakes.provider import FakeProvider
from tests.support.databases import Database, at_port
from tests.support.holds import hold_event
from tests.support.servers import RunningPostgres
from tests.support.slow_proxy import SlowProxy


@asynccontextmanager
async def locked(database: Database, run: str) -> AsyncIterator[None]:
    """Keeps the run's row locked, as a cancel, a claim or a state change does for a moment."""
    async with await psycopg.AsyncConnection.connect(database.admin_url) as connection:
        await connection.execute("SELECT 1 FROM conversation.ai_runs WHERE id = %s FOR UPDATE", [run])
        yield


def appends() -> float:
    """How many batches this process has committed."""
    return REGISTRY.get_sample_value("threadloom_journal_commit_seconds_count", {"kind": "append"}) or 0.0


async def stored_text(service: Service, run: Reading) -> str:
    """The text by the log, read by a new follower."""
    return (await service.alice.follow(run.run_id).end()).text


@asynccontextmanager
async def text_refused(sql: Sql, run: str, sqlstate: str) -> AsyncIterator[None]:
    """Postgres refuses every further text of one run."""
    await sql.rows(
        f"""
        CREATE FUNCTION conversation.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'refused by the test' USING ERRCODE = '{sqlstate}'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON conversation.run_events FOR EACH ROW
        WHEN (NEW.run_id = '{run}' AND NEW.kind = 3) EXECUTE FUNCTION conversation.refuse()
        """
    )
    yield
    await sql.rows("DROP FUNCTION conversation.refuse() CASCADE")


async def test_events_of_a_locked_run_wait_and_are_not_lost(
    service: Service, provider: FakeProvider, database: Database
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake chunks=10 gate=g gate_at=2]").until(lambda reading: reading.text)
    async with locked(database, run.run_id):
        provider.open_gate("g")
        await provider.until(lambda calls: calls[0].outcome == "finished")
    await run.end()
    assert run.text == provider.calls[0].text == await stored_text(service, run)


async def test_waiting_for_a_locked_run_does_not_hammer_the_database(
    service: Service, provider: FakeProvider, database: Database
) -> None:
    threads = [await service.alice.thread() for _ in range(2)]
    run = await service.alice.run(threads[0], "[fake chunks=9 gate=g gate_at=2]").until(lambda reading: reading.text)
    async with locked(database, run.run_id):
        before, started = appends(), asyncio.get_running_loop().time()
        provider.open_gate("g")
        other = await service.alice.run(threads[1], "[fake chunks=50 delay=10]").end()  # half a second goes by
        seconds = asyncio.get_running_loop().time() - started
        assert appends() - before < seconds / limits.BUSY_PAUSE_SECONDS + len(other.batches) + 10
    await run.end()


async def test_text_is_not_lost_when_a_commit_was_answered_late_and_the_run_is_locked_then(
    launch: Launcher, provider: FakeProvider, database: Database, sql: Sql, postgres: RunningPostgres
) -> None:
    with SlowProxy(postgres.server.port) as proxy:
        service = await launch(CONVERSATION_ENGINE_DATABASE_URL=at_port(database.engine_url, proxy.port))
        thread = await service.alice.thread()
        run = service.alice.run(thread, "[fake chunks=3 gate=a gate_at=1]")
        with hold_event(database.admin_url, "text_delta") as hold:
            await asyncio.to_thread(hold.wait)
            proxy.to_client_seconds = 30.0  # the answer to this commit will not arrive
            hold.release()
            texts = "SELECT count(*) FROM conversation.run_events WHERE kind = 3"
            assert await eventually(lambda: sql.value(texts))
            async with locked(database, str(await sql.value("SELECT id FROM conversation.ai_runs"))):
                before = appends()
                proxy.to_client_seconds = 0.0
                proxy.cut()
                proxy.mend()

                async def is_retried() -> bool:
                    return appends() > before

                await eventually(is_retried)
                provider.open_gate("a")
                await provider.until(lambda calls: calls[0].outcome == "finished")
        await run.end()
        whole = provider.calls[0].text
        assert (run.text, (await service.alice.reply(thread)).text) == (whole, whole)
        assert await stored_text(service, run) == whole
        await service.stop()


@pytest.mark.usefixtures("quick_lease")
@pytest.mark.parametrize("sqlstate", ["22021", "P0001"])
async def test_one_run_that_cannot_be_stored_fails_alone(
    service: Service, provider: FakeProvider, sql: Sql, sqlstate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ADOPT_AFTER_SECONDS", 0.5)
    threads = [await service.alice.thread() for _ in range(4)]
    script = "[fake chunks=8 delay=5 gate=g gate_at=2]"
    runs = [service.alice.run(thread, script) for thread in threads]
    for run in runs:
        await run.until(lambda reading: reading.text)
    guilty = runs[0]
    async with text_refused(sql, guilty.run_id, sqlstate):
        provider.open_gate("g")
        for thread, run in zip(threads[1:], runs[1:], strict=True):
            await run.end()
            assert (await service.alice.reply(thread)).text == run.text
        await guilty.end(20)
    reply = await service.alice.reply(threads[0])
    assert reply.text == guilty.text == await stored_text(service, guilty)
    assert guilty.events[-1].run_failed.error.code == "INTERNAL"


async def test_a_slow_database_does_not_count_as_a_silent_provider(
    launch: Launcher, provider: FakeProvider, database: Database, postgres: RunningPostgres
) -> None:
    with SlowProxy(postgres.server.port) as proxy:
        service = await launch(
            CONVERSATION_ENGINE_DATABASE_URL=at_port(database.engine_url, proxy.port),
            THREADLOOM_MODEL_IDLE_SECONDS="0.4",
        )
        thread = await service.alice.thread()
        # 3 MB: more than is read ahead. The fake must not take its time to count them.
        provider.script(chunks=60, size=50_000, gate="g", gate_at=1, unlimited=1, completion_tokens=100)
        run = await service.alice.run(thread, "hello", max_output_tokens=1_000_000).until(lambda reading: reading.text)
        proxy.cut()
        provider.open_gate("g")
        await asyncio.wait({run.task}, timeout=1.2)
        proxy.mend()
        await run.end(15)
        assert run.kinds[-1] == "run_finished"
        assert run.text == provider.calls[0].text == (await service.alice.reply(thread)).text
        await service.stop()


async def test_a_database_that_is_cut_off_for_a_moment_costs_no_character(
    launch: Launcher, provider: FakeProvider, database: Database, postgres: RunningPostgres
) -> None:
    with SlowProxy(postgres.server.port) as proxy:
        service = await launch(CONVERSATION_ENGINE_DATABASE_URL=at_port(database.engine_url, proxy.port))
        thread = await service.alice.thread()
        run = service.alice.run(thread, "[fake chunks=150 delay=10]")
        for words in (20, 60, 100):
            await run.until(lambda reading, words=words: len(reading.text.split()) > words)  # type: ignore[misc]
            proxy.cut()
            proxy.mend()
        await run.end(15)
        assert run.text == provider.calls[0].text == (await service.alice.reply(thread)).text
        assert await stored_text(service, run) == run.text
        assert len(provider.calls) == 1
        await service.stop()


async def test_the_text_at_rest_is_never_much_older_than_a_second(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake chunks=5 gate=g gate_at=3]").until(lambda reading: reading.text)
    at_rest = "SELECT text FROM conversation.ai_messages WHERE status = 'streaming' AND text <> ''"
    ((text,),) = await eventually(lambda: sql.rows(at_rest), limits.SNAPSHOT_SECONDS * 2)
    assert text == run.text
    provider.open_gate("g")
    await run.end()
