"""The events that end a model call or a run, in the order that keeps a log balanced. Pure."""

from kit.errors import ServiceError, seconds, to_event_error, unavailable
from kit.money import credits
from services.conversation.domain import events
from services.conversation.domain.fold import RunState
from services.conversation.domain.usage import add_usage, is_nothing
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
LENGTH = "length"
SPEECHLESS = frozenset((LENGTH, "content_filter"))
CANCELLED = "cancelled"
FAILED = "error"
LOST_OWNER = "The process that made this answer was lost; it is made again."


def end_llm_request(trace: str, model: str, usage: Usage, latency_seconds: float) -> list[RunEvent]:
    """The figures of a model call, then its trace's end (C24)."""
    figures = LlmRequestTrace(model=model, usage=usage, latency=seconds(latency_seconds))
    return [RunEvent(trace_delta=TraceDelta(trace_id=trace, llm_request=figures)), events.trace_ended(trace)]


def end_step(step: int, reason: str, usage: Usage) -> RunEvent:
    """A model call's end."""
    return events.step_finished(StepFinished(step=step, finish_reason=reason, usage=usage))


def finish(reason: str, model: str, latency_seconds: float, untold: Usage | None = None) -> RunEvent:
    """The run's end with a reply; `complete` fills in what only the whole log knows.

    `untold` is what was consumed and no event says: a call that was cut before its answer began.
    """
    finished = RunFinished(finish_reason=reason, model=model, latency=seconds(latency_seconds), usage=untold)
    return RunEvent(run_finished=finished)


def complete(state: RunState, event: RunEvent, credits_per_usd: int) -> None:
    """Puts the run's totals into its last event, and the whole text when something was superseded.

    `state` is what the log says just before the event (durability.md 12).
    """
    kind = event.WhichOneof("kind")
    if kind == "run_finished":
        finished = event.run_finished
        finished.model, finished.provider = state.model or finished.model, state.provider
        _total(state, finished, credits_per_usd)
        if state.is_superseded:
            finished.text = state.text
    elif kind == "run_failed":
        _total(state, event.run_failed, credits_per_usd)


def _total(state: RunState, end: RunFinished | RunFailed, credits_per_usd: int) -> None:
    end.usage.CopyFrom(add_usage(state.usage, end.usage))
    end.cost_credits = credits(end.usage.cost.nano_usd, credits_per_usd)


def fail(
    error: ServiceError, *, before_reply: bool, trace: str, step: int, untold: Usage | None = None
) -> list[RunEvent]:
    """The run's end without a whole reply, told by an error trace first. `untold`: see `finish`."""
    told = to_event_error(error)
    failed = RunEvent(run_failed=RunFailed(error=told, before_reply=before_reply, usage=untold))
    started = TraceStarted(trace_id=trace, step=step, error=ErrorTrace(error=told))
    return [RunEvent(trace_started=started), events.trace_ended(trace), failed]


def supersede(state: RunState, usage: Usage) -> list[RunEvent]:
    """What a new owner writes before it makes a cut call again: nothing shown is taken away in silence."""
    found = _close_traces(state, usage)
    trace = events.trace_id(state.next_trace_number())
    shown = state.step_chars if state.has_open_step else 0
    retry = RetryTrace(attempt=state.retries + 2, reason=LOST_OWNER, withdrawn_chars=shown)
    if not state.has_open_step and not is_nothing(usage):
        retry.usage.CopyFrom(usage)  # the step that would tell it had not begun
    found += events.retry_trace(trace, max(state.step, 1), retry)
    if state.has_open_step:
        found.append(events.step_superseded(state.step, shown, state.text_chars - shown, usage))
    return found


def close_open(state: RunState, usage: Usage, reason: str) -> tuple[list[RunEvent], Usage]:
    """Closes what a lost owner left open, when the call is not made again; and the usage no event of these tells."""
    found = _close_traces(state, usage)
    if not state.has_open_step:
        return found, usage
    return [*found, end_step(state.step, reason, usage)], Usage()


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


def billing_away() -> ServiceError:
    """No call is made without a hold."""
    return unavailable("Billing does not answer, and no model is called without it. Try again in a moment.")
