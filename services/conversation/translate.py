"""Stored rows as messages of the API."""

from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from services.conversation.domain.fold import RunState
from services.conversation.store.messages import MessageRow
from services.conversation.store.runs import RunRow
from services.conversation.store.threads import ThreadRow
from threadloom.common.v1.error_pb2 import Error
from threadloom.common.v1.money_pb2 import Money
from threadloom.conversation.v1.conversation_service_pb2 import RunRequest
from threadloom.conversation.v1.message_pb2 import Message, MessageRole, MessageStatus, Usage
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import Run, RunStatus, Trace
from threadloom.conversation.v1.thread_pb2 import Thread

ROLES = {"user": MessageRole.MESSAGE_ROLE_USER, "assistant": MessageRole.MESSAGE_ROLE_ASSISTANT}
MESSAGE_STATUSES = {
    "streaming": MessageStatus.MESSAGE_STATUS_STREAMING,
    "complete": MessageStatus.MESSAGE_STATUS_COMPLETE,
    "failed": MessageStatus.MESSAGE_STATUS_FAILED,
    "cancelled": MessageStatus.MESSAGE_STATUS_CANCELLED,
}
RUN_STATUSES = {
    "queued": RunStatus.RUN_STATUS_QUEUED,
    "running": RunStatus.RUN_STATUS_RUNNING,
    "succeeded": RunStatus.RUN_STATUS_SUCCEEDED,
    "failed": RunStatus.RUN_STATUS_FAILED,
    "cancelled": RunStatus.RUN_STATUS_CANCELLED,
}


def thread(row: ThreadRow) -> Thread:
    """A thread."""
    return Thread(
        id=str(row.id),
        user_id=row.user_id,
        title=row.title,
        system_prompt=row.system_prompt,
        default_model=row.default_model_slug,
        create_time=timestamp(row.created_at),
        update_time=timestamp(row.updated_at),
        active_run_id=str(row.active_run_id or ""),
        queued_runs=row.queued_runs,
        usage=_usage(row),
    )


def message(row: MessageRow) -> Message:
    """A message as it is at rest."""
    found = Message(
        id=str(row.id),
        thread_id=str(row.thread_id),
        run_id=str(row.run_id),
        position=row.position,
        role=ROLES[row.role],
        status=MESSAGE_STATUSES[row.status],
        parts=RunRequest.FromString(row.parts).parts,
        text=row.text,
        model=row.model,
        provider=row.provider,
        latency_ms=row.latency_ms,
        finish_reason=row.finish_reason,
        create_time=timestamp(row.created_at),
    )
    if row.role == "assistant":
        found.usage.CopyFrom(_usage(row))
        found.cost_credits = row.cost_credits
    if row.error is not None:
        found.error.CopyFrom(Error.FromString(row.error))
    return found


def streaming_message(row: MessageRow, tail: list[bytes]) -> Message | None:
    """A message in the making: its snapshot and what the log holds beyond (durability.md 17).

    None before the provider answered: nothing of the reply exists for a reader then.
    """
    found = message(row)
    text, has_reply, seq = row.text, row.text_seq > 0, row.text_seq
    for payload in tail:
        event = RunEvent.FromString(payload)
        seq = event.seq
        kind = event.WhichOneof("kind")
        if kind == "text_delta":
            text += event.text_delta.text
        elif kind == "step_superseded":
            text = text[: event.step_superseded.kept_chars]
        elif kind == "reply_started":
            has_reply = True
    if not has_reply:
        return None
    found.text, found.cursor_seq = text, seq
    return found


def run(row: RunRow) -> Run:
    """A run."""
    found = Run(
        id=str(row.id),
        thread_id=str(row.thread_id),
        user_message_id=str(row.user_message_id),
        reply_message_id=str(row.reply_message_id),
        status=RUN_STATUSES[row.status],
        model=row.model,
        last_seq=row.last_seq,
        takeovers=row.takeovers,
        create_time=timestamp(row.created_at),
    )
    if row.error is not None:
        found.error.CopyFrom(Error.FromString(row.error))
    if row.finished_at is not None:
        found.finish_time.CopyFrom(timestamp(row.finished_at))
    return found


def recorded_trace(payload: bytes, run_id: str, message_id: str) -> Trace:
    """A stored trace with the ids its row carries."""
    found = Trace.FromString(payload)
    found.run_id, found.message_id = run_id, message_id
    return found


def live_traces(log: list[bytes], run_id: str, message_id: str) -> list[Trace]:
    """The traces of a run that is still in its log, none before the provider answered."""
    state = RunState()
    for payload in log:
        state.apply(RunEvent.FromString(payload))
    if not state.has_reply:
        return []
    found = state.recorded_traces()
    for trace in found:
        trace.run_id, trace.message_id = run_id, message_id
    return found


def _usage(row: MessageRow | ThreadRow) -> Usage:
    return Usage(
        input_tokens=row.tokens_in,
        output_tokens=row.tokens_out,
        thinking_tokens=row.thinking_tokens,
        cached_tokens=row.cached_tokens,
        cache_write_tokens=row.cache_write_tokens,
        cost=Money(nano_usd=row.cost_nano) if row.cost_nano else None,
        estimated=row.usage_estimated,
    )


def timestamp(value: datetime) -> Timestamp:
    """A Timestamp of an aware time."""
    found = Timestamp()
    found.FromDatetime(value)
    return found
