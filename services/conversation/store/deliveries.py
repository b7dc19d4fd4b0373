"""SQL of what webhooks are to be told: written with the fact, taken by any process. Engine role, raw psycopg."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import class_row

from services.conversation import limits
from services.conversation.domain import webhooks
from services.conversation.domain.fold import RunState
from services.conversation.store.log import Statement

# What a statement says of a row that it wrote to be sent.
TOLD = "told"
# Twice the same: a row of a run is there once for each webhook.
TELL = f"""
INSERT INTO conversation.webhook_deliveries (id, webhook_id, project_id, run_id, type, payload)
SELECT gen_random_uuid(), w.id, w.project_id, r.id, %(type)s, %(payload)s
FROM conversation.ai_runs r JOIN conversation.webhooks w ON w.project_id = r.project_id
WHERE r.id = %(run)s AND w.enabled AND %(type)s = ANY(w.events)
ON CONFLICT DO NOTHING RETURNING '{TOLD}', id
"""
# Taking a row is a lease, not a lock: nothing is open while the receiver is waited for. Webhooks in any order, a
# few rows of each and of each project: who has many rows stands in front of nobody. A run's later event waits for its
# earlier one.
TAKE = b"""
WITH held AS (
    SELECT * FROM unnest(%(webhooks)s::uuid[], %(rooms)s::int[]) AS h (webhook_id, room)
), spent AS (
    SELECT * FROM unnest(%(projects)s::uuid[], %(project_rooms)s::int[]) AS s (project_id, room)
), wanted AS (
    SELECT due.id, w.project_room, row_number() OVER (PARTITION BY w.project_id ORDER BY w.rank) AS place, w.rank
    FROM (
        SELECT w.id, w.project_id, coalesce(h.room, %(each)s) AS room, coalesce(s.room, %(project)s) AS project_room,
            random() AS rank
        FROM conversation.webhooks w LEFT JOIN held h ON h.webhook_id = w.id
            LEFT JOIN spent s ON s.project_id = w.project_id
        WHERE w.enabled AND coalesce(h.room, 1) > 0 AND coalesce(s.room, 1) > 0
    ) w
    CROSS JOIN LATERAL (
        SELECT d.id FROM conversation.webhook_deliveries d
        WHERE d.webhook_id = w.id AND d.state = 'pending' AND d.due_at <= clock_timestamp()
            AND NOT EXISTS (SELECT FROM conversation.webhook_deliveries e WHERE e.webhook_id = d.webhook_id
                AND e.run_id = d.run_id AND e.state = 'pending' AND (e.created_at, e.id) < (d.created_at, d.id))
        ORDER BY d.due_at LIMIT w.room FOR UPDATE OF d SKIP LOCKED) due
), found AS (
    SELECT id FROM wanted WHERE place <= project_room ORDER BY rank LIMIT %(limit)s
)
UPDATE conversation.webhook_deliveries d SET due_at = clock_timestamp() + make_interval(secs => %(seconds)s)
FROM found, conversation.webhooks w WHERE d.id = found.id AND w.id = d.webhook_id
RETURNING d.id, d.webhook_id, d.project_id, d.type, d.payload, d.attempts, d.due_at AS leased_until, w.url, w.sealed
"""
DELIVERED = b"""
UPDATE conversation.webhook_deliveries SET state = 'delivered', attempts = attempts + 1, last_status = %(status)s,
    last_error = '' WHERE id = %(id)s AND state = 'pending'
"""
# Not when somebody else has it by now, or it was asked for anew.
FAILED = b"""
UPDATE conversation.webhook_deliveries SET attempts = attempts + 1, last_status = %(status)s, last_error = %(error)s,
    state = CASE WHEN %(pause)s::float8 IS NULL THEN 'failed' ELSE 'pending' END,
    due_at = clock_timestamp() + make_interval(secs => coalesce(%(pause)s::float8, 0))
