"""Logs of runs for properties: made-up balanced ones, and events in short."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from services.conversation.domain import endings, events
from services.conversation.domain.fold import RunState
from threadloom.conversation.v1.message_pb2 import Usage
from threadloom.conversation.v1.run_event_pb2 import (
    LlmRequestTrace,
    RetryTrace,
    RunEvent,
    ThinkingTrace,
    TraceStarted,
)

TEXTS = st.text(st.sampled_from("ab \n\u00e9\u20ac\u5b57\U0001f600\u200d"), min_size=1, max_size=12)


def numbered(log: list[RunEvent], first_seq: int = 1) -> list[RunEvent]:
    """The events with their places."""
    for seq, event in enumerate(log, first_seq):
        event.seq = seq
        event.time.FromNanoseconds(seq * 1_000)
    return log


def fold(log: list[RunEvent]) -> RunState:
    """The state the log leads to."""
    state = RunState()
    for event in log:
        state.apply(event)
    return state


def thinking(trace: str, step: int) -> RunEvent:
    """A thinking trace is opened."""
    return RunEvent(trace_started=TraceStarted(trace_id=trace, step=step, thinking=ThinkingTrace()))


def llm_request(trace: str, step: int) -> RunEvent:
    """The trace of a model call is opened."""
    return RunEvent(trace_started=TraceStarted(trace_id=trace, step=step, llm_request=LlmRequestTrace(model="m")))


def usage(tokens: int) -> Usage:
    """So many tokens written."""
    return Usage(input_tokens=1, output_tokens=tokens)


@dataclass
class Writer:
    """Writes a log the way an owner does, and remembers by itself which text each step has shown."""

    log: list[RunEvent] = field(default_factory=list)
    traces: int = 0
    step: int = 0
    shown: dict[int, str] = field(default_factory=dict)

    def trace(self) -> str:
        """The id of the next trace."""
        self.traces += 1
        return events.trace_id(self.traces)

    def retry(self) -> None:
        """An attempt is made again."""
        self.log += events.retry_trace(self.trace(), max(self.step, 1), RetryTrace(attempt=2))

    def write_step(self, draw: st.DrawFn) -> None:
        """One model call from its answer to its end."""
        self.step += 1
        self.log.append(events.step_started(self.step))
        self.shown[self.step] = ""
        for _ in range(draw(st.integers(0, 2))):
            trace = self.trace()
            self.log.append(thinking(trace, self.step))
            self.log += [events.thinking_delta(trace, text) for text in draw(st.lists(TEXTS, max_size=2))]
            self.log.append(events.trace_ended(trace))
        self.write_text(draw)
        self.log.append(endings.end_step(self.step, "stop", usage(self.step)))

    def write_text(self, draw: st.DrawFn) -> None:
        """The text of a model call inside its trace."""
        trace = self.trace()
        self.log.append(llm_request(trace, self.step))
        for text in draw(st.lists(TEXTS, max_size=4)):
            self.log.append(events.text_delta(self.step, text))
            self.shown[self.step] += text
        self.log += endings.end_llm_request(trace, "m", usage(self.step), 0.5)


@st.composite
def finished_runs(draw: st.DrawFn) -> list[RunEvent]:
    """A balanced log from run_started to run_finished."""
    writer = Writer([events.run_started("u", "m")])
    for _ in range(draw(st.integers(0, 2))):
        writer.retry()
    writer.log.append(events.reply_started("m", "p", 1))
    for _ in range(draw(st.integers(1, 3))):
        writer.write_step(draw)
    writer.log.append(endings.finish("stop", "m", 1.0))
    return numbered(writer.log)


@st.composite
def continued_runs(draw: st.DrawFn) -> tuple[list[RunEvent], str]:
    """A log cut up to three times and each time made again by a new owner; and the text that must be left.

    The text is found without the fold: each step's text, without the steps that were open at a cut.
    """
    log = draw(finished_runs())
    for _ in range(draw(st.integers(1, 3))):
        log = log[: draw(st.integers(1, len(log) - 1))]
        state = fold(log)
        writer = Writer(log + endings.supersede(state, Usage(output_tokens=1, estimated=True)))
        writer.traces, writer.step = state.next_trace_number(), state.step
        if not state.has_reply:
            writer.log.append(events.reply_started("m", "p", 2))
        writer.write_step(draw)
        writer.log.append(endings.finish("stop", "m", 2.0))
        log = numbered(writer.log)
    return log, text_left(log)


def text_left(log: list[RunEvent]) -> str:
    """The text of every step but the superseded ones."""
    gone = {event.step_superseded.step for event in log if event.HasField("step_superseded")}
    deltas = [event.text_delta for event in log if event.HasField("text_delta")]
    return "".join(delta.text for delta in deltas if delta.step not in gone)
