"""SQL that starts a run: key, user message, reply message, run, first event and first api call at once.

It is one statement, so a start either exists whole or not at all, and the two unique
indexes (one active run a thread, one resource a key) decide every race.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from services.conversation.domain.events import KIND_NUMBERS
from services.conversation.store.log import Statement

ONE_ACTIVE_RUN = "ai_runs_one_active"
ONE_KEY = "idempotency_keys_pkey"


@dataclass(frozen=True)
class NewRun:
    """Everything a start writes. `is_kept`: the user message is there already, of a first run that failed early."""

    run_id: UUID
    project_id: UUID
    thread_id: UUID
    worker_id: UUID
    user_message_id: UUID
    reply_message_id: UUID
    api_call_id: UUID
    model: str  # asked for by the caller; empty: the thread's
    default_model: str  # when the thread has none either
    options: bytes
    parts: bytes
    text: str
    title: str
    first_event: bytes
    is_kept: bool
    may_wait: bool = False  # behind an active run
    is_interrupt: bool = False  # then as the next one, and the active one is cancelled
    cancel_after_ms: int = 0  # once no client follows it; 0: never


@dataclass(frozen=True)
class Started:
    """What the start found: the thread's owner and settings."""

    user_id: str
    system_prompt: str
    model: str
    created_at: datetime


# The thread's row hands out positions and times, so starts on one thread queue up here
# and created_at rises strictly (durability.md 10).
START = f"""
WITH thread AS (
    UPDATE conversation.ai_threads SET
        next_position = next_position + 2,
        last_message_at = greatest(clock_timestamp(), last_message_at + interval '2 microseconds'),
        updated_at = clock_timestamp(),
        title = CASE WHEN title = '' THEN %(title)s ELSE title END
    WHERE id = %(thread)s
    RETURNING id, project_id, user_id, system_prompt, next_position - 2 AS position, last_message_at AS at,
        coalesce(nullif(%(model)s, ''), nullif(default_model_slug, ''), %(default_model)s) AS model
), new_message AS (
    INSERT INTO conversation.ai_messages
        (id, project_id, user_id, thread_id, run_id, position, role, status, parts, text, created_at)
    SELECT %(user_message)s, project_id, user_id, id, %(run)s, position, 'user', 'complete', %(parts)s, %(text)s,
        at - interval '1 microsecond'
    FROM thread WHERE NOT %(is_kept)s
), kept_message AS (
    UPDATE conversation.ai_messages SET run_id = %(run)s WHERE id = %(user_message)s AND %(is_kept)s
), reply AS (
    INSERT INTO conversation.ai_messages
        (id, project_id, user_id, thread_id, run_id, position, role, status, model, created_at)
    SELECT %(reply)s, project_id, user_id, id, %(run)s, position + 1, 'assistant', 'streaming', model, at FROM thread
), run AS (
    INSERT INTO conversation.ai_runs
        (id, project_id, user_id, thread_id, user_message_id, reply_message_id, status, model, options, worker_id)
    SELECT %(run)s, project_id, user_id, id, %(user_message)s, %(reply)s, 'running', model, %(options)s, %(worker)s
    FROM thread
    RETURNING created_at
), call AS (
    INSERT INTO conversation.api_calls
        (id, project_id, user_id, thread_id, run_id, message_id, step, attempt, model)
    SELECT %(call)s, project_id, user_id, id, %(run)s, %(reply)s, 1, 1, model FROM thread
), event AS (
    INSERT INTO conversation.run_events (run_id, seq, project_id, kind, payload)
    SELECT %(run)s, 1, project_id, {KIND_NUMBERS["run_started"]}, %(first_event)s FROM thread
)
SELECT thread.user_id, thread.system_prompt, thread.model, run.created_at FROM thread, run
"""
KEY_COLUMNS = "project_id, caller, method, route, key, body_sha256, resource"
KEY_VALUES = "%(project)s, %(caller)s, %(method)s, %(route)s, %(key)s, %(body)s, %(resource)s"
# Remembers the request. Fails on idempotency_keys_pkey when it was seen before.
INSERT_KEY = f"INSERT INTO conversation.idempotency_keys ({KEY_COLUMNS}) VALUES ({KEY_VALUES})"
# The same before a start whose answers nobody awaits: without a thread that the caller sees nothing is to be kept.
# A thread deleted right behind this leaves the key of a run that never was, and its retry finds no thread either.
INSERT_KEY_OF_THREAD = f"""
INSERT INTO conversation.idempotency_keys ({KEY_COLUMNS})
SELECT {KEY_VALUES} FROM conversation.ai_threads WHERE id = %(thread)s
"""
FIND_KEY = (
    "SELECT body_sha256, resource, kept_message_id FROM conversation.idempotency_keys"
    " WHERE project_id = %(project)s AND caller = %(caller)s AND method = %(method)s AND route = %(route)s"
    " AND key = %(key)s"
)
# Takes a freed key for a new resource; of two that try, one finds it taken.
RETAKE_KEY = (
    "UPDATE conversation.idempotency_keys SET resource = %(resource)s"
    " WHERE project_id = %(project)s AND caller = %(caller)s AND method = %(method)s AND route = %(route)s"
    " AND key = %(key)s AND resource IS NULL RETURNING kept_message_id"
)


