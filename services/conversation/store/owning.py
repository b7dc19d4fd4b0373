"""SQL of ownership: leases, claims, and the state changes of a run's owner. Engine role, raw psycopg."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import class_row

from services.conversation.domain.fold import RunState
from services.conversation.domain.history import PastMessage
from services.conversation.domain.usage import Hold
from services.conversation.store.log import Statement
from threadloom.common.v1.money_pb2 import Money
from threadloom.conversation.v1.message_pb2 import Usage

RENEW = """
INSERT INTO conversation.workers (id, lease_until)
VALUES (%(worker)s, clock_timestamp() + make_interval(secs => %(seconds)s))
ON CONFLICT (id) DO UPDATE SET lease_until = excluded.lease_until
"""
# Whether a cancel was asked for, and whether nobody follows a run any more that is to end then.
OWNED = """
SELECT r.id, r.epoch, r.cancel_requested_at IS NOT NULL, coalesce(w.until < clock_timestamp(), false)
FROM conversation.ai_runs r LEFT JOIN conversation.run_watch w ON w.run_id = r.id
WHERE r.id = ANY(%(runs)s) AND r.status = 'running'
"""
RELEASE_WORKER = "DELETE FROM conversation.workers WHERE id = %(worker)s"
CLAIMED = """
r.id, r.project_id, r.user_id, r.thread_id, r.user_message_id, r.reply_message_id, r.model, r.options, r.epoch,
r.takeovers, r.created_at,
r.cancel_requested_at IS NOT NULL AS is_cancelled,
EXISTS (SELECT FROM conversation.run_watch w WHERE w.run_id = r.id AND w.until < clock_timestamp()) AS is_left,
extract(epoch FROM clock_timestamp() - coalesce(r.begun_at, r.created_at))::float8 AS age_seconds,
(SELECT t.system_prompt FROM conversation.ai_threads t WHERE t.id = r.thread_id) AS system_prompt
"""
# Runs whose owner is gone: its lease ran out, it handed them over (no worker), or it is this
# worker and its start's answer was lost. A hand-over is no takeover: nothing went wrong.
# Whether the owner lives is asked in a subquery and not by a join: after waiting for a row lock
# Postgres checks the new row against the old joined one, and heirs would rob each other.
CLAIM = f"""
WITH free AS (
    SELECT r.id, r.worker_id IS NOT NULL AS is_takeover FROM conversation.ai_runs r
    WHERE r.status = 'running' AND (
        r.worker_id IS NULL
        OR (r.worker_id <> %(worker)s AND NOT EXISTS (
            SELECT FROM conversation.workers w WHERE w.id = r.worker_id AND w.lease_until >= clock_timestamp()))
        OR (r.worker_id = %(worker)s AND r.id <> ALL(%(known)s)
            AND coalesce(r.begun_at, r.created_at) < clock_timestamp() - make_interval(secs => %(adopt_seconds)s)))
    ORDER BY r.id LIMIT %(limit)s FOR UPDATE OF r SKIP LOCKED
)
UPDATE conversation.ai_runs r SET worker_id = %(worker)s, epoch = r.epoch + 1,
    takeovers = r.takeovers + free.is_takeover::int
FROM free WHERE r.id = free.id RETURNING {CLAIMED}
"""
# Takes one run whoever owns it: to end it for its thread's deletion.
SEIZE = f"""
UPDATE conversation.ai_runs r SET worker_id = %(worker)s, epoch = r.epoch + 1,
    cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())
WHERE r.id = %(run)s AND r.status = 'running' RETURNING {CLAIMED}
"""
# Takes one run if nobody alive owns it: to cancel it.
SEIZE_UNOWNED = f"""
UPDATE conversation.ai_runs r SET worker_id = %(worker)s, epoch = r.epoch + 1
WHERE r.id = %(run)s AND r.status = 'running' AND NOT EXISTS (
    SELECT FROM conversation.workers w WHERE w.id = r.worker_id AND w.lease_until >= clock_timestamp())
