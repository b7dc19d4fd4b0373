"""From the service's messages to the JSON shapes. Pure."""

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from kit.money import format_usd, micro_usd
from services.gateway.routes import shapes
from services.gateway.wire.conversations import (
    MESSAGE_PREFIX,
    error_fields,
    llm_request_fields,
    model_switch_fields,
    retry_fields,
)
from services.gateway.wire.frames import WHOLE_EVENT, Cursor
from threadloom.conversation.v1 import message_pb2 as pb
from threadloom.conversation.v1.run_pb2 import Run, RunStatus, Trace
from threadloom.conversation.v1.thread_pb2 import Thread

ROLES = {pb.MESSAGE_ROLE_USER: "user", pb.MESSAGE_ROLE_ASSISTANT: "assistant"}
STATUSES = {
    pb.MESSAGE_STATUS_STREAMING: "streaming",
    pb.MESSAGE_STATUS_COMPLETE: "complete",
    pb.MESSAGE_STATUS_FAILED: "error",
    pb.MESSAGE_STATUS_CANCELLED: "cancelled",
}
RUN_STATUSES = {
    RunStatus.RUN_STATUS_QUEUED: "queued",
    RunStatus.RUN_STATUS_RUNNING: "running",
    RunStatus.RUN_STATUS_SUCCEEDED: "succeeded",
    RunStatus.RUN_STATUS_FAILED: "failed",
    RunStatus.RUN_STATUS_CANCELLED: "cancelled",
}
# A run that is still recorded as running will end soon: the wish to cancel it is stored.
CANCELS = {
    RunStatus.RUN_STATUS_RUNNING: "cancelling",
    RunStatus.RUN_STATUS_CANCELLED: "cancelled",
    RunStatus.RUN_STATUS_SUCCEEDED: "succeeded",
    RunStatus.RUN_STATUS_FAILED: "failed",
}


def conversation(thread: Thread) -> shapes.Conversation:
    """A thread as a conversation."""
    return shapes.Conversation(
        id=thread.id,
        user_id=thread.user_id,
        title=thread.title or None,
        system_prompt=thread.system_prompt or None,
        default_model_slug=thread.default_model or None,
        created_at=time(thread.create_time),
        updated_at=time(thread.update_time),
        active_run_id=thread.active_run_id or None,
        queued_runs=thread.queued_runs,
        input_tokens=thread.usage.input_tokens,
        output_tokens=thread.usage.output_tokens,
        thinking_tokens=thread.usage.thinking_tokens,
        cached_tokens=thread.usage.cached_tokens,
        cache_write_tokens=thread.usage.cache_write_tokens,
        cost_usd=format_usd(thread.usage.cost.nano_usd),
        usage_estimated=thread.usage.estimated,
    )


def message(found: pb.Message) -> shapes.Message:
    """A message; figures only on answers."""
    is_answer = found.role == pb.MESSAGE_ROLE_ASSISTANT
    usage = found.usage if is_answer and found.HasField("usage") else None
    is_streaming = found.status == pb.MESSAGE_STATUS_STREAMING
    return shapes.Message(
        id=MESSAGE_PREFIX + found.id,
        conversation_id=found.thread_id,
        role=ROLES.get(found.role, "assistant"),  # type: ignore[arg-type]
        status=STATUSES.get(found.status, "complete"),  # type: ignore[arg-type]
        content=_content(found),
        model=found.model or None,
        provider=found.provider or None,
        input_tokens=usage.input_tokens if usage else None,
        output_tokens=usage.output_tokens if usage else None,
        thinking_tokens=usage.thinking_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        cache_write_tokens=usage.cache_write_tokens if usage else None,
        cost_usd=format_usd(usage.cost.nano_usd) if usage else None,
        cost_credits=found.cost_credits if usage else None,
        cost_cents_usd=micro_usd(usage.cost.nano_usd) if usage else None,
        usage_estimated=usage.estimated if usage else None,
        latency_ms=found.latency_ms if is_answer and not is_streaming else None,
        finish_reason=found.finish_reason or None,
        error=shapes.ErrorInfo(**error_fields(found.error)) if found.HasField("error") else None,
        created_at=time(found.create_time),
        run_id=found.run_id or None,
        cursor=str(Cursor(found.run_id, found.cursor_seq, WHOLE_EVENT)) if is_streaming else None,
    )


def _content(found: pb.Message) -> str | list[shapes.TextPart]:
    if len(found.parts) > 1:
        return [shapes.TextPart("text", part.text) for part in found.parts]
    return found.text or "".join(part.text for part in found.parts)


def trace(found: Trace) -> shapes.Trace:
    """A trace with the figures of its type."""
    kind = found.WhichOneof("payload") or "unknown"
    figures: dict[str, object] = {}
    match kind:
        case "thinking":
            figures = {"text": found.text}
        case "llm_request":
            figures = llm_request_fields(found.llm_request)
        case "error":
            figures = error_fields(found.error.error)
        case "retry":
            figures = retry_fields(found.retry)
        case "model_switch":
            figures = model_switch_fields(found.model_switch)
    return shapes.Trace(
        id=found.trace_id,
        run_id=found.run_id,
        message_id=MESSAGE_PREFIX + found.message_id if found.message_id else None,
        type=kind,
        step=found.step,
        started_at=time(found.start_time),
        ended_at=time(found.end_time) if found.HasField("end_time") else None,
        **figures,  # type: ignore[arg-type]
    )


def accepted(run: Run) -> shapes.AcceptedRun:
    """A run that nobody has to follow."""
    status = RUN_STATUSES.get(run.status, "running")
    user, reply = MESSAGE_PREFIX + run.user_message_id, MESSAGE_PREFIX + run.reply_message_id
    return shapes.AcceptedRun(run.id, user, reply, status)  # type: ignore[arg-type]


def cancelled(run: Run) -> shapes.CancelledRun:
    """A run after the wish to cancel it was stored."""
    return shapes.CancelledRun(run.id, CANCELS.get(run.status, "cancelling"))  # type: ignore[arg-type]


def time(stamp: Timestamp) -> str:
    """RFC 3339, UTC, always with microseconds, so that texts sort as times do."""
    whole = datetime.fromtimestamp(stamp.seconds, UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{stamp.nanos // 1000:06}Z"
