"""One model call: what the provider sends becomes events of the run.

Writes nothing itself: events go to the journal as pending, and the runner commits
how the call ended.
"""

import asyncio
import time
from contextlib import aclosing
from uuid import UUID

from kit.errors import ServiceError
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.conversation import limits
from services.conversation.domain import endings, events
from services.conversation.journal import Journal
from services.conversation.owned_run import OwnedRun
from services.conversation.providers.model import (
    Answered,
    Finished,
    ModelClient,
    ModelEvent,
    ModelRequest,
    ProviderFailure,
    Reasoning,
    Text,
    TokenUsage,
)
from threadloom.conversation.v1.message_pb2 import Usage
from threadloom.conversation.v1.run_event_pb2 import LlmRequestTrace, RunEvent, ThinkingTrace, TraceStarted


class ModelCall:
    """An attempt at the provider and what it has brought so far."""

    def __init__(self, journal: Journal, run: OwnedRun, call_id: UUID, request: ModelRequest) -> None:
        self._journal, self._run = journal, run
        self.call_id, self.request = call_id, request
        self.provider = ""
        self.is_answered = False
        self.is_told = False  # what it consumed is in the log by now
        self.text_chars = 0
        self.thinking_chars = 0
        self.finish_reason = ""
        self.failure: ProviderFailure | None = None
        self._reported: TokenUsage | None = None
        self._thinking = ""  # the open trace, if any
        self._llm_request = ""
        self._started = time.monotonic()

    @property
    def has_output(self) -> bool:
        """Whether anything of the answer was shown."""
        return bool(self.text_chars or self.thinking_chars)

    @property
    def usage(self) -> Usage:
        """What the provider reported, else an estimate; nothing for a call that was refused."""
        if self.is_told:
            return Usage()
        if self._reported is not None:
            told = self._reported
            return Usage(
                input_tokens=told.input_tokens,
                output_tokens=told.output_tokens,
                thinking_tokens=told.thinking_tokens,
                cached_tokens=told.cached_tokens,
            )
        if not self.is_answered:
            return Usage()
        return endings.estimated_usage(endings.input_chars(self.request.messages), self.text_chars, self.thinking_chars)

    @property
    def usage_source(self) -> str:
        """Where `usage` is from: provider, estimated, or none for a call that was refused."""
        if self._reported is not None:
            return "provider"
        return "estimated" if self.is_answered else "none"

    async def read(self, client: ModelClient, idle_seconds: float) -> None:
        """Reads the answer to its end, or until the task is cancelled; a failure is kept in `failure`."""
        try:
            async with asyncio.timeout(idle_seconds) as idle, aclosing(client.stream(self.request)) as stream:
                async for brought in stream:
                    idle.reschedule(None)  # whoever is slow from here on is not the provider
                    for event in brought:
                        self._take(event)
                    await self._journal.make_room(self._run.log)
                    if self._run.answer_bytes > limits.ANSWER_BYTES:
                        raise _too_long(self.provider)
                    idle.reschedule(asyncio.get_running_loop().time() + idle_seconds)
        except ProviderFailure as failure:
            self.failure = failure
        except TimeoutError:
            error = ServiceError(
                "AI_PROVIDER_TIMEOUT",
                f"The model provider was silent for {idle_seconds:g} seconds.",
                {"provider": self.provider} if self.provider else {},
            )
            self.failure = ProviderFailure(error, is_retryable=True)
        except Exception as error:
            # An adapter met what it was not written for: the run must still end.
            UNEXPECTED_ERRORS.labels("provider").inc()
            log.error("adapter failed", run_id=str(self._run.id), exc_info=error)
            self.failure = ProviderFailure(
                ServiceError("AI_PROVIDER_ERROR", "The model provider's answer could not be read."), False
            )

    def closing_events(self, step_reason: str) -> list[RunEvent]:
        """Closes what is open, with the call's figures when it answered."""
        found: list[RunEvent] = []
        if self._thinking:
            found.append(events.trace_ended(self._thinking))
            self._thinking = ""
        if self.is_answered and not self._llm_request and step_reason != endings.FAILED:
            found.append(self._open_llm_request())
        if self._llm_request:
            latency = time.monotonic() - self._started
            found += endings.end_llm_request(self._llm_request, self.request.model, self.usage, latency)
            self._llm_request = ""
        if self._run.has_open_step:
            found.append(endings.end_step(self._run.step, step_reason, self.usage))
            self._run.has_open_step = False
        return found

    def _take(self, event: ModelEvent) -> None:
        match event:
            case Text(text):
                self._take_text(text)
            case Reasoning(text):
                self._take_reasoning(text)
            case TokenUsage():
                self._reported = event
            case Finished(reason):
                self.finish_reason = reason
            case Answered():
                self._take_answered(event)

    def _take_answered(self, answered: Answered) -> None:
        self.is_answered, self.provider = True, answered.provider
        run = self._run
        if not run.has_reply:
            run.has_reply = True
            reply = events.reply_started(answered.model, answered.provider, run.attempt)
            # Both wait a moment for the first delta, so that they share its commit.
            self._journal.append(run.log, reply, limits.FIRST_DELTA_WAIT_SECONDS)
        if not run.has_open_step:
            run.has_open_step = True
            run.step += 1
            self._journal.append(run.log, events.step_started(run.step), limits.FIRST_DELTA_WAIT_SECONDS)

    def _take_text(self, text: str) -> None:
        if self._thinking:
            self._append(events.trace_ended(self._thinking))
            self._thinking = ""
        if not self._llm_request:
            self._append(self._open_llm_request())
        self.text_chars += len(text)
        self._run.answer_bytes += len(text.encode())
        for piece in events.pieces(text):
            self._append(events.text_delta(self._run.step, piece))

    def _take_reasoning(self, text: str) -> None:
        if not self._thinking:
            self._thinking = self._run.next_trace()
            started = TraceStarted(trace_id=self._thinking, step=self._run.step, thinking=ThinkingTrace())
            self._append(RunEvent(trace_started=started))
        self.thinking_chars += len(text)
        self._run.answer_bytes += len(text.encode())
        for piece in events.pieces(text):
            self._append(events.thinking_delta(self._thinking, piece))

    def _open_llm_request(self) -> RunEvent:
        self._llm_request = self._run.next_trace()
        request = LlmRequestTrace(model=self.request.model)
        return RunEvent(
            trace_started=TraceStarted(trace_id=self._llm_request, step=self._run.step, llm_request=request)
        )

    def _append(self, event: RunEvent) -> None:
        self._journal.append(self._run.log, event)


def _too_long(provider: str) -> ProviderFailure:
    """A model that never stops, or a provider that is not one."""
    message = f"The model's answer is longer than {limits.ANSWER_BYTES // 1024**2} MiB."
    return ProviderFailure(ServiceError("AI_PROVIDER_ERROR", message, {"provider": provider}), is_retryable=False)
