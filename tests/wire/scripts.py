"""Runs to encode: those written down under scripts/, and made-up ones for properties."""

from pathlib import Path

from google.protobuf import json_format
from hypothesis import strategies as st

from kit.money import NANO_MAX
from services.gateway.wire.conversations import ConversationsEncoder
from services.gateway.wire.frames import Frame
from threadloom.conversation.v1.run_event_pb2 import RunEvent

FOLDER = Path(__file__).parent
RUN_ID = "01900000-0000-7000-8000-000000000001"
MESSAGE_ID = "01900000-0000-7000-8000-000000000002"

NAMES = sorted(path.stem for path in (FOLDER / "scripts").glob("*.jsonl"))


def script(name: str) -> list[RunEvent]:
    """The events of a written run. A kind this code does not know becomes an event without a kind."""
    lines = (FOLDER / "scripts" / f"{name}.jsonl").read_text().split("\n")
    return [json_format.Parse(line, RunEvent(), ignore_unknown_fields=True) for line in lines if line]


def encoder() -> ConversationsEncoder:
    """A fresh encoder of the run."""
    return ConversationsEncoder(RUN_ID, MESSAGE_ID)


def frames_of(events: list[RunEvent]) -> list[Frame]:
    """All frames of a run."""
    found = encoder()
    return [frame for event in events for frame in found.encode(event)]


def _trace_payload(kind: str) -> RunEvent:
    event = RunEvent()
    started = event.trace_started
    match kind:
        case "thinking":
            started.thinking.SetInParent()
        case "llm_request":
            started.llm_request.SetInParent()
        case "error":
            started.error.error.code = "AI_PROVIDER_ERROR"
            started.error.error.message = "It broke."
        case "retry":
            started.retry.attempt = 2
    return event


@st.composite
def runs(draw: st.DrawFn) -> list[RunEvent]:
    """A valid run: traces opened and closed once, text between them, one terminal event."""
    events = [RunEvent(), RunEvent(), RunEvent()]
    events[0].run_started.SetInParent()
    events[1].step_started.step = 1
    events[2].reply_started.attempt = 1
    for number in range(1, draw(st.integers(0, 5)) + 1):
        kind = draw(st.sampled_from(("thinking", "llm_request", "error", "retry", "text", "superseded", "unknown")))
        if kind == "text":
            event = RunEvent()
            event.text_delta.text = draw(st.text(min_size=1, max_size=20))
            events.append(event)
        elif kind == "superseded":
            event = RunEvent()
            event.step_superseded.kept_chars = draw(st.integers(0, 9))
            events.append(event)
        elif kind == "unknown":
            events.append(RunEvent())
        else:
            events += _trace(draw, f"evt_{number:03}", kind)
    events.append(_end(draw))
    for seq, event in enumerate(events, 1):
        event.seq = seq
    return events


def _trace(draw: st.DrawFn, trace_id: str, kind: str) -> list[RunEvent]:
    opened, closed = _trace_payload(kind), RunEvent()
    opened.trace_started.trace_id = closed.trace_ended.trace_id = trace_id
    grown = []
    for _ in range(draw(st.integers(0, 2))):
        event = RunEvent()
        event.trace_delta.trace_id = trace_id
        if kind == "llm_request":
            event.trace_delta.llm_request.usage.input_tokens = draw(st.integers(0, 10**12))
            event.trace_delta.llm_request.usage.cost.nano_usd = draw(st.integers(0, NANO_MAX))
        else:
            event.trace_delta.text = draw(st.text(min_size=1, max_size=10))
        grown.append(event)
    return [opened, *grown, closed]


def _end(draw: st.DrawFn) -> RunEvent:
    event = RunEvent()
    if draw(st.booleans()):
        event.run_failed.error.code = draw(st.sampled_from(("INTERNAL", "AI_RATE_LIMITED")))
    else:
        event.run_finished.finish_reason = draw(st.sampled_from(("stop", "cancelled")))
        if draw(st.booleans()):
            event.run_finished.text = draw(st.text(max_size=20))
    return event
