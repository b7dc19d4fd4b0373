"""SQL of the outbox: what other services must be told, written with the fact it tells. Engine role, raw psycopg."""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from psycopg import AsyncConnection

# Taking a row is a lease, not a lock: nothing is open while the other service is asked, and a
# row whose taker was killed is due again.
LEASE = """
UPDATE conversation.outbox o SET due_at = clock_timestamp() + make_interval(secs => %(seconds)s)
FROM ({rows} LIMIT %(limit)s FOR UPDATE SKIP LOCKED) found WHERE o.id = found.id AND o.topic = found.topic
RETURNING o.id, o.topic, o.project_id, o.payload, o.attempts
"""
TAKE = LEASE.format(
    rows="SELECT id, topic FROM conversation.outbox WHERE due_at <= clock_timestamp() ORDER BY due_at"
).encode()
# Those that were never refused first: the others would fail again, and must not stand in their way.
TAKE_OF_PROJECT = LEASE.format(
    rows="SELECT id, topic FROM conversation.outbox WHERE project_id = %(project)s ORDER BY attempts, created_at"
).encode()
REMOVE = """
DELETE FROM conversation.outbox o USING unnest(%(ids)s::uuid[], %(topics)s::text[]) AS s (id, topic)
WHERE o.id = s.id AND o.topic = s.topic
"""
POSTPONE = """
UPDATE conversation.outbox o SET due_at = clock_timestamp() + make_interval(secs => %(seconds)s)
FROM unnest(%(ids)s::uuid[], %(topics)s::text[]) AS s (id, topic)
WHERE o.id = s.id AND o.topic = s.topic
"""
REFUSE = """
UPDATE conversation.outbox o SET due_at = clock_timestamp() + make_interval(secs => s.seconds),
    attempts = o.attempts + 1
FROM unnest(%(ids)s::uuid[], %(topics)s::text[], %(seconds)s::float8[]) AS s (id, topic, seconds)
WHERE o.id = s.id AND o.topic = s.topic
"""
LOOK = """
SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8
FROM conversation.outbox
"""


class Taken(NamedTuple):
    """A row to be sent. `attempts`: how often it was refused before."""

    id: UUID
    topic: str
    project: UUID
    payload: bytes
    attempts: int


class Backlog(NamedTuple):
    """What was not received yet: so many rows, the oldest so old; 0 when there is none."""

    rows: int
    seconds: float


async def take(connection: AsyncConnection, *, seconds: float, limit: int) -> list[Taken]:
    """At most `limit` due rows; nobody else gets them for so many seconds."""
    cursor = await connection.execute(TAKE, {"seconds": seconds, "limit": limit}, prepare=True)
    return [Taken(*row) for row in await cursor.fetchall()]


async def take_of_project(connection: AsyncConnection, project: UUID, *, seconds: float, limit: int) -> list[Taken]:
    """At most `limit` rows of a project, due or not: also some that another is sending."""
    values = {"project": project, "seconds": seconds, "limit": limit}
    cursor = await connection.execute(TAKE_OF_PROJECT, values, prepare=True)
    return [Taken(*row) for row in await cursor.fetchall()]


async def remove(connection: AsyncConnection, rows: Sequence[Taken]) -> None:
    """They were received."""
    await connection.execute(REMOVE, _named(rows), prepare=True)


async def postpone(connection: AsyncConnection, rows: Sequence[Taken], seconds: float) -> None:
    """Nobody was there to receive them: they are due again after so many seconds."""
    await connection.execute(POSTPONE, {**_named(rows), "seconds": seconds}, prepare=True)


async def refuse(connection: AsyncConnection, rows: Sequence[Taken], seconds: Sequence[float]) -> None:
    """They were refused: each is due again after so many seconds."""
    await connection.execute(REFUSE, {**_named(rows), "seconds": list(seconds)}, prepare=True)


async def look(connection: AsyncConnection) -> Backlog:
    """What waits, of all processes."""
    row = await (await connection.execute(LOOK)).fetchone()
    return Backlog(*row) if row else Backlog(0, 0.0)


def _named(rows: Sequence[Taken]) -> dict[str, object]:
    return {"ids": [row.id for row in rows], "topics": [row.topic for row in rows]}
