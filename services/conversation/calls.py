"""One model call: what the provider sends becomes events of the run.

Writes nothing itself: events go to the journal as pending, and the runner commits
how the call ended.
"""

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from enum import StrEnum
from uuid import UUID

from kit.errors import ServiceError
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.conversation import limits
from services.conversation.domain import endings, events, tokens, usage
from services.conversation.domain.meter import OutputMeter
from services.conversation.domain.usage import Hold
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
from services.conversation.silence import Silence
from threadloom.conversation.v1.message_pb2 import Usage
from threadloom.conversation.v1.run_event_pb2 import LlmRequestTrace, RunEvent, ThinkingTrace, TraceStarted


class Stage(StrEnum):
    """How far a call's money has come."""

    NONE = "none"  # billing was not asked
    ASKED = "asked"  # a hold may exist
    HELD = "held"  # a hold exists, the request may not be made yet
    SENT = "sent"  # recorded as about to be made: it may have reached the provider


class ModelCall:
    """An attempt at the provider and what it has brought so far."""

    def __init__(
        self, journal: Journal, run: OwnedRun, call_id: UUID, request: ModelRequest, input_tokens: int
    ) -> None:
        self._journal, self._run = journal, run
        self.call_id, self.request = call_id, request
        self.input_tokens = input_tokens  # as counted here
        self._tokenizer = tokens.tokenizer_of(request.model)
        self.stage = Stage.NONE
        self.hold: Hold | None = None
        self.provider = ""
        self.is_answered = False
        self.usage = Usage()  # once concluded
        self.is_told = False  # what it consumed is in the log by now
        self.finish_reason = ""
        self.failure: ProviderFailure | None = None
        self._meter: OutputMeter | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._reported: TokenUsage | None = None
        self._is_finished = False  # by the provider's own word
        self._is_reported_last = False  # nothing was written after the report
        self._thinking = ""  # the open trace, if any
        self._llm_request = ""
        self._started = time.monotonic()

    @property
    def has_text(self) -> bool:
        """Whether the reply grew."""
        return bool(self._texts)

    @property
    def has_output(self) -> bool:
        """Whether anything of the answer was shown."""
        return bool(self._texts or self._thoughts)

    @property
    def is_billable(self) -> bool:
        """Whether the provider may have worked on it: all but calls that were not sent, or were refused."""
        if self.stage is not Stage.SENT:
            return False
        return self.is_answered or self.failure is None or self.failure.may_be_billed

    async def conclude(self) -> None:
        """Fixes what it consumed and cost, when nothing more can come of it: `usage`.

        As the provider reported, else estimated; nothing of a call that was refused. A long text is
        counted beside the loop.
        """
        if not self.is_billable or self.hold is None:
            return
        is_long = sum(map(len, self._texts)) + sum(map(len, self._thoughts)) > tokens.LONG_CHARS
        consumed = await asyncio.to_thread(self._consumed) if is_long else self._consumed()
        self.usage = usage.priced(self.hold.rates, consumed)

    @property
    def untold_usage(self) -> Usage:
        """The usage, as long as no event tells it."""
        return Usage() if self.is_told else self.usage

    @property
    def usage_source(self) -> str:
        """Where `usage` is from: provider, estimated, or none for a call that was refused."""
        if not self.is_billable:
            return "none"
        return "provider" if self._is_reported else "estimated"

    @property
    def _is_reported(self) -> bool:
        """Whether the provider's figures are the whole truth.

        A count in mid-answer is not, though the answer ended well; nor is none at all for what was written.
        """
        told = self._reported
        if told is None or not self._is_reported_last:
            return False
        return told.output_tokens > 0 if self.has_output else told.input_tokens + told.output_tokens > 0

    def _consumed(self) -> Usage:
        told = self._reported or TokenUsage()
        reported = usage.bounded(
            Usage(
                input_tokens=told.input_tokens,
                output_tokens=told.output_tokens,
                thinking_tokens=told.thinking_tokens,
                cached_tokens=told.cached_tokens,
                cache_write_tokens=told.cache_write_tokens,
            )
        )
        if self._is_reported:
            return reported
        guess = usage.estimated(self._tokenizer, self.input_tokens, "".join(self._texts), "".join(self._thoughts))
        return usage.at_least(reported, guess)

    def take_hold(self, hold: Hold) -> None:
        """The money is there; the request gets the output it pays for as its limit."""
        self.stage, self.hold = Stage.HELD, hold
        self.request = replace(self.request, max_output_tokens=hold.granted_output)
        self._meter = OutputMeter(hold.granted_output, self._tokenizer)

    async def read(self, client: ModelClient, idle_seconds: float) -> None:
        """Reads the answer to its end, or until the task is cancelled; a failure is kept in `failure`."""
        self._started = time.monotonic()
        try:
            async with Silence(idle_seconds) as silence, aclosing(client.stream(self.request)) as stream:
                async for brought in stream:
                    silence.pause()  # whoever is slow from here on is not the provider
                    for event in brought:
                        self._take(event)
                    await self._journal.make_room(self._run.log)
                    if self._run.answer_bytes > limits.ANSWER_BYTES:
                        raise _too_long(self.provider)
                    if self._meter is not None and self._meter.is_passed and not self._is_finished:
                        # The provider does not keep to the limit it was given; the money ends here.
                        self.finish_reason = endings.LENGTH
                        return
                    silence.heard()
        except ProviderFailure as failure:
            self.failure = failure
        except TimeoutError:
            error = ServiceError(
                "AI_PROVIDER_TIMEOUT",
                f"The model provider was silent for {idle_seconds:g} seconds.",
                {"provider": self.provider} if self.provider else {},
            )
            # Silent also before the status line: the request was sent, and the provider may be at work on it.
            self.failure = ProviderFailure(error, is_retryable=True, may_be_billed=True)
        except Exception as error:
            # An adapter met what it was not written for: the run must still end.
            UNEXPECTED_ERRORS.labels("provider").inc()
            log.error("adapter failed", run_id=str(self._run.id), exc_info=error)
            self.failure = ProviderFailure(
                ServiceError("AI_PROVIDER_ERROR", "The model provider's answer could not be read."),
                is_retryable=False,
                may_be_billed=True,
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
            found += endings.end_llm_request(self._llm_request, self.request.model, self.untold_usage, latency)
            self._llm_request = ""
        if self._run.has_open_step:
            found.append(endings.end_step(self._run.step, step_reason, self.untold_usage))
            self._run.has_open_step = False
            self.is_told = True
        return found

    def _take(self, event: ModelEvent) -> None:
        match event:
            case Text(text):
                self._take_text(text)
            case Reasoning(text):
                self._take_reasoning(text)
            case TokenUsage():
                self._reported, self._is_reported_last = event, True
            case Finished(reason):
                self.finish_reason, self._is_finished = reason, True
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
        self._texts.append(text)
        size = self._grow(text)
        self._append_text(text, size, step=self._run.step)

    def _take_reasoning(self, text: str) -> None:
        if not self._thinking:
            self._thinking = self._run.next_trace()
            started = TraceStarted(trace_id=self._thinking, step=self._run.step, thinking=ThinkingTrace())
            self._append(RunEvent(trace_started=started))
        self._thoughts.append(text)
        size = self._grow(text)
        self._append_text(text, size, trace=self._thinking)

    def _append_text(self, text: str, size: int, *, step: int = 0, trace: str = "") -> None:
        if size <= limits.EVENT_TEXT_CHARS:
            self._journal.append_text(self._run.log, text, size, step=step, trace=trace)
            return
        for piece in events.pieces(text):
            self._journal.append_text(self._run.log, piece, len(piece.encode()), step=step, trace=trace)

    def _grow(self, text: str) -> int:
        """Takes note of more output; its bytes."""
        size = len(text) if text.isascii() else len(text.encode())
        self._run.answer_bytes += size
        self._is_reported_last = False
        if self._meter is not None:
            self._meter.add(text, size)
        return size

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
