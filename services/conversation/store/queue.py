"""SQL of the queue: runs that wait for the active run of their thread (durability.md 22).

Whoever changes a thread's queue, or ends its active run, locks the thread's row first
and reads afterwards, in a statement of its own: under READ COMMITTED only a statement
that begins after the lock sees what the one before it has committed.
"""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection as Transaction

from services.conversation.domain.events import KIND_NUMBERS
from services.conversation.store.log import Statement
from services.conversation.store.starts import NewRun

LOCK = text("SELECT id FROM conversation.ai_threads WHERE id = :thread FOR UPDATE")
ACTIVE = text("SELECT id FROM conversation.ai_runs WHERE thread_id = :thread AND status = 'running'")
COUNT = text("SELECT count(*) FROM conversation.queued_runs WHERE thread_id = :thread")
# At the head for an interrupt, else behind all others.
ENQUEUE = text(
    """
WITH thread AS (
    SELECT id, project_id, user_id,
        coalesce(nullif(:model, ''), nullif(default_model_slug, ''), :default_model) AS model
    FROM conversation.ai_threads WHERE id = :thread
), run AS (
    INSERT INTO conversation.ai_runs
        (id, project_id, user_id, thread_id, user_message_id, reply_message_id, status, model, options)
    SELECT :run, project_id, user_id, id, :user_message, :reply, 'queued', model, :options FROM thread
)
INSERT INTO conversation.queued_runs (run_id, project_id, user_id, thread_id, ordinal, parts, text, title, is_kept)
SELECT :run, project_id, user_id, id, (
    SELECT CASE WHEN :is_head THEN coalesce(min(ordinal), 1) - 1 ELSE coalesce(max(ordinal), 0) + 1 END
    FROM conversation.queued_runs q WHERE q.thread_id = :thread
), :parts, :text, :title, :is_kept FROM thread
"""
)
# What a statement says of a run that it made the active one.
PROMOTED = "promoted"
# The head of the queue becomes the active run, unless there is one: a finish whose answer was lost comes twice.
# What a start writes is written here, but the first event and call: they are its owner's.
PROMOTE = f"""
WITH head AS (
    DELETE FROM conversation.queued_runs WHERE run_id = (
        SELECT run_id FROM conversation.queued_runs WHERE thread_id = %(thread)s ORDER BY ordinal LIMIT 1
    ) AND NOT EXISTS (SELECT FROM conversation.ai_runs WHERE thread_id = %(thread)s AND status = 'running')
    RETURNING *
), thread AS (
    UPDATE conversation.ai_threads t SET
        next_position = next_position + 2,
        last_message_at = greatest(clock_timestamp(), last_message_at + interval '2 microseconds'),
        title = CASE WHEN t.title = '' THEN head.title ELSE t.title END
    FROM head WHERE t.id = head.thread_id
    RETURNING t.next_position - 2 AS position, t.last_message_at AS at
), run AS (
    UPDATE conversation.ai_runs r SET status = 'running', begun_at = clock_timestamp() FROM head
    WHERE r.id = head.run_id RETURNING r.id, r.user_message_id, r.reply_message_id, r.model
), question AS (
    INSERT INTO conversation.ai_messages
        (id, project_id, user_id, thread_id, run_id, position, role, status, parts, text, created_at)
    SELECT run.user_message_id, project_id, user_id, thread_id, run.id, position, 'user', 'complete', parts, text,
        at - interval '1 microsecond'
    FROM head, run, thread WHERE NOT is_kept
), kept AS (
    UPDATE conversation.ai_messages m SET run_id = run.id FROM run, head WHERE m.id = run.user_message_id AND is_kept
), reply AS (
    INSERT INTO conversation.ai_messages
        (id, project_id, user_id, thread_id, run_id, position, role, status, model, created_at)
    SELECT run.reply_message_id, project_id, user_id, thread_id, run.id, position + 1, 'assistant', 'streaming',
        run.model, at
    FROM head, run, thread
)
SELECT '{PROMOTED}', id FROM run
"""
LOCK_OF = """
SELECT FROM conversation.ai_threads t JOIN conversation.queued_runs q ON q.thread_id = t.id
WHERE q.run_id = ANY(%(runs)s) FOR UPDATE OF t
"""
# Ends queued runs before their turn: nobody owns them, so their whole log is written here.
WITHDRAW = f"""
WITH gone AS (
    DELETE FROM conversation.queued_runs WHERE run_id = %(run)s RETURNING run_id, project_id
), ended AS (
    UPDATE conversation.ai_runs r SET status = 'cancelled', finished_at = clock_timestamp(), last_seq = 2,
        log_bytes = %(bytes)s
    FROM gone WHERE r.id = gone.run_id
), unwatched AS (
    DELETE FROM conversation.run_watch w USING gone WHERE w.run_id = gone.run_id
)
INSERT INTO conversation.run_events (run_id, seq, project_id, kind, payload)
SELECT gone.run_id, e.seq, gone.project_id, e.kind, e.payload
FROM gone, (VALUES
    (1, {KIND_NUMBERS["run_started"]}, %(started)s::bytea),
    (2, {KIND_NUMBERS["run_finished"]}, %(finished)s::bytea)
) AS e (seq, kind, payload)
"""
QUEUED = "SELECT run_id FROM conversation.queued_runs WHERE thread_id = %(thread)s ORDER BY ordinal"


