"""Heirs of one dead process share its runs; none robs another, and what they write twice counts once."""

import asyncio
from uuid import UUID

import psycopg

from kit.callers import Caller
from kit.ids import new_id
from services.conversation.store import owning
from tests.contract.conversation.harness import Sql, project_id
from tests.support.databases import Database
from threadloom.common.v1.money_pb2 import Money
from threadloom.conversation.v1.message_pb2 import Usage

RUNS, HEIRS, ROUNDS = 200, 3, 5
ADD_WORKER = "INSERT INTO conversation.workers VALUES (%s, clock_timestamp() + make_interval(secs => %s))"
ADD_THREADS = (
    "INSERT INTO conversation.ai_threads (id, project_id, user_id)"
    " SELECT gen_random_uuid(), %s, 'alice' FROM generate_series(1, %s)"
)
ADD_RUNS = (
    "INSERT INTO conversation.ai_runs (id, project_id, user_id, thread_id, user_message_id, reply_message_id, status,"
    " model, options, worker_id) SELECT gen_random_uuid(), project_id, 'alice', id, gen_random_uuid(),"
    " gen_random_uuid(), 'running', 'm', '', %s FROM conversation.ai_threads"
)


async def leave_runs(sql: Sql, owner: Caller, heirs: list[UUID]) -> None:
    """Runs of a process that is gone, and the processes that may claim them."""
    dead = new_id()
    await sql.rows("DELETE FROM conversation.ai_threads")
    await sql.rows(ADD_WORKER, dead, -1)
    for heir in heirs:
        await sql.rows(ADD_WORKER, heir, 3600)
    await sql.rows(ADD_THREADS, project_id(owner), RUNS)
    await sql.rows(ADD_RUNS, dead)


async def claim_all(database: Database, heir: UUID) -> int:
    """Claims until nothing is left; how many it got."""
    total = 0
    async with await psycopg.AsyncConnection.connect(database.engine_url, autocommit=True) as connection:
        for _ in range(ROUNDS):
            claimed = await owning.claim_free(connection, worker=heir, known=[], adopt_seconds=3600, limit=50)
            total += len(claimed)
    return total


async def test_heirs_that_claim_at_once_get_each_run_once(
    database: Database, sql: Sql, callers: dict[str, Caller]
) -> None:
    for _ in range(3):
        heirs = [new_id() for _ in range(HEIRS)]
        await leave_runs(sql, callers["alice"], heirs)
        got = await asyncio.gather(*(claim_all(database, heir) for heir in heirs))
        takeovers = await sql.rows("SELECT takeovers, epoch, count(*) FROM conversation.ai_runs GROUP BY 1, 2")
        assert (sum(got), takeovers) == (RUNS, [(1, 2, RUNS)])


async def test_cutting_calls_a_second_time_spares_the_call_made_since(
    database: Database, sql: Sql, callers: dict[str, Caller]
) -> None:
    await leave_runs(sql, callers["alice"], [])
    run = await sql.value("SELECT id FROM conversation.ai_runs LIMIT 1")
    lost, made = new_id(), new_id()
    usage = Usage(output_tokens=3, cost=Money(nano_usd=5), estimated=True)
    cut = owning.end_call(owning.CallEnd(lost, "cut", usage, "estimated", notice=("billing.settle", b"told")))
    statements = [owning.begin_call(run, lost, "m", 1, 1), cut, owning.begin_call(run, made, "m", 2, 2)]
    async with await psycopg.AsyncConnection.connect(database.engine_url, autocommit=True) as connection:
        for statement in [*statements, *statements[1:]]:  # the answer of the first COMMIT was lost
            await connection.execute(statement.sql.encode(), statement.parameters)
    found = await sql.rows("SELECT id, status FROM conversation.api_calls ORDER BY step")
    assert found == [(lost, "cut"), (made, "started")]
    assert await sql.rows("SELECT id, topic, payload FROM conversation.outbox") == [(lost, "billing.settle", b"told")]
    counted = "SELECT tokens_out, cost_nano, usage_estimated FROM conversation.ai_threads WHERE cost_nano > 0"
    assert await sql.rows(counted) == [(3, 5, True)]  # once
