"""SQL of the event log: appending under the owner's epoch, reading, trimming. Engine role, raw psycopg.

This is the hot path, so it is plain statements with arrays; what must fall together
with them is a list of `Statement`s run as one pipeline.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg import AsyncConnection

from services.conversation.domain.events import TERMINAL_NUMBERS

# The session of an owner (durability.md 5, 8): a process frozen inside a transaction must not hide its run.
STALE_EPOCH = "TL001"


class Statement(NamedTuple):
    """One statement of a state change. Every one of them may run twice: a COMMIT's answer can be lost."""

    sql: str
    parameters: dict[str, Any]


class EventRow(NamedTuple):
    """An event to append."""

    run_id: UUID
    epoch: int
    seq: int
    kind: int
    payload: bytes


@dataclass(frozen=True)
class Appended:
    """What an append found: the run's epoch now, the rows it stored, whether a cancel was asked for."""

    epoch: int
    stored: int
    is_cancelled: bool


# Durability.md 2: rows of runs that are locked or gone are skipped and not returned; rows under
# another epoch are not stored; rows stored before conflict and count 0. Arrays go in binary (%b):
# a third less of this process's time than as text.
APPEND = """
WITH mine AS (
    SELECT id, epoch, project_id, cancel_requested_at FROM conversation.ai_runs
    WHERE id = ANY(%(runs)b) ORDER BY id FOR SHARE SKIP LOCKED
), stored AS (
    INSERT INTO conversation.run_events (run_id, seq, project_id, kind, payload)
    SELECT e.run_id, e.seq, mine.project_id, e.kind, e.payload
    FROM unnest(%(run_ids)b::uuid[], %(epochs)b::bigint[], %(seqs)b::bigint[], %(kinds)b::smallint[],
        %(payloads)b::bytea[]) AS e (run_id, epoch, seq, kind, payload)
    JOIN mine ON mine.id = e.run_id AND mine.epoch = e.epoch
    ON CONFLICT DO NOTHING
    RETURNING run_id
), counted AS (
    SELECT run_id, count(*) AS rows FROM stored GROUP BY run_id
)
SELECT mine.id, mine.epoch, coalesce(counted.rows, 0), mine.cancel_requested_at IS NOT NULL
FROM mine LEFT JOIN counted ON counted.run_id = mine.id
"""
# The same fence for the text at rest of many messages.
SNAPSHOT = """
WITH mine AS (
    SELECT id, epoch FROM conversation.ai_runs WHERE id = ANY(%(runs)s) ORDER BY id FOR SHARE SKIP LOCKED
)
UPDATE conversation.ai_messages m SET text = s.text, text_seq = s.seq
FROM unnest(%(runs)s::uuid[], %(epochs)s::bigint[], %(messages)s::uuid[], %(texts)s::text[], %(seqs)s::bigint[])
    AS s (run_id, epoch, message_id, text, seq)
JOIN mine ON mine.id = s.run_id AND mine.epoch = s.epoch
WHERE m.id = s.message_id AND m.status = 'streaming' AND m.text_seq < s.seq
"""
FENCE = "SELECT conversation.assert_owner(%(run)s, %(epoch)s)"
INSERT_EVENTS = """
INSERT INTO conversation.run_events (run_id, seq, project_id, kind, payload)
SELECT r.id, e.seq, r.project_id, e.kind, e.payload
FROM conversation.ai_runs r, unnest(%(seqs)s::bigint[], %(kinds)s::smallint[], %(payloads)s::bytea[])
    AS e (seq, kind, payload)
WHERE r.id = %(run)s ON CONFLICT DO NOTHING
"""
READ = """
SELECT seq, payload FROM conversation.run_events WHERE run_id = %(run)s AND seq > %(after)s ORDER BY seq LIMIT %(limit)s
"""
NEWEST = """
SELECT r.id, coalesce((SELECT max(e.seq) FROM conversation.run_events e WHERE e.run_id = r.id), 0)
FROM conversation.ai_runs r WHERE r.id = ANY(%(runs)s)
"""
# Finished runs whose log is older than wanted, or beyond the size wanted, newest kept; their last
# event stays, so that a cursor at the end still finds it (durability.md 18).
TRIM = f"""
WITH old AS (
    SELECT id FROM (
        SELECT id, finished_at, sum(log_bytes) OVER (ORDER BY finished_at DESC, id) AS size
        FROM conversation.ai_runs WHERE finished_at IS NOT NULL AND NOT log_trimmed
    ) sized
    WHERE finished_at < clock_timestamp() - make_interval(secs => %(seconds)s) OR size > %(bytes)s
    ORDER BY finished_at LIMIT %(limit)s
), claimed AS (
    SELECT r.id FROM conversation.ai_runs r JOIN old USING (id) WHERE NOT r.log_trimmed
    ORDER BY r.id FOR UPDATE OF r SKIP LOCKED
), gone AS (
    DELETE FROM conversation.run_events e USING claimed
    WHERE e.run_id = claimed.id AND e.kind NOT IN ({", ".join(map(str, TERMINAL_NUMBERS))})
)
UPDATE conversation.ai_runs r SET log_trimmed = true FROM claimed WHERE r.id = claimed.id
"""


