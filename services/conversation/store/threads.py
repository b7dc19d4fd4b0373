"""SQL for threads. Every function works on a transaction that sees only what its caller may."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

COLUMNS = (
    "id, user_id, title, system_prompt, default_model_slug, created_at, updated_at, tokens_in, tokens_out,"
    " thinking_tokens, cached_tokens, cache_write_tokens, cost_nano, usage_estimated"
)
ACTIVE = (
    "(SELECT r.id FROM conversation.ai_runs r WHERE r.thread_id = t.id AND r.status = 'running') AS active_run_id,"
    " (SELECT count(*) FROM conversation.queued_runs q WHERE q.thread_id = t.id) AS queued_runs"
)


@dataclass(frozen=True)
class ThreadRow:
    """A thread as stored, with its active run and how many wait behind it."""

    id: UUID
    user_id: str
    title: str
    system_prompt: str
    default_model_slug: str
    created_at: datetime
    updated_at: datetime
    tokens_in: int
    tokens_out: int
    thinking_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    cost_nano: int
    usage_estimated: bool
    active_run_id: UUID | None
    queued_runs: int


# Inserts a thread of the transaction's project.
INSERT = text(
    "INSERT INTO conversation.ai_threads AS t (id, project_id, user_id, title, system_prompt, default_model_slug)"
    " VALUES (:id, :project, :user, :title, :system_prompt, :default_model)"
    f" RETURNING {COLUMNS}, NULL::uuid AS active_run_id, 0 AS queued_runs"
)
GET = text(f"SELECT {COLUMNS}, {ACTIVE} FROM conversation.ai_threads t WHERE id = :id")
# Newest change first; the id breaks ties, so a page border loses nothing.
LIST = text(
    f"SELECT {COLUMNS}, {ACTIVE} FROM conversation.ai_threads t"
    " WHERE CAST(:before AS timestamptz) IS NULL"
    " OR (updated_at, id) < (CAST(:before AS timestamptz), CAST(:before_id AS uuid))"
    " ORDER BY updated_at DESC, id DESC LIMIT :limit"
)
# Changes the fields that are given.
UPDATE = text(
    "UPDATE conversation.ai_threads t SET title = coalesce(CAST(:title AS text), title),"
    " system_prompt = coalesce(CAST(:system_prompt AS text), system_prompt),"
    " default_model_slug = coalesce(CAST(:default_model AS text), default_model_slug),"
    f" updated_at = clock_timestamp() WHERE id = :id RETURNING {COLUMNS}, {ACTIVE}"
)
# Waits for a start on the thread to end, and keeps another from beginning.
LOCK = text("SELECT id FROM conversation.ai_threads WHERE id = :id FOR UPDATE")
ACTIVE_RUN = text("SELECT id FROM conversation.ai_runs WHERE thread_id = :id AND status = 'running'")
# The log has no foreign key (it would cost every event a lookup), so it goes by hand, first.
DELETE_EVENTS = text(
    "DELETE FROM conversation.run_events WHERE run_id IN (SELECT id FROM conversation.ai_runs WHERE thread_id = :id)"
)
DELETE = text("DELETE FROM conversation.ai_threads WHERE id = :id")


async def insert_thread(
    tx: AsyncConnection, *, id: UUID, project: UUID, user: str, title: str, system_prompt: str, default_model: str
) -> ThreadRow:
    """Makes a thread."""
    found = await tx.execute(
        INSERT,
        {
            "id": id,
            "project": project,
            "user": user,
            "title": title,
            "system_prompt": system_prompt,
            "default_model": default_model,
        },
    )
    return _row(found.one())


async def get_thread(tx: AsyncConnection, id: UUID) -> ThreadRow | None:
    """The thread, or None when the caller sees none of that id."""
    row = (await tx.execute(GET, {"id": id})).one_or_none()
    return None if row is None else _row(row)


async def list_threads(tx: AsyncConnection, *, before: tuple[datetime, UUID] | None, limit: int) -> list[ThreadRow]:
    """At most `limit` threads, newest change first, after the given place."""
    updated_at, id = before or (None, None)
    rows = await tx.execute(LIST, {"before": updated_at, "before_id": id, "limit": limit})
    return [_row(row) for row in rows]


async def update_thread(
    tx: AsyncConnection, *, id: UUID, title: str | None, system_prompt: str | None, default_model: str | None
) -> ThreadRow | None:
    """The thread after the change, or None."""
    found = await tx.execute(
        UPDATE, {"id": id, "title": title, "system_prompt": system_prompt, "default_model": default_model}
    )
    row = found.one_or_none()
    return None if row is None else _row(row)


async def delete_idle_thread(tx: AsyncConnection, id: UUID) -> UUID | None:
    """Deletes the thread and all it holds, unless a run is active: then its id is returned and nothing changed."""
    await tx.execute(LOCK, {"id": id})
    active: UUID | None = (await tx.execute(ACTIVE_RUN, {"id": id})).scalar_one_or_none()
    if active is None:
        await tx.execute(DELETE_EVENTS, {"id": id})
        await tx.execute(DELETE, {"id": id})
    return active


def _row(row: Row[Any]) -> ThreadRow:
    return ThreadRow(**row._mapping)
