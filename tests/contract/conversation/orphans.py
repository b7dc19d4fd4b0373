"""Runs as a process leaves them that was lost: rows written by SQL, so that no old owner is in the way."""

from dataclasses import dataclass, replace
from uuid import UUID

from kit.ids import new_id
from services.conversation.billing import Payer
from services.conversation.domain import events
from services.conversation.domain.events import KIND_NUMBERS, kind_of
from tests.contract.conversation.harness import Service, Sql, project_id
from threadloom.conversation.v1.run_event_pb2 import RunEvent

# What a process that is gone had shown: the reply had begun, with a thought and some text.
SHOWN = "lost words "
SECONDS_AGO = 10.0
HELD_INPUT, HELD_OUTPUT = 100, 50  # tokens, by its hold


@dataclass(frozen=True)
class Orphan:
    """A run without a living owner. `worker`: who had it; None: handed over."""

    thread: UUID
    run: UUID
    user_message: UUID
    reply: UUID
    call: UUID
    worker: UUID | None
    log: tuple[RunEvent, ...] = ()
    takeovers: int = 0
    is_cancelled: bool = False
    seconds_ago: float = SECONDS_AGO
    text: str = "hello"
    status: str = "sent"  # of its call
    model: str = "fake-model"  # of its call
    options: bytes = b""
    is_left: bool = False  # it is to end without followers, and has none


def cut_log(user_message: UUID) -> list[RunEvent]:
    """A log that ends in mid-text."""
    thinking = RunEvent()
    thinking.trace_started.trace_id, thinking.trace_started.step = "evt_001", 1
    thinking.trace_started.thinking.SetInParent()
    request = RunEvent()
    request.trace_started.trace_id, request.trace_started.step = "evt_002", 1
    request.trace_started.llm_request.model = "fake-model"
    return [
        events.run_started(str(user_message), "fake-model"),
        events.reply_started("fake-model", "openai", 1),
        events.step_started(1),
        thinking,
        events.thinking_delta("evt_001", "hm"),
        events.trace_ended("evt_001"),
        request,
        events.text_delta(1, SHOWN),
    ]


def an_orphan(thread: str, *, is_begun: bool = True, worker: UUID | None = None, **changes: object) -> Orphan:
    """A run whose worker has no row any more; cut in mid-text, or before the provider answered."""
    user_message = new_id()
    log = cut_log(user_message) if is_begun else [events.run_started(str(user_message), "fake-model")]
    events.number(log, 1)
    found = Orphan(UUID(thread), new_id(), user_message, new_id(), new_id(), worker or new_id(), tuple(log))
    return replace(found, **changes)  # type: ignore[arg-type]


async def insert(service: Service, sql: Sql, orphan: Orphan) -> str:
    """Writes its rows; returns the run's id. One statement, so that no claimer sees half of it."""
    owner = service.alice.caller
    payer = Payer(project_id(owner), owner.user, orphan.thread, orphan.run, orphan.reply, orphan.model)
    status, rates = orphan.status, None
    if orphan.status == "sent":
        rates = await service.books.hold(payer, orphan.call, HELD_INPUT, HELD_OUTPUT)
    rows = [(event.seq, KIND_NUMBERS[kind_of(event)], event.SerializeToString()) for event in orphan.log]
    seqs, kinds, payloads = (list(column) for column in zip(*rows, strict=True))
    await sql.rows(
        """
        WITH thread AS (
            UPDATE conversation.ai_threads SET next_position = next_position + 2 WHERE id = %s
            RETURNING id, project_id, user_id, next_position - 2 AS position
        ), messages AS (
            INSERT INTO conversation.ai_messages
                (id, project_id, user_id, thread_id, run_id, position, role, status, text, created_at)
            SELECT m.id, t.project_id, t.user_id, t.id, %s, t.position + m.at, m.role, m.status, m.text,
                clock_timestamp() + make_interval(secs => m.at)
            FROM thread t, (VALUES (%s::uuid, 0, 'user', 'complete', %s::text),
                (%s::uuid, 1, 'assistant', 'streaming', '')) AS m (id, at, role, status, text)
        ), run AS (
            INSERT INTO conversation.ai_runs (id, project_id, user_id, thread_id, user_message_id, reply_message_id,
                status, model, options, worker_id, takeovers, cancel_requested_at, created_at)
            SELECT %s, project_id, user_id, id, %s, %s, 'running', 'fake-model', %s, %s, %s,
                CASE WHEN %s THEN clock_timestamp() END, clock_timestamp() - make_interval(secs => %s) FROM thread
            RETURNING id, project_id
        ), watch AS (
            INSERT INTO conversation.run_watch (run_id, project_id, cancel_after_ms, until)
            SELECT id, project_id, 1000, clock_timestamp() - interval '1 s' FROM run WHERE %s
        ), call AS (
            INSERT INTO conversation.api_calls
                (id, project_id, user_id, thread_id, run_id, message_id, step, attempt, model, status, rates)
            SELECT %s, project_id, user_id, id, %s, %s, 1, 1, %s, %s, %s FROM thread
        )
        INSERT INTO conversation.run_events (run_id, seq, project_id, kind, payload)
        SELECT %s, e.seq, %s, e.kind, e.payload
        FROM unnest(%s::bigint[], %s::smallint[], %s::bytea[]) AS e (seq, kind, payload)
        """,
        *(orphan.thread, orphan.run, orphan.user_message, orphan.text, orphan.reply),
        *(orphan.run, orphan.user_message, orphan.reply, orphan.options, orphan.worker, orphan.takeovers),
        *(orphan.is_cancelled, orphan.seconds_ago, orphan.is_left),
        *(orphan.call, orphan.run, orphan.reply, orphan.model, status, rates),
        *(orphan.run, project_id(owner), seqs, kinds, payloads),
    )
    return str(orphan.run)
