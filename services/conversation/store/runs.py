"""SQL of requests about runs, on a transaction that sees only what its caller may."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True)
class RunRow:
    """A run as stored; last_seq is 0 until it ended. owner_is_alive: its lease runs."""

    id: UUID
    project_id: UUID
    user_id: str
    thread_id: UUID
    user_message_id: UUID
    reply_message_id: UUID
    status: str
    model: str
    worker_id: UUID | None
    takeovers: int
    last_seq: int
    log_trimmed: bool
    error: bytes | None
    created_at: datetime
    finished_at: datetime | None
    options: bytes


COLUMNS = (
    "id, project_id, user_id, thread_id, user_message_id, reply_message_id, status, model, worker_id, takeovers,"
    " CASE WHEN finished_at IS NULL THEN"
    " coalesce((SELECT max(seq) FROM conversation.run_events e WHERE e.run_id = r.id), 0) ELSE last_seq END,"
    " log_trimmed, error, created_at, finished_at, options"
)
GET = text(f"SELECT {COLUMNS} FROM conversation.ai_runs r WHERE id = :id")
GET_ACTIVE = text(f"SELECT {COLUMNS} FROM conversation.ai_runs r WHERE thread_id = :thread AND status = 'running'")
# The first request to cancel is the one that counts.
REQUEST_CANCEL = text(
    "UPDATE conversation.ai_runs SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())"
    " WHERE id = :id AND status = 'running'"
)


async def get_run(tx: AsyncConnection, id: UUID) -> RunRow | None:
    """The run, or None when the caller sees none of that id."""
    row = (await tx.execute(GET, {"id": id})).one_or_none()
    return None if row is None else RunRow(*row)


async def get_active_run(tx: AsyncConnection, thread: UUID) -> RunRow | None:
    """The thread's active run."""
    row = (await tx.execute(GET_ACTIVE, {"thread": thread})).one_or_none()
    return None if row is None else RunRow(*row)


async def request_cancel(tx: AsyncConnection, id: UUID) -> None:
    """Asks the owner, whoever it is, to stop. Does nothing to a run that ended."""
    await tx.execute(REQUEST_CANCEL, {"id": id})