async def active_run(tx: Transaction, thread: UUID) -> tuple[bool, UUID | None]:
    """Locks the thread, whose active run stays what it is until the commit: (whether the caller sees it, that run)."""
    found = await tx.execute(LOCK, {"thread": thread})
    if found.one_or_none() is None:
        return False, None
    return True, (await tx.execute(ACTIVE, {"thread": thread})).scalar_one_or_none()


async def length(tx: Transaction, thread: UUID) -> int:
    """How many runs wait."""
    return int((await tx.execute(COUNT, {"thread": thread})).scalar_one())


async def enqueue(tx: Transaction, new: NewRun, *, is_head: bool) -> None:
    """Stores a run that waits. The thread is locked."""
    await tx.execute(
        ENQUEUE,
        {
            "thread": new.thread_id,
            "model": new.model,
            "default_model": new.default_model,
            "run": new.run_id,
            "user_message": new.user_message_id,
            "reply": new.reply_message_id,
            "options": new.options,
            "is_head": is_head,
            "parts": new.parts,
            "text": new.text,
            "title": new.title,
            "is_kept": new.is_kept,
        },
    )


def promote(thread: UUID) -> Statement:
    """Makes the head of the queue the active run, and returns (PROMOTED, id). Belongs behind a lock of the thread."""
    return Statement(PROMOTE, {"thread": thread})


async def queued_runs(connection: AsyncConnection, thread: UUID) -> list[UUID]:
    """The runs that wait, next one first."""
    return [run async for (run,) in await connection.execute(QUEUED, {"thread": thread})]


class Withdrawal(NamedTuple):
    """A run that is to leave the queue: its first and its last event, and what else is to be written if it does."""

    run: UUID
    started: bytes
    finished: bytes
    statements: Sequence[Statement]


async def withdraw(connection: AsyncConnection, withdrawals: Sequence[Withdrawal]) -> None:
    """Ends runs of one thread that still wait as cancelled; those that do not any more are left alone."""
    async with connection.transaction():
        await connection.execute(LOCK_OF, {"runs": [withdrawal.run for withdrawal in withdrawals]})
        for run, started, finished, statements in withdrawals:
            size = len(started) + len(finished)
            parameters = {"run": run, "started": started, "finished": finished, "bytes": size}
            if (await connection.execute(WITHDRAW, parameters)).rowcount:
                for statement in statements:
                    await connection.execute(statement.sql.encode(), statement.parameters)
