"""The conversations dialect: named events.

    trace_start {id, type}          opens a card
    trace_delta {id, ...}           its text or its figures
    trace_end   {id}                closes it
    delta       {text}              text of the reply
    withdraw    {keep}              only the first `keep` characters of the reply remain
    done        {message_id, ...}   terminal
    error       {code, message, …}  terminal

A character is a Unicode code point.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from google.protobuf.duration_pb2 import Duration

from kit.errors import ServiceError, to_event_error
from kit.money import format_usd, micro_usd
from services.gateway.wire.frames import Frame
from threadloom.common.v1.error_pb2 import Error
from threadloom.conversation.v1.message_pb2 import Usage
from threadloom.conversation.v1.run_event_pb2 import (
    LlmRequestTrace,
    ModelSwitchTrace,
    RetryTrace,
    RunEvent,
    TraceStarted,
)

MESSAGE_PREFIX = "msg_"

# This dialect's own word for a reason; every other reason keeps its name.
_CODES = {"AI_RATE_LIMITED": "rate_limit"}

_encode = msgspec.json.Encoder().encode

# Line breaks to Unicode, not to SSE. Client libraries that split lines by Unicode's rules (httpx does)
# would cut a frame in two, so they go out as JSON escapes.
_LINE_BREAKS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))

Fields = dict[str, Any]
Shape = tuple[bytes, Fields]


class ConversationsEncoder:
    """Encodes one run. `message_id` is the bare id of the message the run writes."""

    def __init__(self, run_id: str, message_id: str) -> None:
        self._run_id = run_id
        self._message_id = message_id
        self._prefix = run_id.encode() + b":"

    def encode(self, event: RunEvent) -> tuple[Frame, ...]:
        """The frames of one event."""
        kind = event.WhichOneof("kind")
        if kind == "text_delta":  # first and without a dict: nearly every event is one
            data = b'{"text":%b}' % _json(event.text_delta.text)
            return (Frame(b"%b%d.1" % (self._prefix, event.seq), b"delta", data),)
        if kind is None or kind not in _SHAPES:
            return ()
        shapes = _SHAPES[kind](self, event)
        return tuple(
            Frame(b"%b%d.%d" % (self._prefix, event.seq, index), name, _json(fields))
            for index, (name, fields) in enumerate(shapes, 1)
        )

    def refused(self, error: ServiceError) -> Frame:
        """The terminal frame for a run that can no longer be followed; it has no id, for it is not of the log."""
        return Frame(b"", b"error", _json(error_fields(to_event_error(error))))

    def _trace_started(self, event: RunEvent) -> Iterable[Shape]:
        started = event.trace_started
        yield b"trace_start", {"id": started.trace_id, "type": started.WhichOneof("payload") or "unknown"}
        figures = trace_fields(started)
        if figures:
            yield b"trace_delta", {"id": started.trace_id, **figures}

    def _trace_delta(self, event: RunEvent) -> Iterable[Shape]:
        delta = event.trace_delta
        kind = delta.WhichOneof("payload")
        if kind == "text":
            yield b"trace_delta", {"id": delta.trace_id, "text": delta.text}
        elif kind == "llm_request":
            yield b"trace_delta", {"id": delta.trace_id, **llm_request_fields(delta.llm_request)}

    def _trace_ended(self, event: RunEvent) -> Iterable[Shape]:
        yield b"trace_end", {"id": event.trace_ended.trace_id}

    def _step_superseded(self, event: RunEvent) -> Iterable[Shape]:
        yield b"withdraw", {"keep": event.step_superseded.kept_chars}

    def _run_finished(self, event: RunEvent) -> Iterable[Shape]:
        finished = event.run_finished
        fields: Fields = {
            "run_id": self._run_id,
            "message_id": MESSAGE_PREFIX + self._message_id,
            "model": finished.model,
            **usage_fields(finished.usage),
            **cost_fields(finished.usage, finished.cost_credits),
            "latency_ms": milliseconds(finished.latency),
            "finish_reason": finished.finish_reason,
        }
        if finished.HasField("text"):
            fields["text"] = finished.text
        yield b"done", fields

    def _run_failed(self, event: RunEvent) -> Iterable[Shape]:
        yield b"error", error_fields(event.run_failed.error)


_SHAPES: dict[str, Callable[[ConversationsEncoder, RunEvent], Iterable[Shape]]] = {
    "trace_started": ConversationsEncoder._trace_started,
    "trace_delta": ConversationsEncoder._trace_delta,
    "trace_ended": ConversationsEncoder._trace_ended,
    "step_superseded": ConversationsEncoder._step_superseded,
    "run_finished": ConversationsEncoder._run_finished,
    "run_failed": ConversationsEncoder._run_failed,
}


def _json(value: Any) -> bytes:
    """JSON on one line, for every idea of a line."""
    data = _encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


def code_of(reason: str) -> str:
    """The dialect's code for a reason."""
    return _CODES.get(reason, reason)


