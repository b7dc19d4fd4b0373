"""SQL for the projects' identities; the transaction's role is the project's `service`, or `system`."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import psycopg
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True)
class Identity:
    """How tokens of a project's identity provider are verified. One of `jwks_url` and `jwks` is set."""

    jwks_url: str | None
    jwks: str | None
    issuer: str
    audience: str
    refuses_hs256: bool


@dataclass(frozen=True)
class IdentityRow(Identity):
    """An identity as stored."""

    updated_at: datetime


COLUMNS = "jwks_url, jwks, issuer, audience, refuses_hs256, updated_at"
PUT = text(
    "INSERT INTO conversation.identities AS i (project_id, jwks_url, jwks, issuer, audience, refuses_hs256)"
    " VALUES (:project, :jwks_url, :jwks, :issuer, :audience, :refuses_hs256)"
    " ON CONFLICT (project_id) DO UPDATE"
    " SET jwks_url = EXCLUDED.jwks_url, jwks = EXCLUDED.jwks, issuer = EXCLUDED.issuer,"
    " audience = EXCLUDED.audience, refuses_hs256 = EXCLUDED.refuses_hs256, updated_at = clock_timestamp()"
    f" RETURNING {COLUMNS}"
)
GET = text(f"SELECT {COLUMNS} FROM conversation.identities WHERE project_id = :project")
DELETE = text("DELETE FROM conversation.identities WHERE project_id = :project")


async def put_identity(tx: AsyncConnection, project: UUID, identity: Identity) -> IdentityRow | None:
    """Keeps an identity in place of an older one. None when there is no such project: nothing else works then."""
    values = {
        "project": project,
        "jwks_url": identity.jwks_url,
        "jwks": identity.jwks,
        "issuer": identity.issuer,
        "audience": identity.audience,
        "refuses_hs256": identity.refuses_hs256,
    }
    try:
        row = (await tx.execute(PUT, values)).one()
    except IntegrityError as error:
        if not isinstance(error.orig, psycopg.errors.ForeignKeyViolation):
            raise
        return None
    return IdentityRow(*row)


async def get_identity(tx: AsyncConnection, project: UUID) -> IdentityRow | None:
    """A project's identity."""
    row = (await tx.execute(GET, {"project": project})).one_or_none()
    return None if row is None else IdentityRow(*row)


async def delete_identity(tx: AsyncConnection, project: UUID) -> None:
    """Removes it, if there is one."""
    await tx.execute(DELETE, {"project": project})
