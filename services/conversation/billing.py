"""Asks billing for money before a call, and tells it afterwards what became of the call."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from kit.callers import SYSTEM
from kit.channels import Replica
from kit.clients import Service
from kit.errors import ServiceError
from kit.pricing import Rates
from kit.rates import from_message
from services.conversation import limits
from services.conversation.domain import endings
from services.conversation.domain.usage import Hold, as_priced
from threadloom.billing.v1.billing_service_pb2 import PlaceHoldRequest, ReleaseRequest, SettleRequest
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.billing.v1.hold_pb2 import HoldState
from threadloom.billing.v1.usage_pb2 import TokenUsage
from threadloom.common.v1.rates_pb2 import Rates as RatesMessage
from threadloom.conversation.v1.message_pb2 import Usage

if TYPE_CHECKING:  # this class exists in the stubs' types only
    from grpc import aio

    from threadloom.billing.v1.billing_service_pb2 import PlaceHoldResponse
    from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceAsyncStub

    PlaceHold = aio.UnaryUnaryMultiCallable[PlaceHoldRequest, PlaceHoldResponse]

# Topics of the outbox.
SETTLE, RELEASE = "billing.settle", "billing.release"


@dataclass(frozen=True)
class Payer:
    """Whose a call is and what it is for, as its hold and its ledger row say it."""

    project_id: UUID
    user_id: str
    thread_id: UUID
    run_id: UUID
    message_id: UUID
    model: str


@dataclass
class HoldRefused(ServiceError):
    """Billing said no. Unless `is_sure`, an earlier try has had no answer: it may still arrive, and be granted."""

    is_sure: bool = True


@dataclass(frozen=True)
class _Stubs:
    replica: Replica
    billing: "BillingServiceAsyncStub"


def _stubs(replica: Replica) -> _Stubs:
    return _Stubs(replica, BillingServiceStub(replica.channel))


class Billing:
    """All replicas of the billing service. Made and closed inside the running loop."""

    def __init__(self, addresses: Sequence[str], credential: str) -> None:
        self._service = Service(addresses, credential, _stubs, limits.BILLING_SECONDS)

    async def close(self) -> None:
        """Closes every channel."""
        await self._service.close()

    async def place_hold(
        self, call_id: UUID, payer: Payer, *, input_tokens_max: int, max_output: int, min_output: int
    ) -> Hold:
        """Sets money aside for a call. Raises HoldRefused, or UNAVAILABLE when nobody answers.

        Asks again while billing is away, for a while: a restart must not refuse a user. The same id gets
        the same hold, so an answer that was lost does no harm.
        """
        request = PlaceHoldRequest(
            api_call_id=str(call_id),
            project_id=str(payer.project_id),
            user_id=payer.user_id,
            run_id=str(payer.run_id),
            thread_id=str(payer.thread_id),
            message_id=str(payer.message_id),
            model=payer.model,
            input_tokens_max=input_tokens_max,
            max_output_tokens=max_output,
            min_output_tokens=min_output,
        )
        tries = 0

        def method(to: _Stubs) -> "PlaceHold":
            nonlocal tries
            tries += 1
            return to.billing.PlaceHold

        until = time.monotonic() + limits.HOLD_WAIT_SECONDS
        while True:
            left = max(until - time.monotonic(), limits.BILLING_PAUSE_SECONDS)
            try:
                answer = await self._service.call(
                    method,
                    request,
                    SYSTEM,
                    str(payer.run_id),
                    seconds=min(left, limits.BILLING_SECONDS),
                )
                break
            except ServiceError as error:
                if error.reason != "UNAVAILABLE":
                    refused = error.reason, error.message, error.metadata, error.retry_after
                    raise HoldRefused(*refused, is_sure=tries == 1) from error
                if time.monotonic() + limits.BILLING_PAUSE_SECONDS >= until:
                    raise endings.billing_away() from error
            await asyncio.sleep(limits.BILLING_PAUSE_SECONDS)
        hold = answer.hold
        if hold.state != HoldState.HOLD_STATE_OPEN:
            # Closed before it was used: somebody else has ended this call.
            raise endings.billing_away()
        stored = hold.rates.SerializeToString()
        return Hold(rates_of(stored), stored, hold.granted_output_tokens, hold.credits_per_usd)

    async def send(self, topic: str, payload: bytes) -> None:
        """Tells what an outbox row tells. Raises ServiceError."""
        await senders(self)[topic](payload)

    async def settle(self, payload: bytes) -> None:
        """Books a call. Raises ServiceError."""
        request = SettleRequest.FromString(payload)
        await self._service.call(lambda to: to.billing.Settle, request, SYSTEM, request.api_call_id)

    async def release(self, payload: bytes) -> None:
        """Frees the money of a call that was not made. Raises ServiceError."""
        request = ReleaseRequest.FromString(payload)
        await self._service.call(lambda to: to.billing.Release, request, SYSTEM, request.api_call_id)


def senders(billing: Billing) -> dict[str, Callable[[bytes], Awaitable[None]]]:
    """Who sends which topic of the outbox."""
    return {SETTLE: billing.settle, RELEASE: billing.release}


def settlement(call_id: UUID, project_id: UUID, usage: Usage) -> SettleRequest:
    """What billing is told of a call that was made."""
    priced = as_priced(usage)
    request = SettleRequest(
        api_call_id=str(call_id),
        project_id=str(project_id),
        usage=TokenUsage(
            input_tokens=priced.input,
            cached_input_tokens=priced.cached_input,
            cache_write_tokens=priced.cache_write,
            output_tokens=priced.output,
            reasoning_tokens=priced.reasoning,
        ),
        estimated=usage.estimated,
    )
    request.cost.nano_usd = usage.cost.nano_usd
    return request


def release(call_id: UUID, payer: Payer) -> ReleaseRequest:
    """What billing is told of a call that was not made."""
    return ReleaseRequest(
        api_call_id=str(call_id),
        project_id=str(payer.project_id),
        user_id=payer.user_id,
        run_id=str(payer.run_id),
        thread_id=str(payer.thread_id),
        message_id=str(payer.message_id),
        model=payer.model,
    )


def rates_of(stored: bytes) -> Rates:
    """The rates of a hold."""
    return from_message(RatesMessage.FromString(stored))