RETURNING {CLAIMED}
"""
# The message that is answered comes first, also when it is asked again and others came between.
HISTORY = """
SELECT role, text FROM (
    (SELECT role, text, position, true AS is_asked FROM conversation.ai_messages
    WHERE id = %(asked)s AND %(offset)s = 0)
    UNION ALL
    (SELECT role, text, position, false FROM conversation.ai_messages
    WHERE thread_id = %(thread)s AND id <> %(asked)s AND status <> 'streaming' AND position < (
        SELECT position FROM conversation.ai_messages WHERE id = %(reply)s)
    ORDER BY position DESC LIMIT %(limit)s - (%(offset)s = 0)::int OFFSET greatest(%(offset)s - 1, 0))
) found ORDER BY is_asked DESC, position DESC
"""
CALLS = """
SELECT id, status, rates, credits_per_usd, tokens_in, tokens_out, thinking_tokens, cached_tokens, cache_write_tokens,
    cost_nano, usage_source = 'estimated' AS is_estimated
FROM conversation.api_calls WHERE run_id = %(run)s ORDER BY started_at, id
"""


@dataclass(frozen=True)
class ClaimedRun:
    """A run as its new owner gets it. age_seconds: since its turn began, by the database clock.

    is_left: it is to end without followers, and none was known when it was claimed.
    """

    id: UUID
    project_id: UUID
    user_id: str
    thread_id: UUID
    user_message_id: UUID
    reply_message_id: UUID
    model: str
    options: bytes
    epoch: int
    takeovers: int
    is_cancelled: bool
    created_at: datetime
    age_seconds: float
    system_prompt: str
    is_left: bool = False


@dataclass(frozen=True)
class KnownCall:
    """An attempt at the provider as its run's new owner finds it. status started: it was not sent; sent: it may be."""

    id: UUID
    status: str
    rates: bytes | None
    credits_per_usd: int
    tokens_in: int
    tokens_out: int
    thinking_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    cost_nano: int
    is_estimated: bool

    @property
    def usage(self) -> Usage:
        """What it consumed; nothing while it is open."""
        return Usage(
            input_tokens=self.tokens_in,
            output_tokens=self.tokens_out,
            thinking_tokens=self.thinking_tokens,
            cached_tokens=self.cached_tokens,
            cache_write_tokens=self.cache_write_tokens,
            cost=Money(nano_usd=self.cost_nano) if self.cost_nano else None,
            estimated=self.is_estimated,
        )


async def renew_lease(connection: AsyncConnection, worker: UUID, seconds: float) -> None:
    """Makes the worker's lease end so many seconds from now; makes the worker on its first call."""
    await connection.execute(RENEW, {"worker": worker, "seconds": seconds}, prepare=True)


class OwnedRow(NamedTuple):
    """What became of a run elsewhere. is_left: it is to end without followers, and has none."""

    epoch: int
    is_cancelled: bool
    is_left: bool


async def owned_runs(connection: AsyncConnection, runs: Sequence[UUID]) -> dict[UUID, OwnedRow]:
    """Those that still run."""
    cursor = await connection.execute(OWNED, {"runs": list(runs)}, prepare=True)
    return {run: OwnedRow(*row) async for run, *row in cursor}


async def release_worker(connection: AsyncConnection, worker: UUID) -> None:
    """Ends the lease at once: the process is leaving."""
    await connection.execute(RELEASE_WORKER, {"worker": worker})


async def claim_free(
    connection: AsyncConnection, *, worker: UUID, known: Sequence[UUID], adopt_seconds: float, limit: int
) -> list[ClaimedRun]:
    """Takes over at most `limit` runs without a living owner."""
    parameters = {"worker": worker, "known": list(known), "adopt_seconds": adopt_seconds, "limit": limit}
    return await _claimed(connection, CLAIM, parameters)


async def seize(connection: AsyncConnection, *, worker: UUID, run: UUID, only_unowned: bool) -> ClaimedRun | None:
    """Takes one active run; None when it is not active, or is owned and only unowned ones were asked for."""
    statement = SEIZE_UNOWNED if only_unowned else SEIZE
    found = await _claimed(connection, statement, {"worker": worker, "run": run})
    return found[0] if found else None


async def read_history(
    connection: AsyncConnection, *, thread: UUID, reply: UUID, asked: UUID, limit: int, offset: int
) -> list[PastMessage]:
    """Finished messages before the reply, newest first; `asked` is the one it answers."""
    cursor = await connection.execute(
        HISTORY,
        {"thread": thread, "reply": reply, "asked": asked, "limit": limit, "offset": offset},
        prepare=True,
    )
    return [PastMessage(role, text) async for role, text in cursor]


async def read_calls(connection: AsyncConnection, run: UUID) -> list[KnownCall]:
    """The run's attempts at the provider, oldest first."""
    async with connection.cursor(row_factory=class_row(KnownCall)) as cursor:
        await cursor.execute(CALLS, {"run": run})
        return await cursor.fetchall()


