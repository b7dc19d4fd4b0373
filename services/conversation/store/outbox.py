"""SQL of the outbox: what other services must be told, written with the fact it tells. Engine role, raw psycopg."""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from psycopg import AsyncConnection

# Taking a row is a lease, not a lock: nothing is open while the other service is asked, and a
# row whose taker was killed is due again.
TAKE = """
UPDATE conversation.outbox o SET attempts = o.attempts + 1,
    due_at = clock_timestamp() + make_interval(secs => %(seconds)s)
FROM (
    SELECT id, topic FROM conversation.outbox WHERE due_at <= clock_timestamp()
    ORDER BY due_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
) due WHERE o.id = due.id AND o.topic = due.topic
RETURNING o.id, o.topic, o.payload, o.attempts
"""
REMOVE = """
DELETE FROM conversation.outbox o USING unnest(%(ids)s::uuid[], %(topics)s::text[]) AS s (id, topic)
WHERE o.id = s.id AND o.topic = s.topic
"""
POSTPONE = """
UPDATE conversation.outbox o SET due_at = clock_timestamp() + make_interval(secs => s.seconds)
FROM unnest(%(ids)s::uuid[], %(topics)s::text[], %(seconds)s::float8[]) AS s (id, topic, seconds)
WHERE o.id = s.id AND o.topic = s.topic
"""
WAITING = "SELECT count(*) FROM conversation.outbox"


class Taken(NamedTuple):
    """A row to be sent. `attempts` counts this one."""

    id: UUID
    topic: str
    payload: bytes
    attempts: int


async def take(connection: AsyncConnection, *, seconds: float, limit: int) -> list[Taken]:
    """At most `limit` due rows; nobody else gets them for so many seconds."""
    cursor = await connection.execute(TAKE, {"seconds": seconds, "limit": limit}, prepare=True)
    return [Taken(*row) for row in await cursor.fetchall()]


async def remove(connection: AsyncConnection, rows: Sequence[Taken]) -> None:
    """They were received."""
    await connection.execute(REMOVE, _named(rows), prepare=True)


async def postpone(connection: AsyncConnection, rows: Sequence[Taken], seconds: Sequence[float]) -> None:
    """They were not received: each is due again after so many seconds."""
    await connection.execute(POSTPONE, {**_named(rows), "seconds": list(seconds)}, prepare=True)


async def waiting(connection: AsyncConnection) -> int:
    """Rows not yet received."""
    row = await (await connection.execute(WAITING)).fetchone()
    return int(row[0]) if row else 0


def _named(rows: Sequence[Taken]) -> dict[str, list[object]]:
    return {"ids": [row.id for row in rows], "topics": [row.topic for row in rows]}
