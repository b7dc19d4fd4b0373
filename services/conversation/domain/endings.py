"""The events that end a model call or a run, in the order that keeps a log balanced. Pure."""

from kit.errors import ServiceError, seconds, to_event_error
from services.conversation.domain import events
from services.conversation.domain.fold import RunState
from services.conversation.limits import CHARS_PER_TOKEN
from threadloom.conversation.v1.message_pb2 import Usage
from threadloom.conversation.v1.run_event_pb2 import (
    ErrorTrace,
    LlmRequestTrace,
    RetryTrace,
    RunEvent,
    RunFailed,
    RunFinished,
    StepFinished,
    TraceDelta,
    TraceStarted,
)

# Reasons to stop that explain an answer without text.
SPEECHLESS = frozenset(("length", "content_filter"))
CANCELLED = "cancelled"
FAILED = "error"
LOST_OWNER = "The process that made this answer was lost; it is made again."


def estimated_usage(input_text_chars: int, text_chars: int, thinking_chars: int) -> Usage:
    """What a call that reported nothing is taken to have consumed (about 4 characters a token)."""
    thinking = -(-thinking_chars // CHARS_PER_TOKEN)
    return Usage(
        input_tokens=-(-input_text_chars // CHARS_PER_TOKEN),
        output_tokens=-(-text_chars // CHARS_PER_TOKEN) + thinking,
        thinking_tokens=thinking,
        estimated=True,
    )


def end_llm_request(trace: str, model: str, usage: Usage, latency_seconds: float) -> list[RunEvent]:
    """The figures of a model call, then its trace's end (C24)."""
    figures = LlmRequestTrace(model=model, usage=usage, latency=seconds(latency_seconds))
    return [RunEvent(trace_delta=TraceDelta(trace_id=trace, llm_request=figures)), events.trace_ended(trace)]


def end_step(step: int, reason: str, usage: Usage) -> RunEvent:
    """A model call's end."""
    return events.step_finished(StepFinished(step=step, finish_reason=reason, usage=usage))


def finish(reason: str, model: str, latency_seconds: float) -> RunEvent:
    """The run's end with a reply; `complete` fills in what only the whole log knows."""
    return RunEvent(run_finished=RunFinished(finish_reason=reason, model=model, latency=seconds(latency_seconds)))


def complete(state: RunState, event: RunEvent) -> None:
    """Puts the run's totals into run_finished, and the whole text when something was superseded.

    `state` is what the log says just before the event (durability.md 12).
    """
    if event.WhichOneof("kind") != "run_finished":
        return
    finished = event.run_finished
    finished.model, finished.provider = state.model or finished.model, state.provider
    finished.usage.CopyFrom(state.usage)
    if state.is_superseded:
        finished.text = state.text


def fail(error: ServiceError, *, before_reply: bool, trace: str, step: int) -> list[RunEvent]:
    """The run's end without a whole reply, told by an error trace first."""
    told = to_event_error(error)
    failed = RunEvent(run_failed=RunFailed(error=told, before_reply=before_reply))
    started = TraceStarted(trace_id=trace, step=step, error=ErrorTrace(error=told))
    return [RunEvent(trace_started=started), events.trace_ended(trace), failed]


def supersede(state: RunState, usage: Usage) -> list[RunEvent]:
    """What a new owner writes before it makes a cut call again: nothing shown is taken away in silence."""
    found = _close_traces(state, usage)
    trace = events.trace_id(state.next_trace_number())
    shown = state.step_chars if state.has_open_step else 0
    retry = RetryTrace(attempt=state.retries + 2, reason=LOST_OWNER, withdrawn_chars=shown)
    found += events.retry_trace(trace, max(state.step, 1), retry)
    if state.has_open_step:
        found.append(events.step_superseded(state.step, shown, state.text_chars - shown, usage))
    return found


def close_open(state: RunState, usage: Usage, reason: str) -> list[RunEvent]:
    """Closes what a lost owner left open, when the call is not made again."""
    found = _close_traces(state, usage)
    if state.has_open_step:
        found.append(end_step(state.step, reason, usage))
    return found


def _close_traces(state: RunState, usage: Usage) -> list[RunEvent]:
    """Closes the traces a lost owner left open; a model call's shows what it is taken to have consumed."""
    found: list[RunEvent] = []
    for name in state.open_trace_ids():
        trace = state.traces[name]
        if trace.WhichOneof("payload") == "llm_request":
            nanos = state.last_time.ToNanoseconds() - trace.start_time.ToNanoseconds()
            found += end_llm_request(name, trace.llm_request.model, usage, max(0, nanos) / 1e9)
        else:
            found.append(events.trace_ended(name))
    return found


def input_chars(messages: list[dict[str, str]]) -> int:
    """Characters a request gives the model to read."""
    return sum(len(message["content"]) for message in messages)


def empty_answer(provider: str) -> ServiceError:
    """The model stopped without a word: an outcome of its own, never a silent success."""
    return ServiceError("AI_PROVIDER_ERROR", "The model finished without an answer.", {"provider": provider})


def context_too_large() -> ServiceError:
    """The system text and the newest message alone pass the window: nothing is left to drop."""
    return ServiceError(
        "CONTEXT_TOO_LARGE", "The system prompt and this message together are longer than the model can read."
    )


def not_configured(provider: str) -> ServiceError:
    """Nobody to ask."""
    return ServiceError(
        "AI_PROVIDER_NOT_CONFIGURED",
        f"No key of the model provider is set. Set the project's own with make provider-key PROVIDER={provider},"
        " or OPENAI_API_KEY for all projects.",
    )


def key_unreadable(provider: str) -> ServiceError:
    """The project has a key that does not open any more. Nobody else's is used in its place."""
    return ServiceError(
        "AI_PROVIDER_NOT_CONFIGURED",
        "The project's key of the model provider can no longer be read. An administrator must set it again:"
        f" make provider-key PROVIDER={provider}.",
    )
