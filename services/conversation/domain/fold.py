"""A run's state as the fold of its log. Pure: the owner keeps it while it runs, a new owner rebuilds it."""

from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from services.conversation.domain.events import EventOrder, kind_of
from services.conversation.domain.usage import add_usage
from threadloom.common.v1.error_pb2 import Error
from threadloom.conversation.v1.message_pb2 import Usage
from threadloom.conversation.v1.run_event_pb2 import ModelSwitchTrace, RunEvent
from threadloom.conversation.v1.run_pb2 import Trace


@dataclass
class RunState:
    """What the log says so far. `step` is the newest step; `texts` the reply without superseded steps."""

    order: EventOrder = field(default_factory=EventOrder)
    texts: list[str] = field(default_factory=list)
    text_chars: int = 0
    step_chars: int = 0  # reply text of the open step
    step: int = 0
    model: str = ""
    provider: str = ""
    finish_reason: str = ""
    usage: Usage = field(default_factory=Usage)
    cost_credits: int = 0  # known at the end
    latency_ms: int = 0  # as the end told it
    is_superseded: bool = False
    is_broken: bool = False  # a stored event could not be applied: only an end may follow
    retries: int = 0  # attempts made again, for whatever reason
    switches: int = 0  # of them, those with the next fallback model
    switched_to: str = ""  # that model
    failed_before_reply: bool = False
    error: Error | None = None
    traces: dict[str, Trace] = field(default_factory=dict)
    trace_texts: dict[str, list[str]] = field(default_factory=dict)
    log_bytes: int = 0
    last_time: Timestamp = field(default_factory=Timestamp)  # of the newest event, by its owner's clock

    @property
    def last_seq(self) -> int:
        """The seq of the newest event."""
        return self.order.seq

    @property
    def has_reply(self) -> bool:
        """Whether the provider answered."""
        return self.order.has_reply

    @property
    def has_open_step(self) -> bool:
        """Whether a model call has begun and neither ended nor been superseded."""
        return self.order.open_step != 0

    @property
    def is_over(self) -> bool:
        """Whether a terminal event was seen."""
        return self.order.is_over

    @property
    def text(self) -> str:
        """The reply so far."""
        if len(self.texts) > 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""

    @property
    def step_text(self) -> str:
        """Reply text of the open step."""
        return self.text[self.text_chars - self.step_chars :]

    @property
    def step_thinking(self) -> str:
        """Reasoning of the open step."""
        texts = [self.trace_texts.get(name, ()) for name, trace in self.traces.items() if trace.step == self.step]
        return "".join(piece for pieces in texts for piece in pieces)

    def next_trace_number(self) -> int:
        """The number of the next trace to open."""
        return len(self.order.seen_traces) + 1

    def open_trace_ids(self) -> list[str]:
        """Traces not yet closed, in the order they were opened."""
        return [name for name in self.traces if name in self.order.open_traces]

    def apply(self, event: RunEvent) -> None:
        """Takes the next event in; raises UnbalancedLog when it may not stand there."""
        self.order.check(event)
        self.log_bytes += event.ByteSize()
        self.last_time = event.time
        apply = getattr(self, f"_apply_{kind_of(event)}", None)
        if apply is not None:
            apply(event)

    def _apply_reply_started(self, event: RunEvent) -> None:
        self.model, self.provider = event.reply_started.model, event.reply_started.provider

    def _apply_step_started(self, event: RunEvent) -> None:
        self.step = event.step_started.step
        self.step_chars = 0

    def _apply_step_finished(self, event: RunEvent) -> None:
        self.finish_reason = event.step_finished.finish_reason
        self.usage = add_usage(self.usage, event.step_finished.usage)

    def _apply_step_superseded(self, event: RunEvent) -> None:
        self.texts = [self.text[: event.step_superseded.kept_chars]]
        self.text_chars = len(self.texts[0])
        self.step_chars = 0
        self.is_superseded = True
        self.usage = add_usage(self.usage, event.step_superseded.usage)

    def _apply_text_delta(self, event: RunEvent) -> None:
        text = event.text_delta.text
        self.texts.append(text)
        self.text_chars += len(text)
        self.step_chars += len(text)

    def _apply_trace_started(self, event: RunEvent) -> None:
        started = event.trace_started
        trace = Trace(trace_id=started.trace_id, step=started.step, start_time=event.time)
        payload = started.WhichOneof("payload")
        if payload is not None:
            getattr(trace, payload).CopyFrom(getattr(started, payload))
            getattr(trace, payload).SetInParent()
        if payload == "retry":
            self.retries += 1
            self.usage = add_usage(self.usage, started.retry.usage)
        elif payload == "model_switch":
            self._switch(started.model_switch)
        self.traces[started.trace_id] = trace

    def _switch(self, switch: ModelSwitchTrace) -> None:
        self.retries += 1
        self.switches += 1
        self.switched_to = switch.to_model
        self.usage = add_usage(self.usage, switch.usage)
        if self.model:
            self.model = switch.to_model  # the first one answered, and then failed without a word

    def _apply_trace_delta(self, event: RunEvent) -> None:
        delta = event.trace_delta
        trace = self.traces[delta.trace_id]
        if delta.WhichOneof("payload") == "text":
            self.trace_texts.setdefault(delta.trace_id, []).append(delta.text)
        elif delta.WhichOneof("payload") == "llm_request":
            trace.llm_request.MergeFrom(delta.llm_request)

    def _apply_trace_ended(self, event: RunEvent) -> None:
        self.traces[event.trace_ended.trace_id].end_time.CopyFrom(event.time)

    def _apply_run_finished(self, event: RunEvent) -> None:
        self.finish_reason = event.run_finished.finish_reason
        self.usage, self.cost_credits = event.run_finished.usage, event.run_finished.cost_credits
        self.latency_ms = event.run_finished.latency.ToMilliseconds()

    def _apply_run_failed(self, event: RunEvent) -> None:
        self.error = event.run_failed.error
        if event.run_failed.HasField("usage"):
            self.usage, self.cost_credits = event.run_failed.usage, event.run_failed.cost_credits
        self.failed_before_reply = event.run_failed.before_reply

    def recorded_traces(self) -> list[Trace]:
        """Every trace with its whole text, in the order they were opened."""
        found = []
        for name, trace in self.traces.items():
            whole = Trace()
            whole.CopyFrom(trace)
            whole.text = "".join(self.trace_texts.get(name, ()))
            found.append(whole)
        return found