async def append(connection: AsyncConnection, rows: Sequence[EventRow]) -> dict[UUID, Appended]:
    """Stores rows of many runs in one autocommit statement; runs that were busy are missing in the answer."""
    cursor = await connection.execute(
        APPEND,
        {
            "runs": sorted({row.run_id for row in rows}),
            "run_ids": [row.run_id for row in rows],
            "epochs": [row.epoch for row in rows],
            "seqs": [row.seq for row in rows],
            "kinds": [row.kind for row in rows],
            "payloads": [row.payload for row in rows],
        },
        prepare=True,
        binary=True,
    )
    return {run: Appended(epoch, stored, cancelled) async for run, epoch, stored, cancelled in cursor}


async def snapshot(connection: AsyncConnection, rows: Sequence[tuple[UUID, int, UUID, str, int]]) -> None:
    """Refreshes the text at rest. A row: run, epoch, message, text, seq of the newest event in it."""
    runs, epochs, messages, texts, seqs = (list(column) for column in zip(*rows, strict=True))
    await connection.execute(
        SNAPSHOT, {"runs": runs, "epochs": epochs, "messages": messages, "texts": texts, "seqs": seqs}
    )


async def change_state(
    connection: AsyncConnection, run: UUID, epoch: int, events: Sequence[EventRow], statements: Sequence[Statement]
) -> list[tuple[Any, ...]]:
    """Stores events and runs statements in one transaction, if the epoch still holds; the rows these returned.

    All goes out as one pipeline. Raises psycopg's error with SQLSTATE TL001 when the run
    has another owner.
    """
    try:
        async with connection.pipeline():
            # Not connection.transaction(): in a pipeline it waits for the answers before it sends the COMMIT.
            await connection.execute("BEGIN")
            await connection.execute(FENCE, {"run": run, "epoch": epoch})
            if events:
                await connection.execute(
                    INSERT_EVENTS,
                    {
                        "run": run,
                        "seqs": [row.seq for row in events],
                        "kinds": [row.kind for row in events],
                        "payloads": [row.payload for row in events],
                    },
                )
            made = [await connection.execute(statement.sql, statement.parameters) for statement in statements]
            await connection.execute("COMMIT")
        return [row for cursor in made if cursor.description is not None for row in await cursor.fetchall()]
    except BaseException:
        with suppress(psycopg.Error):
            await connection.rollback()
        raise


async def read_events(connection: AsyncConnection, run: UUID, after: int, limit: int) -> list[tuple[int, bytes]]:
    """(seq, RunEvent bytes) of at most `limit` events with a greater seq, in order."""
    cursor = await connection.execute(READ, {"run": run, "after": after, "limit": limit}, prepare=True)
    return await cursor.fetchall()


async def newest_seqs(connection: AsyncConnection, runs: Sequence[UUID]) -> dict[UUID, int]:
    """The newest committed seq of each run that still exists."""
    cursor = await connection.execute(NEWEST, {"runs": list(runs)}, prepare=True)
    return dict(await cursor.fetchall())


async def trim_logs(connection: AsyncConnection, *, seconds: float, max_bytes: int, limit: int) -> int:
    """Removes the log rows of at most `limit` finished runs; returns how many runs it was."""
    cursor = await connection.execute(TRIM, {"seconds": seconds, "bytes": max_bytes, "limit": limit})
    return cursor.rowcount
