"""SQL for reading messages and traces, on a transaction that sees only what its caller may."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True)
class MessageRow:
    """A message as stored."""

    id: UUID
    thread_id: UUID
    run_id: UUID
    position: int
    role: str
    status: str
    parts: bytes
    text: str
    text_seq: int
    model: str
    provider: str
    tokens_in: int
    tokens_out: int
    thinking_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    cost_nano: int
    cost_credits: int
    usage_estimated: bool
    latency_ms: int
    finish_reason: str
    error: bytes | None
    created_at: datetime


LIST = text(
    "SELECT id, thread_id, run_id, position, role, status, parts, text, text_seq, model, provider, tokens_in,"
    " tokens_out, thinking_tokens, cached_tokens, cache_write_tokens, cost_nano, cost_credits,"
    " usage_estimated, latency_ms, finish_reason, error, created_at"
    " FROM conversation.ai_messages WHERE thread_id = :thread AND position > :after"
    " ORDER BY position LIMIT :limit"
)
# What the log holds beyond a streaming message's snapshot.
TAIL = text("SELECT payload FROM conversation.run_events WHERE run_id = :run AND seq > :seq ORDER BY seq")
TRACES = text(
    "SELECT payload, run_id, message_id, position, ordinal FROM conversation.trace_events WHERE thread_id = :thread"
    " AND (CAST(:message AS uuid) IS NULL OR message_id = CAST(:message AS uuid))"
    " AND (position, ordinal) > (:position, :ordinal) ORDER BY position, ordinal LIMIT :limit"
)
# The active run of the thread: its traces are still in the log.
ACTIVE = text(
    "SELECT r.id, r.reply_message_id, m.position FROM conversation.ai_runs r"
    " JOIN conversation.ai_messages m ON m.id = r.reply_message_id"
    " WHERE r.thread_id = :thread AND r.status = 'running'"
)


async def list_messages(tx: AsyncConnection, *, thread: UUID, after: int, limit: int) -> list[MessageRow]:
    """At most `limit` messages with a greater position, oldest first."""
    rows = await tx.execute(LIST, {"thread": thread, "after": after, "limit": limit})
    return [MessageRow(*row) for row in rows]


async def log_tail(tx: AsyncConnection, *, run: UUID, after_seq: int) -> list[bytes]:
    """The run's committed events with a greater seq, as RunEvent bytes."""
    return list((await tx.execute(TAIL, {"run": run, "seq": after_seq})).scalars())


@dataclass(frozen=True)
class TraceRow:
    """A trace as stored: Trace bytes, whose it is, and its place (message position, ordinal in the run)."""

    payload: bytes
    run_id: UUID
    message_id: UUID
    position: int
    ordinal: int


async def list_traces(
    tx: AsyncConnection, *, thread: UUID, message: UUID | None, after: tuple[int, int], limit: int
) -> list[TraceRow]:
    """At most `limit` traces of finished runs after the given place, in order."""
    arguments: dict[str, Any] = {"thread": thread, "message": message, "limit": limit}
    rows = await tx.execute(TRACES, arguments | {"position": after[0], "ordinal": after[1]})
    return [TraceRow(*row) for row in rows]


async def active_run(tx: AsyncConnection, thread: UUID) -> tuple[UUID, UUID, int] | None:
    """(run, its reply message, that message's position) of the thread's active run."""
    row = (await tx.execute(ACTIVE, {"thread": thread})).one_or_none()
    return None if row is None else tuple(row)