async def _claimed(connection: AsyncConnection, statement: str, parameters: dict[str, Any]) -> list[ClaimedRun]:
    async with connection.cursor(row_factory=class_row(ClaimedRun)) as cursor:
        await cursor.execute(statement, parameters)
        return await cursor.fetchall()


# ------------------------------------------------------------------ statements of state changes


def begin_call(run: UUID, call: UUID, model: str, step: int, attempt: int) -> Statement:
    """Records an attempt at the provider, before the request (durability.md 14)."""
    return Statement(
        "INSERT INTO conversation.api_calls (id, project_id, user_id, thread_id, run_id, message_id, step, attempt,"
        " model) SELECT %(call)s, project_id, user_id, thread_id, id, reply_message_id, %(step)s, %(attempt)s,"
        " %(model)s FROM conversation.ai_runs WHERE id = %(run)s ON CONFLICT DO NOTHING",
        {"run": run, "call": call, "model": model, "step": step, "attempt": attempt},
    )


def send_call(call: UUID, hold: Hold) -> Statement:
    """Records that the attempt has its hold and is about to reach the provider: from here on it may cost money."""
    return Statement(
        "UPDATE conversation.api_calls SET status = 'sent', rates = %(rates)s, credits_per_usd = %(credits)s"
        " WHERE id = %(call)s AND status = 'started'",
        {"call": call, "rates": hold.stored_rates, "credits": hold.credits_per_usd},
    )


# (topic, payload) of the outbox: what billing must be told.
Notice = tuple[str, bytes]


@dataclass(frozen=True)
class CallEnd:
    """How an attempt ended. status: succeeded, failed, cancelled or cut; source: provider, estimated or none.

    `notice` is what billing must be told, if anything.
    """

    call: UUID
    status: str
    usage: Usage
    usage_source: str
    provider: str = ""
    http_status: int = 0
    error_code: str = ""
    notice: Notice | None = None


def end_call(end: CallEnd) -> Statement:
    """Records how an attempt ended, what the thread cost by now, and what billing must hear of it; all once."""
    topic, payload = end.notice or ("", b"")
    return Statement(
        "WITH ended AS (UPDATE conversation.api_calls SET status = %(status)s, provider = %(provider)s,"
        " http_status = %(http_status)s, error_code = %(error_code)s, tokens_in = %(tokens_in)s,"
        " tokens_out = %(tokens_out)s, thinking_tokens = %(thinking_tokens)s, cached_tokens = %(cached_tokens)s,"
        " cache_write_tokens = %(cache_write_tokens)s, cost_nano = %(cost)s, usage_source = %(usage_source)s,"
        " ended_at = clock_timestamp() WHERE id = %(call)s AND status IN ('started', 'sent')"
        " RETURNING id, project_id, thread_id),"
        " told AS (INSERT INTO conversation.outbox (id, topic, project_id, payload)"
        " SELECT id, %(topic)s, project_id, %(payload)s FROM ended WHERE %(topic)s <> '' ON CONFLICT DO NOTHING)"
        " UPDATE conversation.ai_threads t SET tokens_in = t.tokens_in + %(tokens_in)s,"
        " tokens_out = t.tokens_out + %(tokens_out)s, thinking_tokens = t.thinking_tokens + %(thinking_tokens)s,"
        " cached_tokens = t.cached_tokens + %(cached_tokens)s,"
        " cache_write_tokens = t.cache_write_tokens + %(cache_write_tokens)s, cost_nano = t.cost_nano + %(cost)s,"
        " usage_estimated = t.usage_estimated OR %(estimated)s FROM ended WHERE t.id = ended.thread_id",
        {
            "call": end.call,
            "status": end.status,
            "provider": end.provider,
            "http_status": end.http_status,
            "error_code": end.error_code,
            "usage_source": end.usage_source,
            "topic": topic,
            "payload": payload,
            "estimated": end.usage.estimated,
            **_tokens(end.usage),
        },
    )


def end_run(run: UUID, status: str, state: RunState) -> Statement:
    """Closes the run."""
    return Statement(
        "UPDATE conversation.ai_runs SET status = %(status)s, last_seq = %(seq)s, log_bytes = %(bytes)s,"
        " error = %(error)s, finished_at = clock_timestamp() WHERE id = %(run)s AND status = 'running'",
        {
            "run": run,
            "status": status,
            "seq": state.last_seq,
            "bytes": state.log_bytes,
            "error": state.error.SerializeToString() if state.error is not None else None,
        },
    )