WHERE id = %(id)s AND state = 'pending' AND due_at = %(leased_until)s
"""
# Who breaks a try off gives the row back.
GIVE_BACK = b"""
UPDATE conversation.webhook_deliveries SET due_at = clock_timestamp()
WHERE id = %(id)s AND state = 'pending' AND due_at = %(leased_until)s
"""
# By the index on created_at.
REMOVE_OLD = b"""
DELETE FROM conversation.webhook_deliveries WHERE id IN (
    SELECT id FROM conversation.webhook_deliveries WHERE created_at < clock_timestamp() - make_interval(secs =>
        CASE WHEN state = 'delivered' THEN %(delivered)s::float8 ELSE %(kept)s::float8 END)
        AND created_at < clock_timestamp() - make_interval(secs => least(%(delivered)s::float8, %(kept)s::float8))
    ORDER BY created_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
"""
# Written by a run that ended while the webhook was being removed. By the index of those that wait.
REMOVE_ORPHANS = b"""
DELETE FROM conversation.webhook_deliveries WHERE id IN (
    SELECT id FROM conversation.webhook_deliveries d WHERE state = 'pending'
        AND NOT EXISTS (SELECT FROM conversation.webhooks w WHERE w.id = d.webhook_id)
    LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
"""
GONE = b"UPDATE conversation.webhooks SET enabled = false, disabled_reason = 'gone' WHERE id = %s AND url = %s"
PENDING = b"SELECT count(*) FROM conversation.webhook_deliveries WHERE state = 'pending'"
UNDER = b"SELECT id, project_id, sealed FROM conversation.webhooks WHERE key_id = ANY(%s) ORDER BY random() LIMIT %s"
REPLACE = b"UPDATE conversation.webhooks SET sealed = %s, key_id = %s WHERE id = %s AND sealed = %s"


class Taken(NamedTuple):
    """A delivery to try. `attempts`: before this one."""

    id: UUID
    webhook_id: UUID
    project_id: UUID
    type: str
    payload: str
    attempts: int
    leased_until: datetime
    url: str
    sealed: bytes


def tell_run_ended(
    *, run: UUID, thread: UUID, message: UUID, user: str, model: str, status: str, state: RunState
) -> Iterable[Statement]:
    """What of a run's last transaction its project's webhooks are to hear; returns (TOLD, id) for each of them."""
    type = webhooks.type_of(status)
    data = webhooks.run_data(
        run=str(run), thread=str(thread), message=str(message), user=user, model=model, status=status, state=state
    )
    payload = webhooks.envelope(type, data, datetime.now(UTC))
    yield Statement(TELL, {"run": run, "type": type, "payload": payload})


async def take(
    connection: AsyncConnection, *, rooms: Mapping[UUID, int], project_rooms: Mapping[UUID, int], limit: int
) -> list[Taken]:
    """Leases rows that are due. `rooms`: for how many more there is room here, of webhooks and projects with less."""
    async with connection.cursor(row_factory=class_row(Taken)) as cursor:
        await cursor.execute(
            TAKE,
            {
                "webhooks": list(rooms),
                "rooms": list(rooms.values()),
                "projects": list(project_rooms),
                "project_rooms": list(project_rooms.values()),
                "limit": limit,
                "each": limits.WEBHOOK_PARALLEL,
                "project": limits.WEBHOOK_PROJECT_TRIES,
                "seconds": limits.WEBHOOK_LEASE_SECONDS,
            },
        )
        return await cursor.fetchall()


async def delivered(connection: AsyncConnection, row: Taken, status: int) -> None:
    """It arrived."""
    await connection.execute(DELIVERED, {"id": row.id, "status": status})


async def failed(connection: AsyncConnection, row: Taken, status: int, error: str, pause: float | None) -> None:
    """It did not; the next try is in so many seconds, or never."""
    values = {"id": row.id, "status": status, "error": error, "pause": pause, "leased_until": row.leased_until}
    await connection.execute(FAILED, values)


async def give_back(connection: AsyncConnection, row: Taken) -> None:
    """It was not tried to the end: it is due at once, for whoever takes it."""
    await connection.execute(GIVE_BACK, {"id": row.id, "leased_until": row.leased_until})


async def remove_old(connection: AsyncConnection) -> int:
    """Removes some of what is kept long enough, and of what no webhook is there for; how many."""
    kept = {"delivered": limits.WEBHOOK_DELIVERED_KEPT_SECONDS, "kept": limits.WEBHOOK_KEPT_SECONDS}
    old = await connection.execute(REMOVE_OLD, {**kept, "limit": limits.SWEEP_DELIVERIES})
    orphans = await connection.execute(REMOVE_ORPHANS, {"limit": limits.SWEEP_DELIVERIES})
    return old.rowcount + orphans.rowcount


async def disable(connection: AsyncConnection, row: Taken) -> None:
    """The receiver said that it is gone, unless the webhook has another address by now."""
    await connection.execute(GONE, [row.webhook_id, row.url])


async def count_pending(connection: AsyncConnection) -> int:
    """How many are to be sent, of all processes."""
    found = await (await connection.execute(PENDING)).fetchone()
    return int(found[0]) if found else 0


async def sealed_under(connection: AsyncConnection, key_ids: list[str], limit: int) -> list[tuple[UUID, UUID, bytes]]:
    """(webhook, project, sealed secret) of some that are sealed under these keys of the ring."""
    if not key_ids:
        return []
    rows = await (await connection.execute(UNDER, [key_ids, limit])).fetchall()
    return [(id, project, bytes(sealed)) for id, project, sealed in rows]


async def replace_sealed(connection: AsyncConnection, webhook: UUID, old: bytes, sealed: bytes, key_id: str) -> int:
    """Puts a new seal in place of the one that was read; 0 when that is no longer there."""
    return (await connection.execute(REPLACE, [sealed, key_id, webhook, old])).rowcount
