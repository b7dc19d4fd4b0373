"""SQL of a project's webhooks, for its service role: every row is its project's by the rules of row security."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection

from kit.errors import not_found

COLUMNS = "id, url, events, enabled, disabled_reason, created_at, updated_at"
DELIVERY = "id, webhook_id, type, run_id, state, attempts, last_status, last_error, due_at, created_at"

# Creations of one project one after the other, so that they are counted.
LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('webhooks:' || :project, 0))")
COUNT = text("SELECT count(*) FROM conversation.webhooks WHERE id <> :id")
# The same creation again, whose first answer was lost: its new secret is the one that will be shown.
PUT = text(
    "INSERT INTO conversation.webhooks AS w (id, project_id, url, events, sealed, key_id)"
    " VALUES (:id, :project, :url, :events, :sealed, :key_id) ON CONFLICT (id) DO UPDATE SET url = EXCLUDED.url,"
    " events = EXCLUDED.events, sealed = EXCLUDED.sealed, key_id = EXCLUDED.key_id, updated_at = clock_timestamp()"
    f" RETURNING {COLUMNS}"
)
LIST = text(f"SELECT {COLUMNS} FROM conversation.webhooks ORDER BY created_at, id")
GET = text(f"SELECT {COLUMNS} FROM conversation.webhooks WHERE id = :id")
UPDATE = text(
    "UPDATE conversation.webhooks SET url = coalesce(:url, url), events = coalesce(:events, events),"
    " enabled = coalesce(:enabled, enabled), disabled_reason = CASE WHEN :enabled THEN '' ELSE disabled_reason END,"
    f" updated_at = clock_timestamp() WHERE id = :id RETURNING {COLUMNS}"
)
ROTATE = text(
    "UPDATE conversation.webhooks SET sealed = :sealed, key_id = :key_id, updated_at = clock_timestamp()"
    " WHERE id = :id RETURNING id"
)
DELETE_DELIVERIES = text("DELETE FROM conversation.webhook_deliveries WHERE webhook_id = :id")
DELETE = text("DELETE FROM conversation.webhooks WHERE id = :id")
TELL = text(
    "INSERT INTO conversation.webhook_deliveries (id, webhook_id, project_id, type, payload)"
    f" SELECT :delivery, id, project_id, :type, :payload FROM conversation.webhooks WHERE id = :id RETURNING {DELIVERY}"
)
DELIVERIES = text(
    f"SELECT {DELIVERY} FROM conversation.webhook_deliveries WHERE webhook_id = :id"
    " AND (CAST(:at AS timestamptz) IS NULL OR (created_at, id) < (:at, CAST(:before AS uuid)))"
    " ORDER BY created_at DESC, id DESC LIMIT :limit"
)
# One that is under way now, stays with who has it.
REDELIVER = text(
    "UPDATE conversation.webhook_deliveries SET due_at = CASE WHEN state = 'pending' THEN least(due_at,"
    " clock_timestamp() + make_interval(secs => :lease)) ELSE clock_timestamp() END,"
    " attempts = CASE WHEN state = 'pending' THEN attempts ELSE 0 END, state = 'pending'"
    f" WHERE id = :id RETURNING {DELIVERY}"
)


@dataclass(frozen=True)
class WebhookRow:
    """A webhook without its secret."""

    id: UUID
    url: str
    events: list[str]
    enabled: bool
    disabled_reason: str
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True)
class Sealed:
    """A secret at rest, under the ring's key `key_id`."""

    bytes: bytes = field(repr=False)
    key_id: str


@dataclass(frozen=True)
class DeliveryRow:
    """A delivery."""

    id: UUID
    webhook_id: UUID
    type: str
    run_id: UUID | None
    state: str
    attempts: int
    last_status: int
    last_error: str
    due_at: datetime
    created_at: datetime


async def put(
    tx: AsyncConnection, *, id: UUID, project: UUID, url: str, events: list[str], secret: Sealed, most: int
) -> WebhookRow | None:
    """Makes a webhook; None when the project has `most` others."""
    await tx.execute(LOCK, {"project": str(project)})
    if (await tx.execute(COUNT, {"id": id})).scalar_one() >= most:
        return None
    values = {"id": id, "project": project, "url": url, "events": events}
    try:
        found = await tx.execute(PUT, {**values, "sealed": secret.bytes, "key_id": secret.key_id})
    except ProgrammingError as error:
        if not isinstance(error.orig, psycopg.errors.InsufficientPrivilege):
            raise
        raise not_found("webhook") from None  # the id is another project's
    return WebhookRow(*found.one())


async def list_all(tx: AsyncConnection) -> list[WebhookRow]:
    """The project's."""
    return [WebhookRow(*row) for row in await tx.execute(LIST)]


async def exists(tx: AsyncConnection, id: UUID) -> bool:
    """Whether the project has it."""
    return (await tx.execute(GET, {"id": id})).first() is not None


async def update(
    tx: AsyncConnection, id: UUID, *, url: str | None, events: list[str] | None, enabled: bool | None
) -> WebhookRow | None:
    """Changes what is not None; None when there is no such webhook."""
    values: dict[str, Any] = {"id": id, "url": url, "events": events, "enabled": enabled}
    row = (await tx.execute(UPDATE, values)).first()
    return None if row is None else WebhookRow(*row)


async def rotate(tx: AsyncConnection, id: UUID, secret: Sealed) -> bool:
    """Puts another secret in place; whether there is such a webhook."""
    values = {"id": id, "sealed": secret.bytes, "key_id": secret.key_id}
    return (await tx.execute(ROTATE, values)).first() is not None


async def delete(tx: AsyncConnection, id: UUID) -> None:
    """Removes it and its deliveries, if it is there."""
    await tx.execute(DELETE_DELIVERIES, {"id": id})
    await tx.execute(DELETE, {"id": id})


async def tell(tx: AsyncConnection, id: UUID, *, delivery: UUID, type: str, payload: str) -> DeliveryRow | None:
    """A delivery of no run; None when there is no such webhook."""
    row = (await tx.execute(TELL, {"id": id, "delivery": delivery, "type": type, "payload": payload})).first()
    return None if row is None else DeliveryRow(*row)


async def list_deliveries(
    tx: AsyncConnection, id: UUID, *, before: tuple[datetime, UUID] | None, limit: int
) -> list[DeliveryRow]:
    """A page, newest first."""
    at, last = before or (None, None)
    rows = await tx.execute(DELIVERIES, {"id": id, "at": at, "before": last, "limit": limit})
    return [DeliveryRow(*row) for row in rows]


async def redeliver(tx: AsyncConnection, id: UUID, lease: float) -> DeliveryRow | None:
    """Makes a delivery due again, one that waits within `lease` seconds; None when there is no such one."""
    row = (await tx.execute(REDELIVER, {"id": id, "lease": lease})).first()
    return None if row is None else DeliveryRow(*row)
