"""What a process holds in Postgres when it freezes, where its loop stands still (durability.md 8)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from uuid import UUID

import psycopg
import pytest
import pytest_asyncio

from deploy.local.processes import wait_until
from services.conversation import limits
from services.conversation.server import SESSION
from services.conversation.store.log import Statement, change_state
from tests.contract.conversation.harness import Service, Sql, eventually
from tests.fakes.provider import FakeProvider
from tests.support.databases import Database

KEY = 4711
SOON_SECONDS = 2.0


@pytest.fixture
def admin(database: Database) -> Iterator[psycopg.Connection]:
    """A connection whose use stops this process's loop: to its other sessions the process is frozen meanwhile."""
    with psycopg.connect(database.admin_url, autocommit=True) as connection:
        yield connection


@pytest_asyncio.fixture
async def owner(database: Database) -> AsyncIterator[psycopg.AsyncConnection]:
    """A session as owners have it."""
    connection = await psycopg.AsyncConnection.connect(database.engine_url, autocommit=True, options=SESSION)
    yield connection
    await connection.close()


async def a_running_run(service: Service, provider: FakeProvider, sql: Sql) -> UUID:
    await service.alice.run(await service.alice.thread(), "[fake gate=a]").until(lambda reading: reading.kinds)
    found: UUID = await sql.value("SELECT id FROM conversation.ai_runs")
    return found


async def test_a_state_change_that_was_sent_commits_without_its_process(
    service: Service, provider: FakeProvider, sql: Sql, admin: psycopg.Connection, owner: psycopg.AsyncConnection
) -> None:
    run = await a_running_run(service, provider, sql)
    admin.execute("SELECT pg_advisory_lock(%s)", [KEY])
    waiting = Statement("SELECT pg_advisory_xact_lock_shared(%(key)s)", {"key": KEY})
    change = Statement("UPDATE conversation.ai_runs SET log_bytes = 77 WHERE id = %(run)s", {"run": run})
    changing = asyncio.create_task(change_state(owner, run, 1, [], [waiting, change]))
    await eventually(lambda: sql.rows("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
    admin.execute("SELECT pg_advisory_unlock(%s)", [KEY])
    stored = "SELECT id FROM conversation.ai_runs WHERE id = %s AND log_bytes = 77"
    assert wait_until(lambda: bool(admin.execute(stored, [run]).fetchall()), SOON_SECONDS)
    await changing


async def test_a_transaction_left_in_mid_pipeline_lets_its_run_go(
    service: Service, provider: FakeProvider, sql: Sql, admin: psycopg.Connection, owner: psycopg.AsyncConnection
) -> None:
    run = await a_running_run(service, provider, sql)
    lock = "SELECT id FROM conversation.ai_runs WHERE id = %s FOR UPDATE"
    free = lock + " SKIP LOCKED"
    # The session is gone when it is over, and psycopg says so.
    with contextlib.suppress(psycopg.OperationalError):
        async with owner.pipeline():
            await owner.execute("BEGIN")
            await owner.execute(lock, [run])
            assert wait_until(lambda: not admin.execute(free, [run]).fetchall(), SOON_SECONDS)
            within = limits.TRANSACTION_MS / 1000 + SOON_SECONDS
            assert wait_until(lambda: bool(admin.execute(free, [run]).fetchall()), within)
