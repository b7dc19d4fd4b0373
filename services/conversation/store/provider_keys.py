"""SQL for the providers' keys of projects: sealed bytes in, sealed bytes out."""

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import psycopg
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True)
class SealedKey:
    """A key at rest."""

    project_id: UUID
    provider: str
    sealed: bytes = field(repr=False)


# --- requests: the transaction's role is the project's `service`, or `system`
PUT = text(
    "INSERT INTO conversation.provider_keys AS k (project_id, provider, sealed, key_id)"
    " VALUES (:project, :provider, :sealed, :key_id)"
    " ON CONFLICT (project_id, provider) DO UPDATE"
    " SET sealed = EXCLUDED.sealed, key_id = EXCLUDED.key_id, updated_at = clock_timestamp()"
    " RETURNING updated_at"
)
LIST = text("SELECT provider, updated_at FROM conversation.provider_keys WHERE project_id = :project ORDER BY provider")
DELETE = text("DELETE FROM conversation.provider_keys WHERE project_id = :project AND provider = :provider")

# --- the engine
READ = b"SELECT sealed FROM conversation.provider_keys WHERE project_id = %s AND provider = %s"
# At random, so that keys that do not open cannot stand in front of those that do.
UNDER = (
    b"SELECT project_id, provider, sealed FROM conversation.provider_keys WHERE key_id = ANY(%s)"
    b" ORDER BY random() LIMIT %s"
)
# Only in place of what was read: a key that was set meanwhile wins.
REPLACE = (
    b"UPDATE conversation.provider_keys SET sealed = %s, key_id = %s"
    b" WHERE project_id = %s AND provider = %s AND sealed = %s"
)


async def put_key(tx: AsyncConnection, key: SealedKey, key_id: str) -> datetime | None:
    """Keeps a key in place of an older one; returns when. None when there is no such project: nothing else works then.

    `key_id` is the ring key it is sealed under.
    """
    values = {"project": key.project_id, "provider": key.provider, "sealed": key.sealed, "key_id": key_id}
    try:
        updated_at: datetime = (await tx.execute(PUT, values)).scalar_one()
    except IntegrityError as error:
        if not isinstance(error.orig, psycopg.errors.ForeignKeyViolation):
            raise
        return None
    return updated_at


async def list_keys(tx: AsyncConnection, project: UUID) -> list[tuple[str, datetime]]:
    """(provider, when it was set) of a project's keys."""
    return [(provider, updated_at) for provider, updated_at in await tx.execute(LIST, {"project": project})]


async def delete_key(tx: AsyncConnection, project: UUID, provider: str) -> None:
    """Removes a key, if there is one."""
    await tx.execute(DELETE, {"project": project, "provider": provider})


async def read_sealed(connection: psycopg.AsyncConnection, project: UUID, provider: str) -> bytes | None:
    """A project's key as it is kept; None when it has none."""
    row = await (await connection.execute(READ, [project, provider])).fetchone()
    return None if row is None else bytes(row[0])


async def sealed_under(connection: psycopg.AsyncConnection, key_ids: list[str], limit: int) -> list[SealedKey]:
    """Some of the keys that are sealed under these keys of the ring."""
    if not key_ids:
        return []
    rows = await (await connection.execute(UNDER, [key_ids, limit])).fetchall()
    return [SealedKey(project, provider, bytes(sealed)) for project, provider, sealed in rows]


async def replace_sealed(connection: psycopg.AsyncConnection, key: SealedKey, sealed: bytes, key_id: str) -> int:
    """Puts a new seal in place of the one that was read; 0 when that is no longer there."""
    values = [sealed, key_id, key.project_id, key.provider, key.sealed]
    return (await connection.execute(REPLACE, values)).rowcount
