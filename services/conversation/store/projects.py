"""SQL for projects, their keys and stream tickets; the transaction's role is `system`."""

from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from uuid import UUID

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.conversation.store.identities import IdentityRow


@dataclass(frozen=True)
class ProjectRow:
    """A project as stored; key_kind is set when it was found by a key, identity when it has one."""

    id: UUID
    slug: str
    jwt_secret: str
    created_at: datetime
    key_kind: str
    identity: IdentityRow | None = None


COLUMNS = "p.id, p.slug, p.jwt_secret, p.created_at"
INSERT = text(
    "INSERT INTO conversation.projects AS p (id, slug, jwt_secret) VALUES (:id, :slug, :jwt_secret)"
    f" ON CONFLICT (slug) DO NOTHING RETURNING {COLUMNS}, ''"
)
INSERT_KEY = text(
    "INSERT INTO conversation.project_keys (key_sha256, project_id, kind) VALUES (:digest, :project, :kind)"
)
IDENTITY = "i.jwks_url, i.jwks, i.issuer, i.audience, i.refuses_hs256, i.updated_at"
WITH_IDENTITY = "conversation.projects p LEFT JOIN conversation.identities i ON i.project_id = p.id"
BY_KEY = text(
    f"SELECT {COLUMNS}, k.kind, {IDENTITY} FROM conversation.project_keys k"
    " JOIN conversation.projects p ON p.id = k.project_id"
    " LEFT JOIN conversation.identities i ON i.project_id = p.id"
    " WHERE k.key_sha256 = :digest AND k.revoked_at IS NULL"
)
BY_SLUG = text(f"SELECT {COLUMNS}, '', {IDENTITY} FROM {WITH_IDENTITY} WHERE p.slug = :slug")
BY_ID = text(f"SELECT {COLUMNS}, '', {IDENTITY} FROM {WITH_IDENTITY} WHERE p.id = :id")
INSERT_TICKET = text(
    "INSERT INTO conversation.stream_tickets (ticket_sha256, project_id, user_id, role, expires_at)"
    " VALUES (:digest, :project, :user, :role, clock_timestamp() + make_interval(secs => :seconds))"
    " RETURNING expires_at"
)
# Deleting is what makes it single use: of two that redeem it, one finds it gone.
REDEEM = text(
    "DELETE FROM conversation.stream_tickets WHERE ticket_sha256 = :digest"
    " RETURNING project_id, user_id, role, expires_at > clock_timestamp()"
)


def digest(secret: str) -> bytes:
    """What is kept of a key or ticket. They are 256 random bits, so a plain hash is enough."""
    return sha256(secret.encode()).digest()


async def insert_project(
    tx: AsyncConnection, *, id: UUID, slug: str, jwt_secret: str, keys: dict[str, str]
) -> ProjectRow | None:
    """Makes a project with its keys ({kind: key}); None when the slug is taken."""
    row = (await tx.execute(INSERT, {"id": id, "slug": slug, "jwt_secret": jwt_secret})).one_or_none()
    if row is None:
        return None
    for kind, key in keys.items():
        await tx.execute(INSERT_KEY, {"digest": digest(key), "project": id, "kind": kind})
    return ProjectRow(*row)


async def project_by_key(tx: AsyncConnection, key: str) -> ProjectRow | None:
    """The project a key belongs to."""
    return await _read(tx, BY_KEY, {"digest": digest(key)})


async def project_by_slug(tx: AsyncConnection, slug: str) -> ProjectRow | None:
    """The project of that name."""
    return await _read(tx, BY_SLUG, {"slug": slug})


async def project_by_id(tx: AsyncConnection, id: UUID) -> ProjectRow | None:
    """The project of that id."""
    return await _read(tx, BY_ID, {"id": id})


async def insert_ticket(
    tx: AsyncConnection, *, ticket: str, project: UUID, user: str, role: str, seconds: int
) -> datetime:
    """Keeps a ticket; returns when it stops working."""
    found = await tx.execute(
        INSERT_TICKET,
        {"digest": digest(ticket), "project": project, "user": user, "role": role, "seconds": seconds},
    )
    expires_at: datetime = found.scalar_one()
    return expires_at


async def redeem_ticket(tx: AsyncConnection, ticket: str) -> tuple[UUID, str, str] | None:
    """(project, user, role) of a ticket, which is used up by this; None when it is not good."""
    row = (await tx.execute(REDEEM, {"digest": digest(ticket)})).one_or_none()
    return (row[0], row[1], row[2]) if row is not None and row[3] else None


async def _read(tx: AsyncConnection, query: TextClause, values: dict[str, object]) -> ProjectRow | None:
    row = (await tx.execute(query, values)).one_or_none()
    if row is None:
        return None
    id, slug, jwt_secret, created_at, key_kind, *identity = row
    has_identity = row.updated_at is not None
    return ProjectRow(id, slug, jwt_secret, created_at, key_kind, IdentityRow(*identity) if has_identity else None)
