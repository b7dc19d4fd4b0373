"""One run from its first model call to its end: calling, retrying, taking over, ending.

Decisions are `domain`'s; what is decided is committed through the journal.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from uuid import UUID

import psycopg
import psycopg_pool
from prometheus_client import Counter

from kit.db import is_away
from kit.errors import ServiceError, internal, seconds
from kit.ids import new_id
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.conversation import limits
from services.conversation.billing import Billing, HoldRefused
from services.conversation.calls import ModelCall, Stage
from services.conversation.domain import endings, events, tokens
from services.conversation.domain.fold import RunState
from services.conversation.domain.history import (
    PastMessage,
    estimate_tokens,
    select_recent,
    system_text,
    to_chat_messages,
)
from services.conversation.domain.retries import falls_back, retry_delay
from services.conversation.domain.usage import estimated, sum_usage, untold
from services.conversation.journal import Journal, MakeStatements, Publish, RunLostError
from services.conversation.outbox import Outbox
from services.conversation.owned_run import OwnedRun, Stop
from services.conversation.ownership import Ownership
from services.conversation.paying import Cut, Paying
from services.conversation.provider_keys import ProviderKeys
from services.conversation.providers.model import ModelClient, ModelRequest, ProviderFailure
from services.conversation.settings import OutputLimits, TurnLimits
from services.conversation.store import deliveries, owning, queue, watch
from services.conversation.store import log as event_log
from services.conversation.store.log import Statement
from services.conversation.store.owning import CallEnd
from services.conversation.webhooks import Deliverer
from threadloom.conversation.v1.message_pb2 import Usage
from threadloom.conversation.v1.run_event_pb2 import ModelSwitchTrace, RetryTrace, RunEvent

ENDED_RUNS = Counter("threadloom_runs_ended_total", "Runs ended here.", ["status"])
SUPERSESSIONS = Counter("threadloom_supersessions_total", "Cut model calls made again.")

HISTORY_PAGE = 50  # messages read at once, newest first, until the budget is full

Found = TypeVar("Found")


@dataclass(frozen=True)
class Answering:
    """What every answer needs. `outbox` and `deliverer` are woken when a commit may have given them something."""

    pool: psycopg_pool.AsyncConnectionPool
    journal: Journal
    publish: Publish
    ownership: Ownership
    client: ModelClient
    keys: ProviderKeys
    billing: Billing
    outbox: Outbox
    deliverer: Deliverer
    turn: TurnLimits
    output: OutputLimits


class Answer:
    """One run being answered by this process."""

    def __init__(self, answering: Answering, run: OwnedRun) -> None:
        self._with, self._run = answering, run
        self._paying = Paying(answering.billing, answering.outbox, answering.output, run)
        # What a lost owner's cut call consumed, as long as no event tells it: its text still stands.
        self._cut_usage: Usage | None = None

    async def make(self, call_id: UUID) -> None:
        """Calls the model until it answers, fails for good, or the run is to stop.

        `call_id` is the next attempt, already recorded.
        """
        run = self._run
        try:
            messages = await self._assemble()
        except ServiceError as error:
            unmade = CallEnd(call_id, "failed", Usage(), "none", error_code=error.reason)
            await self._commit_failed([], error, Usage(), [owning.end_call(unmade)])
            return
        counted = await self._counted(messages)
        while True:
            call = ModelCall(self._with.journal, run, call_id, self._request(call_id, messages), counted)
            is_in_time = await self._make_call(call)
            await call.conclude()
            if run.stop is not None:
                await self._stop(call)
                return
            if not is_in_time:
                await self._fail(call, self._limit_error())
                return
            failure = call.failure
            if failure is None:
                await self._finish(call)
                return
            delay = retry_delay(run.attempt, failure.is_retryable, call.has_output, failure.retry_after)
            if delay is None or delay >= run.seconds_left:
                model = run.next_model if falls_back(failure.error.reason, call.has_output) else None
                if model is None:
                    await self._fail(call, failure.error)
                    return
                call_id = await self._switch(call, failure.error, model)
                counted = await self._counted(messages)
                continue
            next_call = await self._retry(call, failure.error, delay)
            if next_call is None:
                return
            call_id = next_call

    async def resume(self, takeovers: int) -> None:
        """Goes on where a lost owner stopped: folds the log, then makes the cut call again or ends the run."""
        run = self._run
        state = await self._fold()
        if not state.last_seq:
            await self._begin()
            return
        run.traces = state.next_trace_number() - 1
        run.step, run.has_open_step, run.has_reply = state.step, state.has_open_step, state.has_reply
        run.attempt, run.switches = state.retries + 1, state.switches
        run.model = state.switched_to or run.model
        cut = await self._find_cut()
        if run.stop is not None:
            await self._stop_cut(cut)
        elif state.is_broken or takeovers >= limits.TAKEOVERS_MAX:
            await self._fail_cut(cut, internal())
        elif run.seconds_left <= 0:
            await self._fail_cut(cut, self._limit_error())
        else:
            await self._make_again(cut)

    async def _begin(self) -> None:
        """The first steps of a run that waited for its turn: what a start has written by now of any other."""
        run, call_id = self._run, new_id()
        begin = owning.begin_call(run.id, call_id, run.model, 1, 1)
        await self._commit([events.run_started(str(run.user_message_id), run.options.model)], lambda _: (begin,))
        await self.make(call_id)

    async def fail_unexpectedly(self) -> None:
        """A last try to give the run an end; if that fails too, another owner will."""
        run = self._run
        try:
            run.log.pending.keep_sealed()
            run.traces = run.log.state.next_trace_number() - 1
            run.has_reply = run.log.state.has_reply
            run.has_open_step = run.log.state.has_open_step
            await self._fail_cut(await self._find_cut(), internal())
        except RunLostError:
            return
        except Exception as error:
            # Second failure in a row: the run is left for another owner, the third of which ends it.
            log.error("run could not be ended here", exc_info=error)
            self._with.journal.lose(run.log)

    # ------------------------------------------------------------------ calling

    def _request(self, call_id: UUID, messages: list[dict[str, str]]) -> ModelRequest:
        options = self._run.options
        return ModelRequest(
            call_id=str(call_id),
            model=self._run.model,
            messages=messages,
            temperature=options.temperature if options.HasField("temperature") else None,
            reasoning_effort=options.reasoning_effort,
        )

    async def _make_call(self, call: ModelCall) -> bool:
        """Holds the call's money, then reads the answer. False when a time limit ended it; a stop leaves `run.stop`."""
        run, client = self._run, self._with.client
        try:
            key = await self._with.keys.key_for(run.log.project_id, client.provider, self._insist)
        except ServiceError as error:
            call.failure = ProviderFailure(error, is_retryable=False)
            return True
        call.request = replace(call.request, api_key=key)
        if run.is_asked_to_stop.is_set():
            return True
        if not await self._hold(call):
            return False
        if call.hold is None or run.is_asked_to_stop.is_set():
            return True
        await self._record_sending(call)
        if run.is_asked_to_stop.is_set():
            return True
        if run.seconds_left <= 0:  # the commit took what was left
            return False
        call.stage = Stage.SENT
        reading = asyncio.create_task(call.read(client, self._with.turn.idle_seconds))
        return await self._unless_stopped(reading, min(self._with.turn.call_seconds, run.seconds_left))

    async def _hold(self, call: ModelCall) -> bool:
        """Asks billing for the call's money; a refusal is the call's failure. False when the turn's time was up."""
        run = self._run
        call.stage = Stage.ASKED
        placing = asyncio.create_task(self._paying.place_hold(call))
        is_in_time = await self._unless_stopped(placing, run.seconds_left)
        if placing.cancelled():
            return is_in_time
        error = placing.exception()
        if error is None:
            call.take_hold(placing.result())
            run.log.credits_per_usd = placing.result().credits_per_usd
        elif isinstance(error, ServiceError):
            if isinstance(error, HoldRefused) and error.is_sure:
                call.stage = Stage.NONE  # there is nothing to release
            call.failure = ProviderFailure(error, is_retryable=False)
        else:
            raise error
        return True

    async def _record_sending(self, call: ModelCall) -> None:
        """Commits, under our epoch, that the call is about to be made: whoever takes over knows whether it may be.

        What a cut call had shown is withdrawn here and not before: now its text will be made again.
        A process that was frozen meanwhile must ask again: somebody else may be making the call now.
        """
        assert call.hold is not None
        sent = owning.send_call(call.call_id, call.hold)
        while True:
            await self._with.ownership.until_held()
            told = self._supersede()
            await self._with.journal.change_state(self._run.log, told, lambda _: (sent,))
            if self._with.ownership.holds_lease:
                return

    def _supersede(self) -> list[RunEvent]:
        run = self._run
        if self._cut_usage is None:
            return []
        told = endings.supersede(run.log.state, self._cut_usage)
        run.traces += 1  # the retry's
        run.has_open_step = False
        self._cut_usage = None
        SUPERSESSIONS.inc()
        return told

    async def _unless_stopped(self, work: asyncio.Task[Found], seconds: float) -> bool:
        """Waits for the work, a stop, or the time; the work has ended then. False when the time was up."""
        asked = asyncio.create_task(self._run.is_asked_to_stop.wait())
        try:
            done, _ = await asyncio.wait({work, asked}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            work.cancel()  # of a reading: closes the provider's connection
            await asyncio.wait({work, asked})
        return bool(done)

    async def _assemble(self) -> list[dict[str, str]]:
        """The request's messages: system text and the newest history within the budget."""
        run = self._run
        system = system_text(run.system_prompt, run.options.system)
        newest_first: list[PastMessage] = []
        chars = len(system)
        while True:
            page = await self._read_history(len(newest_first))
            newest_first += page
            chars += sum(len(message.text) for message in page)
            if len(page) < HISTORY_PAGE or chars > limits.CONTEXT_TOKENS * limits.CHARS_PER_TOKEN:
                break
        budget = limits.CONTEXT_TOKENS - estimate_tokens(system)
        if newest_first and estimate_tokens(newest_first[0].text) > budget:
            raise endings.context_too_large()
        return to_chat_messages(system, select_recent(newest_first, budget))

    async def _counted(self, messages: list[dict[str, str]]) -> int:
        """The request's input tokens; of a long one counted beside the loop."""
        tokenizer = tokens.tokenizer_of(self._run.model)
        if sum(len(message["content"]) for message in messages) < tokens.LONG_CHARS:
            return tokenizer.count_input(messages)
        return await asyncio.to_thread(tokenizer.count_input, messages)

    async def _read_history(self, offset: int) -> list[PastMessage]:
        thread, reply, asked = self._run.log.thread_id, self._run.log.message_id, self._run.user_message_id
        return await self._insist(
            lambda connection: owning.read_history(
                connection, thread=thread, reply=reply, asked=asked, limit=HISTORY_PAGE, offset=offset
            )
        )

    async def _retry(self, call: ModelCall, error: ServiceError, delay: float) -> UUID | None:
        """Tells of the retry, waits, records the next attempt; None when the run was stopped meanwhile."""
        run, journal = self._run, self._with.journal
        run.attempt += 1
        consumed = call.usage if call.is_billable else None
        retry = RetryTrace(attempt=run.attempt, reason=error.message, delay=seconds(delay), usage=consumed)
        told = events.retry_trace(run.next_trace(), max(run.step, 1), retry)
        ended = self._paying.end(call, "failed", error)
        call.is_told = True
        log.warning("attempt failed", code=error.reason, http_status=error.metadata.get("status"), delay=delay)
        await self._commit(told, lambda _: (owning.end_call(ended),))
        self._paying.remember(ended)
        try:
            async with asyncio.timeout(delay):
                await run.is_asked_to_stop.wait()
        except TimeoutError:
            call_id, step = new_id(), run.step if run.has_open_step else run.step + 1
            begin = owning.begin_call(run.id, call_id, run.model, step, run.attempt)
            await journal.change_state(run.log, statements=lambda _: (begin,))
            return call_id
        await self._stop(call)
        return None

    async def _switch(self, call: ModelCall, error: ServiceError, model: str) -> UUID:
        """Tells of the change of model, and records its first attempt, which it returns."""
        run, call_id = self._run, new_id()
        run.attempt += 1
        consumed = call.usage if call.is_billable else None
        switch = ModelSwitchTrace(from_model=run.model, to_model=model, reason=error.message, usage=consumed)
        told = events.model_switch_trace(run.next_trace(), max(run.step, 1), switch)
        ended = self._paying.end(call, "failed", error)
        call.is_told = True
        step = run.step if run.has_open_step else run.step + 1
        begin = owning.begin_call(run.id, call_id, model, step, run.attempt)
        log.warning("model switched", code=error.reason, from_model=run.model, to_model=model)
        await self._commit(told, lambda _: (owning.end_call(ended), begin))
        self._paying.remember(ended)
        run.model, run.switches = model, run.switches + 1
        return call_id

    # ------------------------------------------------------------------ taking over

    async def _fold(self) -> RunState:
        state = self._run.log.state
        while True:
            after = state.last_seq
            rows = await self._insist(
                lambda connection, after=after: event_log.read_events(  # type: ignore[misc]
                    connection, self._run.id, after, limits.PAGE_EVENTS
                )
            )
            for seq, payload in rows:
                self._apply_stored(state, seq, payload)
            if len(rows) < limits.PAGE_EVENTS:
                return state

    def _apply_stored(self, state: RunState, seq: int, payload: bytes) -> None:
        try:
            if not state.is_broken:
                state.apply(RunEvent.FromString(payload))
        except Exception as error:
            # A log of another version, or a bug: it cannot be gone on with, but it can be ended.
            UNEXPECTED_ERRORS.labels("stored log").inc()
            log.error("stored log cannot be folded", seq=seq, exc_info=error)
            state.is_broken = True
        if state.is_broken:
            state.order.give_up(seq)

    async def _find_cut(self) -> Cut:
        """The attempts that are still open, and what of the run's calls no event tells (durability.md 11)."""
        run, state = self._run, self._run.log.state
        known = await self._insist(lambda connection: owning.read_calls(connection, run.id))
        run.log.credits_per_usd = next((call.credits_per_usd for call in reversed(known) if call.rates), 0)
        shown = (state.step_text, state.step_thinking) if state.has_open_step else ("", "")
        ends: list[CallEnd] = []
        for call in known:
            # A process of a release that knew no holds left `started` what it had made.
            if call.status == "sent" or (call.status == "started" and any(shown) and len(known) == 1):
                read = 0
                with suppress(ServiceError):
                    read = await self._counted(await self._assemble())
                guess = estimated(tokens.tokenizer_of(run.model), read, *shown)
                ends.append(self._paying.sent(call, guess))
            elif call.status == "started":
                ends.append(self._paying.unsent(call))
        # Also what an owner before had closed and did not live to tell.
        total = sum_usage([*(call.usage for call in known), *(end.usage for end in ends)])
        return Cut(tuple(ends), untold(total, state.usage))

    async def _make_again(self, cut: Cut) -> None:
        run, call_id = self._run, new_id()
        run.attempt += 1
        made = (*cut.statements, owning.begin_call(run.id, call_id, run.model, run.step + 1, run.attempt))
        await self._commit([], lambda _: made)
        self._paying.remember(*cut.ends)
        self._cut_usage = cut.usage
        await self.make(call_id)

    async def _stop_cut(self, cut: Cut) -> None:
        run = self._run
        if run.stop is Stop.LOST:
            raise RunLostError
        if run.stop is Stop.HAND_OVER:
            await self._hand_over()
            return
        told, untold = endings.close_open(run.log.state, cut.usage, endings.CANCELLED)
        told.append(endings.finish(endings.CANCELLED, run.model, run.age, untold))
        await self._commit_end(told, "cancelled", cut.statements)

    async def _fail_cut(self, cut: Cut, error: ServiceError) -> None:
        told, untold = endings.close_open(self._run.log.state, cut.usage, endings.FAILED)
        await self._commit_failed(told, error, untold, cut.statements)

    async def _insist(self, work: Callable[[psycopg.AsyncConnection], Awaitable[Found]]) -> Found:
        """Reads on a pooled connection, again while Postgres is away."""
        pause = limits.RECONNECT_PAUSE_SECONDS
        while True:
            try:
                async with asyncio.timeout(limits.ANSWER_SECONDS), self._with.pool.connection() as connection:
                    return await work(connection)
            except Exception as error:
                if not is_away(error):
                    raise
                log.warning("answer waits for the database", error=type(error).__name__)
            if self._run.stop is Stop.LOST:
                raise RunLostError
            await asyncio.sleep(pause)
            pause = min(pause * 2, limits.RECONNECT_PAUSE_MAX_SECONDS)

    # ------------------------------------------------------------------ ending

    async def _finish(self, call: ModelCall) -> None:
        if not call.has_text and call.finish_reason not in endings.SPEECHLESS:
            await self._fail(call, endings.empty_answer(call.provider))
            return
        told, untold_usage = self._closing(call, call.finish_reason)
        told.append(endings.finish(call.finish_reason, self._run.model, self._run.age, untold_usage))
        await self._commit_end(told, "succeeded", [owning.end_call(self._paying.end(call, "succeeded"))])

    async def _fail(self, call: ModelCall, error: ServiceError) -> None:
        told, untold_usage = self._closing(call, endings.FAILED)
        ended = owning.end_call(self._paying.end(call, "failed", error))
        await self._commit_failed(told, error, untold_usage, [ended])

    def _closing(self, call: ModelCall, reason: str) -> tuple[list[RunEvent], Usage]:
        """Closes what is open; and the usage that no event of these tells. A cut call's text that stands, stays."""
        if self._cut_usage is not None:
            return endings.close_open(self._run.log.state, self._cut_usage, reason)
        return call.closing_events(reason), call.untold_usage

    async def _stop(self, call: ModelCall) -> None:
        run = self._run
        if run.stop is Stop.LOST:
            raise RunLostError
        if run.stop is Stop.HAND_OVER:
            await self._hand_over(owning.end_call(self._paying.end(call, "cut")))
            return
        told, untold_usage = self._closing(call, endings.CANCELLED)
        told.append(endings.finish(endings.CANCELLED, run.model, run.age, untold_usage))
        await self._commit_end(told, "cancelled", [owning.end_call(self._paying.end(call, "cancelled"))])

    async def _hand_over(self, *statements: Statement) -> None:
        """Leaves the run to others; the call that ends here is closed by who knows what became of it."""
        made = (*statements, owning.hand_over(self._run.id))
        await self._commit([], lambda _: made)

    async def _commit_failed(
        self, told: list[RunEvent], error: ServiceError, untold: Usage, statements: list[Statement]
    ) -> None:
        run = self._run
        before_reply = not run.has_reply
        told += endings.fail(
            error, before_reply=before_reply, trace=run.next_trace(), step=max(run.step, 1), untold=untold
        )
        if before_reply:
            statements.append(owning.free_key(run.id, run.user_message_id))
            statements.append(owning.drop_reply(run.log.message_id))
        await self._commit_end(told, "failed", statements)

    async def _commit_end(self, told: list[RunEvent], status: str, statements: list[Statement]) -> None:
        """The run's last transaction: its events, its calls, its reply, its traces, itself."""
        run = self._run

        def make(state: RunState) -> Iterable[Statement]:
            yield from statements
            message = run.log.message_id
            if state.failed_before_reply:
                message = run.user_message_id  # there is no reply to hang the traces on
            else:
                latency = state.latency_ms or int(run.age * 1000)  # a failure tells none
                yield owning.end_message(message, MESSAGE_STATUS[status], state, latency)
            traces = owning.record_traces(run.id, message, state)
            if traces is not None:
                yield traces
            yield from deliveries.tell_run_ended(
                run=run.id,
                thread=run.log.thread_id,
                message=run.log.message_id,
                user=run.user_id,
                model=run.model,
                status=status,
                state=state,
            )
            yield owning.end_run(run.id, status, state)
            yield owning.touch_thread(run.log.thread_id)
            yield queue.promote(run.log.thread_id)
            if run.options.HasField("cancel_after_disconnect"):
                yield watch.remove(run.id)

        returned = await self._commit(told, make)
        if any(what == deliveries.TOLD for what, _ in returned):
            self._with.deliverer.wake()
        ENDED_RUNS.labels(status).inc()
        state = run.log.state
        log.info(
            "run ended",
            status=status,
            code=state.error.code if state.error is not None else "",
            provider_status=state.error.provider_status if state.error is not None else 0,
            attempts=run.attempt,
            seconds=round(run.age, 3),
        )
        for what, found in returned:
            if what == queue.PROMOTED:
                await self._with.ownership.claim_one(found)

    async def _commit(self, told: list[RunEvent], statements: MakeStatements) -> list[tuple[Any, ...]]:
        """A state change that may tell billing something. Returns the rows its statements returned."""
        returned = await self._with.journal.change_state(self._run.log, told, statements)
        self._with.outbox.wake()
        return returned

    def _limit_error(self) -> ServiceError:
        turn = self._with.turn
        if self._run.seconds_left > limits.TIMER_SLACK_SECONDS:
            return ServiceError("AI_PROVIDER_TIMEOUT", f"The model call took longer than {turn.call_seconds:g} s.")
        limit = f"{turn.turn_seconds:g}"
        return ServiceError("TURN_TIMEOUT", f"The answer took longer than {limit} seconds.", {"limit_seconds": limit})


# What a run's end means for its reply.
MESSAGE_STATUS = {"succeeded": "complete", "failed": "failed", "cancelled": "cancelled"}
