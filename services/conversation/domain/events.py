"""Building run events, numbering them, and the rules a log keeps.

An event says what happened (run_event.proto); the same message is stored, streamed
and encoded. Balance is the producer's duty: `EventOrder` states the rules and the
fold asserts them, so encoders can stay dumb.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from services.conversation.limits import EVENT_TEXT_CHARS
from threadloom.conversation.v1.message_pb2 import Usage
from threadloom.conversation.v1.run_event_pb2 import (
    ModelSwitchTrace,
    ReplyStarted,
    RetryTrace,
    RunEvent,
    RunStarted,
    StepFinished,
    StepStarted,
    StepSuperseded,
    TraceDelta,
    TraceEnded,
    TraceStarted,
)

KIND_NUMBERS: dict[str, int] = {field.name: field.number for field in RunEvent.DESCRIPTOR.oneofs_by_name["kind"].fields}
TERMINAL_KINDS = ("run_finished", "run_failed")
TERMINAL_NUMBERS = tuple(KIND_NUMBERS[name] for name in TERMINAL_KINDS)


def kind_of(event: RunEvent) -> str:
    """The name of what happened; empty for a kind this build does not know."""
    return event.WhichOneof("kind") or ""


def is_terminal(event: RunEvent) -> bool:
    """Whether nothing can follow."""
    return kind_of(event) in TERMINAL_KINDS


def run_started(user_message_id: str, model: str) -> RunEvent:
    """Seq 1 of every run."""
    return RunEvent(run_started=RunStarted(user_message_id=user_message_id, model=model))


def reply_started(model: str, provider: str, attempt: int) -> RunEvent:
    """The provider answered."""
    return RunEvent(reply_started=ReplyStarted(model=model, provider=provider, attempt=attempt))


def step_started(step: int) -> RunEvent:
    """A model call began."""
    return RunEvent(step_started=StepStarted(step=step))


def step_finished(finished: StepFinished) -> RunEvent:
    """A model call ended."""
    return RunEvent(step_finished=finished)


def step_superseded(step: int, shown_chars: int, kept_chars: int, usage: Usage) -> RunEvent:
    """A cut model call is made again; `kept_chars` of the reply remain, `usage` is estimated."""
    return RunEvent(
        step_superseded=StepSuperseded(step=step, shown_chars=shown_chars, kept_chars=kept_chars, usage=usage)
    )


def text_delta(step: int, text: str) -> RunEvent:
    """Text was added."""
    event = RunEvent()
    event.text_delta.text = text
    event.text_delta.step = step
    return event


def trace_id(number: int) -> str:
    """The id of a run's n-th trace, from 1."""
    return f"evt_{number:03d}"


def thinking_delta(trace: str, text: str) -> RunEvent:
    """Reasoning was added."""
    return RunEvent(trace_delta=TraceDelta(trace_id=trace, text=text))


def trace_ended(trace: str) -> RunEvent:
    """A trace was closed."""
    return RunEvent(trace_ended=TraceEnded(trace_id=trace))


def retry_trace(trace: str, step: int, retry: RetryTrace) -> list[RunEvent]:
    """A retry, opened and closed at once."""
    return [RunEvent(trace_started=TraceStarted(trace_id=trace, step=step, retry=retry)), trace_ended(trace)]


def model_switch_trace(trace: str, step: int, switch: ModelSwitchTrace) -> list[RunEvent]:
    """A change of model, opened and closed at once."""
    return [RunEvent(trace_started=TraceStarted(trace_id=trace, step=step, model_switch=switch)), trace_ended(trace)]


def pieces(text: str) -> Iterable[str]:
    """The text, cut so that each piece fits an event."""
    return (text[at : at + EVENT_TEXT_CHARS] for at in range(0, len(text), EVENT_TEXT_CHARS))


def number(events: Iterable[RunEvent], first_seq: int) -> None:
    """Gives each event its place and the time of its commit."""
    now = Timestamp()
    now.FromDatetime(datetime.now(UTC))
    for seq, event in enumerate(events, first_seq):
        event.seq = seq
        event.time.CopyFrom(now)


class UnbalancedLog(ValueError):
    """An event that may not stand where it stands."""


class EventOrder:
    """The rules of a log, checked event by event.

    run_started first; reply_started at most once and before anything of the reply;
    a step, once started, ends by finishing or being superseded before the next; a
    trace delta only while its trace is open; nothing after a terminal event, and
    every trace closed by then.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.open_traces: set[str] = set()
        self.seen_traces: set[str] = set()
        self.open_step = 0
        self.has_reply = False
        self.is_over = False

    def check(self, event: RunEvent) -> None:
        """Raises UnbalancedLog when the event breaks a rule."""
        kind = kind_of(event)
        self._require(event.seq == self.seq + 1, event, f"seq {event.seq} after {self.seq}")
        self._require(not self.is_over, event, "after the end")
        self._require((event.seq == 1) == (kind == "run_started"), event, "run_started is seq 1 and only there")
        self.seq = event.seq
        rule = getattr(self, f"_check_{kind}", None)
        if rule is not None:
            rule(event)

    def give_up(self, seq: int) -> None:
        """Makes room for an end after an event that broke the rules."""
        self.seq, self.open_step, self.has_reply = seq, 0, True
        self.open_traces.clear()

    def _check_reply_started(self, event: RunEvent) -> None:
        self._require(not self.has_reply, event, "a second reply_started")
        self.has_reply = True

    def _check_step_started(self, event: RunEvent) -> None:
        self._require(self.has_reply and not self.open_step, event, "no reply yet, or a step is open")
        self.open_step = event.step_started.step

    def _check_step_finished(self, event: RunEvent) -> None:
        self._require(self.open_step == event.step_finished.step, event, "that step is not open")
        self.open_step = 0

    def _check_step_superseded(self, event: RunEvent) -> None:
        self._require(self.open_step == event.step_superseded.step, event, "that step is not open")
        self.open_step = 0

    def _check_text_delta(self, event: RunEvent) -> None:
        self._require(self.open_step == event.text_delta.step, event, "that step is not open")

    def _check_trace_started(self, event: RunEvent) -> None:
        self._require(event.trace_started.trace_id not in self.seen_traces, event, "opened twice")
        self.seen_traces.add(event.trace_started.trace_id)
        self.open_traces.add(event.trace_started.trace_id)

    def _check_trace_delta(self, event: RunEvent) -> None:
        self._require(event.trace_delta.trace_id in self.open_traces, event, "that trace is not open")

    def _check_trace_ended(self, event: RunEvent) -> None:
        self._require(event.trace_ended.trace_id in self.open_traces, event, "that trace is not open")
        self.open_traces.discard(event.trace_ended.trace_id)

    def _check_run_finished(self, event: RunEvent) -> None:
        self._require(not self.open_traces, event, f"open traces: {sorted(self.open_traces)}")
        self._require(not self.open_step, event, f"open step: {self.open_step}")
        self.is_over = True

    def _check_run_failed(self, event: RunEvent) -> None:
        self._check_run_finished(event)

    def _require(self, holds: bool, event: RunEvent, why: str) -> None:
        if not holds:
            raise UnbalancedLog(f"{kind_of(event) or 'unknown kind'} at seq {event.seq}: {why}")
