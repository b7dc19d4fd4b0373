"""The money of one run's calls: set aside before each, and told to billing after it.

Writes nothing itself: what billing must hear is part of how a call ended, and the answer
commits both together.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

from kit.errors import ServiceError
from services.conversation import billing
from services.conversation.billing import Billing, HoldRefused, Payer
from services.conversation.calls import ModelCall, Stage
from services.conversation.domain import tokens
from services.conversation.domain.usage import Hold, priced
from services.conversation.outbox import Outbox
from services.conversation.owned_run import OwnedRun
from services.conversation.settings import OutputLimits
from services.conversation.store import owning
from services.conversation.store.log import Statement
from services.conversation.store.owning import CallEnd, KnownCall, Notice
from threadloom.conversation.v1.message_pb2 import Usage

# What billing says when there is not money enough: some of it may only be held by calls that have ended.
SHORT_OF_MONEY = frozenset({"QUOTA_EXCEEDED", "AI_BUDGET_EXCEEDED"})


@dataclass(frozen=True)
class Cut:
    """The attempts a lost owner left open: how each ends; and what the run's calls consumed that no event tells."""

    ends: tuple[CallEnd, ...] = ()
    usage: Usage = field(default_factory=Usage)

    @property
    def statements(self) -> list[Statement]:
        """Closes them."""
        return [owning.end_call(end) for end in self.ends]


class Paying:
    """One run's account with billing."""

    def __init__(self, service: Billing, outbox: Outbox, output: OutputLimits, run: OwnedRun) -> None:
        self._billing, self._outbox, self._output, self._run = service, outbox, output, run
        self._notices: list[Notice] = []  # of calls that ended; billing may not have them yet

    async def place_hold(self, call: ModelCall) -> Hold:
        """The call's hold. Raises ServiceError.

        What the run's calls before it still hold is given back first, or this one might not fit.
        """
        while self._notices:
            topic, payload = self._notices.pop()
            with suppress(ServiceError):  # the outbox has it too
                await self._billing.send(topic, payload)
        project = self._run.log.project_id
        with self._outbox.watch(project) as watch:
            try:
                return await self._ask(call)
            except HoldRefused as error:
                if error.reason not in SHORT_OF_MONEY:
                    raise
                # Calls of other turns that have ended may hold more than they cost, until billing hears of them.
                if not await self._outbox.deliver(project) and not watch.has_received:
                    raise
                is_sure = error.is_sure
        try:
            return await self._ask(call)
        except HoldRefused as error:
            error.is_sure &= is_sure
            raise

    async def _ask(self, call: ModelCall) -> Hold:
        most, least = self._output.wish(self._run.options)
        bound = tokens.tokenizer_of(self._run.model).input_bound(call.request.messages, call.input_tokens)
        return await self._billing.place_hold(
            call.call_id, self._payer, input_tokens_max=bound, max_output=most, min_output=least
        )

    def remember(self, *ends: CallEnd) -> None:
        """Calls of the run that ended, by a commit; the run goes on."""
        self._notices += [end.notice for end in ends if end.notice]

    def end(self, call: ModelCall, status: str, error: ServiceError | None = None) -> CallEnd:
        """How a call ended. One that may have cost money is booked, of any other the hold is freed."""
        notice = None
        if call.is_billable:
            notice = self._settle(call.call_id, call.usage)
        elif call.stage is not Stage.NONE:
            notice = self._release(call.call_id)
        return CallEnd(
            call.call_id,
            status,
            call.usage,
            call.usage_source,
            provider=call.provider,
            http_status=call.failure.http_status if call.failure else 200 * call.is_answered,
            error_code=error.reason if error else "",
            notice=notice,
        )

    def unsent(self, call: KnownCall) -> CallEnd:
        """A lost owner's attempt that was not sent. A hold that is still on its way never becomes one."""
        return CallEnd(call.id, "cut", Usage(), "none", notice=self._release(call.id))

    def sent(self, call: KnownCall, guess: Usage) -> CallEnd:
        """A lost owner's attempt that was about to be sent: it may have reached the provider, so it counts.

        One without rates is of a release that knew no holds: billing has never heard of it.
        """
        if call.rates is None:
            return CallEnd(call.id, "cut", guess, "estimated")
        usage = priced(billing.rates_of(call.rates), guess)
        return CallEnd(call.id, "cut", usage, "estimated", notice=self._settle(call.id, usage))

    def _settle(self, call: UUID, usage: Usage) -> Notice:
        return billing.SETTLE, billing.settlement(call, self._run.log.project_id, usage).SerializeToString()

    def _release(self, call: UUID) -> Notice:
        return billing.RELEASE, billing.release(call, self._payer).SerializeToString()

    @property
    def _payer(self) -> Payer:
        run = self._run
        return Payer(run.log.project_id, run.user_id, run.log.thread_id, run.id, run.log.message_id, run.model)
