"""SQL of what webhooks are to be told: written with the fact, taken by any process. Engine role, raw psycopg."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import class_row

from services.conversation import limits
from services.conversation.domain import webhooks
from services.conversation.domain.fold import RunState
from services.conversation.store.log import Statement

# Twice the same: a row of a run is there once for each webhook.
TELL = """
INSERT INTO conversation.webhook_deliveries (id, webhook_id, project_id, run_id, type, payload)
SELECT gen_random_uuid(), w.id, w.project_id, r.id, %(type)s, %(payload)s
FROM conversation.ai_runs r JOIN conversation.webhooks w ON w.project_id = r.project_id
WHERE r.id = %(run)s AND w.enabled AND %(type)s = ANY(w.events)
ON CONFLICT DO NOTHING
"""
# Taking a row is a lease, not a lock: nothing is open while the receiver is waited for. Webhooks in any order, a
# few rows of each: one with many rows stands in front of nobody. A run's later event waits for its earlier one.
TAKE = b"""
WITH found AS (
    SELECT due.id FROM (SELECT id FROM conversation.webhooks
        WHERE enabled AND id <> ALL(%(busy)s) ORDER BY random()) w
    CROSS JOIN LATERAL (
        SELECT d.id FROM conversation.webhook_deliveries d
        WHERE d.webhook_id = w.id AND d.state = 'pending' AND d.due_at <= clock_timestamp()
            AND NOT EXISTS (SELECT FROM conversation.webhook_deliveries e WHERE e.webhook_id = d.webhook_id
                AND e.run_id = d.run_id AND e.state = 'pending' AND (e.created_at, e.id) < (d.created_at, d.id))
        ORDER BY d.due_at LIMIT %(each)s FOR UPDATE OF d SKIP LOCKED) due
    LIMIT %(limit)s
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
    """What of a run's last transaction its project's webhooks are to hear; no row without a webhook."""
    type = webhooks.type_of(status)
    data = webhooks.run_data(
        run=str(run), thread=str(thread), message=str(message), user=user, model=model, status=status, state=state
    )
    payload = webhooks.envelope(type, data, datetime.now(UTC))
    yield Statement(TELL, {"run": run, "type": type, "payload": payload})


async def take(connection: AsyncConnection, *, busy: list[UUID], limit: int) -> list[Taken]:
    """Leases rows that are due, of webhooks that are not busy here."""
    async with connection.cursor(row_factory=class_row(Taken)) as cursor:
        await cursor.execute(
            TAKE,
            {
                "busy": busy,
                "limit": limit,
                "each": limits.WEBHOOK_PARALLEL,
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
