"""The pool of the request role: what a start leaves on its connection, and what a lost connection costs."""

from collections.abc import AsyncIterator

import psycopg
import psycopg_pool
import pytest
import pytest_asyncio

from kit.callers import Caller
from kit.db import PooledConnection, commit_as
from kit.errors import ServiceError
from kit.ids import new_id
from tests.contract.conversation.harness import Service, Sql, eventually
from tests.support.databases import Database

SETTINGS = [
    (f"SELECT current_setting('app.{name}', true)", dict[str, object]()) for name in ("project", "user", "role")
]


@pytest_asyncio.fixture
async def pool(database: Database) -> AsyncIterator[psycopg_pool.AsyncConnectionPool]:
    """One connection, as the service has it."""
    made: psycopg_pool.AsyncConnectionPool = psycopg_pool.AsyncConnectionPool(
        database.request_url,
        min_size=1,
        max_size=1,
        kwargs={"autocommit": True},
        connection_class=PooledConnection,
        check=PooledConnection.check,
        reset=PooledConnection.note,
        open=False,
    )
    async with made as found:
        yield found


async def left(pool: psycopg_pool.AsyncConnectionPool) -> list[str]:
    async with pool.connection() as connection:
        return [(await (await connection.execute(sql.encode())).fetchall())[0][0] or "" for sql, _ in SETTINGS]


async def test_no_setting_outlives_a_commit(pool: psycopg_pool.AsyncConnectionPool, callers: dict[str, Caller]) -> None:
    alice = callers["alice"]
    rows = await commit_as(pool, alice, SETTINGS)
    assert [value for (value,) in rows] == [str(alice.project), "alice", "user"]
    assert await left(pool) == ["", "", ""]


async def test_no_setting_outlives_a_statement_that_fails(
    pool: psycopg_pool.AsyncConnectionPool, callers: dict[str, Caller]
) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        await commit_as(pool, callers["alice"], [("SELECT 1 / 0", {})])
    assert await left(pool) == ["", "", ""]


async def test_a_connection_that_was_ended_while_idle_is_not_used(
    pool: psycopg_pool.AsyncConnectionPool, callers: dict[str, Caller], sql: Sql
) -> None:
    backend = [("SELECT pg_backend_pid()", dict[str, object]())]
    ((before,),) = await commit_as(pool, callers["alice"], backend)
    await sql.rows("SELECT pg_terminate_backend(%s)", before)

    async def is_gone() -> bool:
        return not await sql.rows("SELECT FROM pg_stat_activity WHERE pid = %s", before)

    await eventually(is_gone)
    ((after,),) = await commit_as(pool, callers["alice"], backend)
    assert after != before


async def test_a_start_without_its_thread_keeps_no_key(service: Service, sql: Sql) -> None:
    with pytest.raises(ServiceError) as refused:
        await service.alice.run(str(new_id()), "hello", key="k").end()
    assert refused.value.reason == "THREAD_NOT_FOUND"
    assert await sql.rows("SELECT key FROM conversation.idempotency_keys") == []
