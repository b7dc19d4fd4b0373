"""SQL for the ledger: one row for each call that was made, written once and never changed."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from kit.errors import ServiceError
from kit.pricing import Usage
from services.billing.domain.calls import Call


@dataclass(frozen=True)
class LedgerEntry:
    """A booked call as stored."""

    api_call_id: UUID
    project_id: UUID
    user_id: str
    run_id: UUID
    thread_id: UUID
    message_id: UUID
    model: str
    tokens_in: int
    cached_tokens: int
    cache_write_tokens: int
    tokens_out: int
    thinking_tokens: int
    cost_nano: int
    reported_nano: int
    estimated: bool
    above_hold: bool
    late: bool
    booked_at: datetime

    @property
    def call(self) -> Call:
        """Whose it is."""
        return Call(
            self.api_call_id,
            self.project_id,
            self.user_id,
            self.run_id,
            self.thread_id,
            self.message_id,
            self.model,
        )

    @property
    def usage(self) -> Usage:
        """Its tokens."""
        return Usage(self.tokens_in, self.tokens_out, self.cached_tokens, self.cache_write_tokens, self.thinking_tokens)


ENTRY = ", ".join(LedgerEntry.__dataclass_fields__)
OF_CALL = f"SELECT {ENTRY} FROM billing.cost_ledger WHERE api_call_id = %s AND project_id = %s"
# Two statements, so that each has its index: a user's entries may be few among very many.
PLACE = (
    " AND (CAST(:before AS timestamptz) IS NULL"
    " OR (booked_at, api_call_id) < (CAST(:before AS timestamptz), CAST(:before_id AS uuid)))"
    " ORDER BY booked_at DESC, api_call_id DESC LIMIT :limit"
)
LIST = text(f"SELECT {ENTRY} FROM billing.cost_ledger WHERE project_id = :project{PLACE}")
LIST_OF_USER = text(f"SELECT {ENTRY} FROM billing.cost_ledger WHERE project_id = :project AND user_id = :user{PLACE}")


async def of_call(connection: psycopg.AsyncConnection, project: UUID, id: UUID) -> LedgerEntry | None:
    """The entry of a call, or None when it is not booked."""
    async with connection.transaction():
        await connection.execute("SELECT billing.enter_project(%s)", [project])
        row = await (await connection.execute(OF_CALL.encode(), [id, project])).fetchone()
    return None if row is None else LedgerEntry(*row)


async def list_entries(
    tx: AsyncConnection, project: UUID, user: str, *, before: tuple[datetime, UUID] | None, limit: int
) -> list[LedgerEntry]:
    """At most `limit` entries, newest first, of one user or, with '', of all that the transaction sees."""
    at, id = before or (None, None)
    values = {"project": project, "user": user, "before": at, "before_id": id, "limit": limit}
    return [LedgerEntry(**row._mapping) for row in await tx.execute(LIST_OF_USER if user else LIST, values)]


def check_same(booked: LedgerEntry, usage: Usage, *, estimated: bool, reported: int) -> None:
    """Raises IDEMPOTENCY_KEY_REUSED when a settle differs from the one that was booked."""
    if (booked.usage, booked.estimated, booked.reported_nano) != (usage, estimated, reported):
        raise reused()


def reused() -> ServiceError:
    """An id that stands for something else already."""
    return ServiceError("IDEMPOTENCY_KEY_REUSED", "This api_call_id was used for another call or other numbers.")