def error_fields(error: Error) -> Fields:
    """The error object as clients see it; `retry_after` in seconds."""
    fields: Fields = {"code": code_of(error.code), "message": error.message}
    if error.HasField("retry_after"):
        fields["retry_after"] = seconds(error.retry_after.ToNanoseconds() / 1e9)
    if error.provider:
        fields["provider"] = error.provider
    return fields


def trace_fields(started: TraceStarted) -> Fields:
    """The figures a trace is opened with; empty when it has none yet."""
    match started.WhichOneof("payload"):
        case "error":
            return error_fields(started.error.error)
        case "retry":
            return retry_fields(started.retry)
        case "model_switch":
            return model_switch_fields(started.model_switch)
        case "llm_request" if started.llm_request.model:
            return {"model": started.llm_request.model}
        case _:
            return {}


def retry_fields(retry: RetryTrace) -> Fields:
    """Which attempt follows, why, and after how long; what was withdrawn, if anything was."""
    fields: Fields = {"attempt": retry.attempt, "reason": retry.reason, "delay_ms": milliseconds(retry.delay)}
    if retry.withdrawn_chars:
        fields["withdrawn_chars"] = retry.withdrawn_chars
    if retry.usage.cost.nano_usd:
        fields["cost_usd"] = format_usd(retry.usage.cost.nano_usd)  # of the attempt that failed
    return fields


def model_switch_fields(switch: ModelSwitchTrace) -> Fields:
    """From which model to which, and why (R37)."""
    fields: Fields = {"from_model": switch.from_model, "to_model": switch.to_model, "reason": switch.reason}
    if switch.usage.cost.nano_usd:
        fields["cost_usd"] = format_usd(switch.usage.cost.nano_usd)  # of the attempt that failed
    return fields


def llm_request_fields(call: LlmRequestTrace) -> Fields:
    """The figures of a model call that ended: of its cost the exact text alone, which may be added up."""
    return {"model": call.model, **usage_fields(call.usage), "latency_ms": milliseconds(call.latency)}


def usage_fields(usage: Usage) -> Fields:
    """Tokens and what they cost; `usage_estimated` only when some figure is."""
    fields: Fields = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "thinking_tokens": usage.thinking_tokens,
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "cost_usd": format_usd(usage.cost.nano_usd),
    }
    if usage.estimated:
        fields["usage_estimated"] = True
    return fields


def cost_fields(usage: Usage, cost_credits: int) -> Fields:
    """The rounded forms of a run's cost: credits at the project's rate, and 10⁻⁶ USD under R47's name (GAP1)."""
    return {"cost_credits": cost_credits, "cost_cents_usd": micro_usd(usage.cost.nano_usd)}


def milliseconds(span: Duration) -> int:
    """A span in whole milliseconds, cut."""
    return span.seconds * 1000 + span.nanos // 1_000_000


def seconds(value: float) -> int | float:
    """Seconds as JSON has them: whole where they are whole, else to the millisecond."""
    return int(value) if value == int(value) else round(value, 3)