@dataclass(frozen=True)
class RequestKey:
    """What makes two requests the same one (durability.md 23)."""

    project: UUID
    caller: str
    method: str
    route: str
    key: str

    def parameters(self) -> dict[str, Any]:
        """As SQL parameters."""
        return {
            "project": self.project,
            "caller": self.caller,
            "method": self.method,
            "route": self.route,
            "key": self.key,
        }


@dataclass(frozen=True)
class KnownKey:
    """A request seen before: the digest of its body and what it made. No resource: free to be taken again."""

    body_sha256: bytes
    resource: UUID | None
    kept_message_id: UUID | None


def start(new: NewRun) -> Statement:
    """Writes the start; returns a row unless the caller sees no such thread."""
    return Statement(
        START,
        {
            "title": new.title,
            "thread": new.thread_id,
            "model": new.model,
            "default_model": new.default_model,
            "user_message": new.user_message_id,
            "run": new.run_id,
            "parts": new.parts,
            "text": new.text,
            "is_kept": new.is_kept,
            "reply": new.reply_message_id,
            "options": new.options,
            "worker": new.worker_id,
            "call": new.api_call_id,
            "first_event": new.first_event,
        },
    )


def take_key(new: NewRun, key: RequestKey, body_sha256: bytes) -> Statement:
    """Remembers a request and the run it makes, if the caller sees the run's thread."""
    parameters = {"body": body_sha256, "resource": new.run_id, "thread": new.thread_id}
    return Statement(INSERT_KEY_OF_THREAD, key.parameters() | parameters)


async def start_run(tx: AsyncConnection, new: NewRun) -> Started | None:
    """Writes the start; None when the caller sees no such thread."""
    row = (await tx.exec_driver_sql(*start(new))).one_or_none()
    return None if row is None else Started(*tuple(row))


async def insert_key(tx: AsyncConnection, key: RequestKey, body_sha256: bytes, resource: UUID) -> None:
    """Remembers a request and what it made."""
    await tx.exec_driver_sql(INSERT_KEY, key.parameters() | {"body": body_sha256, "resource": resource})


async def find_key(tx: AsyncConnection, key: RequestKey) -> KnownKey | None:
    """The request, if it was seen before."""
    row = (await tx.exec_driver_sql(FIND_KEY, key.parameters())).one_or_none()
    return None if row is None else KnownKey(*tuple(row))


async def retake_key(tx: AsyncConnection, key: RequestKey, resource: UUID) -> bool:
    """Binds a freed key to a new resource; False when another request was faster."""
    found = await tx.exec_driver_sql(RETAKE_KEY, key.parameters() | {"resource": resource})
    return found.one_or_none() is not None