def end_message(message: UUID, status: str, state: RunState, latency_ms: int) -> Statement:
    """Writes the reply as it stays."""
    return Statement(
        "UPDATE conversation.ai_messages SET status = %(status)s, text = %(text)s, text_seq = %(seq)s,"
        " model = CASE WHEN %(model)s = '' THEN model ELSE %(model)s END, provider = %(provider)s,"
        " tokens_in = %(tokens_in)s, tokens_out = %(tokens_out)s, thinking_tokens = %(thinking_tokens)s,"
        " cached_tokens = %(cached_tokens)s, cache_write_tokens = %(cache_write_tokens)s, cost_nano = %(cost)s,"
        " cost_credits = %(credits)s, usage_estimated = %(estimated)s, latency_ms = %(latency_ms)s,"
        " finish_reason = %(finish_reason)s, error = %(error)s WHERE id = %(message)s",
        {
            "message": message,
            "status": status,
            "text": state.text,
            "seq": state.last_seq,
            "model": state.model,
            "provider": state.provider,
            "estimated": state.usage.estimated,
            "credits": state.cost_credits,
            "latency_ms": latency_ms,
            "finish_reason": state.finish_reason,
            "error": state.error.SerializeToString() if state.error is not None else None,
            **_tokens(state.usage),
        },
    )


def touch_thread(thread: UUID) -> Statement:
    """Moves the thread to the top of its list."""
    return Statement(
        "UPDATE conversation.ai_threads SET updated_at = clock_timestamp() WHERE id = %(thread)s", {"thread": thread}
    )


def drop_reply(message: UUID) -> Statement:
    """Removes the reply of a run that failed before the provider answered (durability.md 13)."""
    return Statement("DELETE FROM conversation.ai_messages WHERE id = %(message)s", {"message": message})


def free_key(run: UUID, kept_message: UUID) -> Statement:
    """Lets the request that made this run be sent again; its user message is reused (durability.md 23)."""
    return Statement(
        "UPDATE conversation.idempotency_keys SET resource = NULL, kept_message_id = %(message)s"
        " WHERE resource = %(run)s AND project_id = (SELECT project_id FROM conversation.ai_runs WHERE id = %(run)s)",
        {"run": run, "message": kept_message},
    )


def hand_over(run: UUID) -> Statement:
    """Lets any process claim the run at once."""
    return Statement("UPDATE conversation.ai_runs SET worker_id = NULL WHERE id = %(run)s", {"run": run})


def record_traces(run: UUID, message: UUID, state: RunState) -> Statement | None:
    """Keeps the run's traces beyond its log; None when there are none."""
    traces = [trace for trace in state.recorded_traces() if trace.HasField("end_time")]
    if not traces:
        return None
    return Statement(
        "INSERT INTO conversation.trace_events (run_id, ordinal, project_id, user_id, thread_id, message_id, position,"
        " type, payload, started_at, ended_at) SELECT r.id, t.ordinal, r.project_id, r.user_id, r.thread_id, m.id,"
        " m.position, t.type, t.payload, t.started_at, t.ended_at FROM conversation.ai_runs r"
        " JOIN conversation.ai_messages m ON m.id = %(message)s, unnest(%(ordinals)s::bigint[], %(types)s::text[],"
        " %(payloads)s::bytea[], %(starts)s::timestamptz[], %(ends)s::timestamptz[])"
        " AS t (ordinal, type, payload, started_at, ended_at) WHERE r.id = %(run)s ON CONFLICT DO NOTHING",
        {
            "run": run,
            "message": message,
            "ordinals": list(range(1, len(traces) + 1)),
            "types": [trace.WhichOneof("payload") or "" for trace in traces],
            "payloads": [trace.SerializeToString() for trace in traces],
            "starts": [trace.start_time.ToDatetime().isoformat() + "+00" for trace in traces],
            "ends": [trace.end_time.ToDatetime().isoformat() + "+00" for trace in traces],
        },
    )


def _tokens(usage: Usage) -> dict[str, int]:
    return {
        "tokens_in": usage.input_tokens,
        "tokens_out": usage.output_tokens,
        "thinking_tokens": usage.thinking_tokens,
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "cost": usage.cost.nano_usd,
    }
