"""Asks billing for money before a call, and tells it afterwards what became of the call."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from google.protobuf.message import Message
from grpc import aio

from kit.callers import SYSTEM
from kit.channels import Replicas, call_metadata, is_transport_failure, to_service_error
from kit.errors import ServiceError
from kit.pricing import Prices, Rates, Tier
from services.conversation import limits
from services.conversation.domain import endings
from services.conversation.domain.usage import Hold, as_priced
from threadloom.billing.v1.billing_service_pb2 import PlaceHoldRequest, ReleaseRequest, SettleRequest
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.billing.v1.hold_pb2 import HoldState
from threadloom.billing.v1.price_pb2 import Rates as RatesMessage
from threadloom.billing.v1.price_pb2 import TokenPrices
from threadloom.billing.v1.usage_pb2 import TokenUsage
from threadloom.conversation.v1.message_pb2 import Usage

if TYPE_CHECKING:  # this class exists in the stubs' types only
    from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceAsyncStub

# Topics of the outbox.
SETTLE, RELEASE = "billing.settle", "billing.release"

Method = aio.UnaryUnaryMultiCallable[Any, Any]


@dataclass(frozen=True)
class Payer:
    """Whose a call is and what it is for, as its hold and its ledger row say it."""

    project_id: UUID
    user_id: str
    thread_id: UUID
    run_id: UUID
    message_id: UUID
    model: str


class Billing:
    """All replicas of the billing service. Made and closed inside the running loop."""

    def __init__(self, addresses: Sequence[str], credential: str) -> None:
        self._replicas, self._credential = Replicas(addresses), credential
        self._stubs: dict[str, BillingServiceAsyncStub] = {
            replica.address: BillingServiceStub(replica.channel) for replica in self._replicas.all
        }

    async def close(self) -> None:
        """Closes every channel."""
        await self._replicas.close()

    async def place_hold(
        self, call_id: UUID, payer: Payer, *, input_tokens_max: int, max_output: int, min_output: int
    ) -> Hold:
        """Sets money aside for a call. Raises ServiceError: the refusal, or UNAVAILABLE when nobody answers.

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
        until = time.monotonic() + limits.HOLD_WAIT_SECONDS
        while True:
            try:
                answer = await self._call(lambda stub: stub.PlaceHold, request, until)
                break
            except ServiceError as error:
                if error.reason != "UNAVAILABLE":
                    raise
                if time.monotonic() + limits.BILLING_PAUSE_SECONDS >= until:
                    raise endings.billing_away() from error
            await asyncio.sleep(limits.BILLING_PAUSE_SECONDS)
        hold = answer.hold
        if hold.state != HoldState.HOLD_STATE_OPEN:
            # Closed before it was used: somebody else has ended this call.
            raise endings.billing_away()
        stored = hold.rates.SerializeToString()
        return Hold(rates_of(stored), stored, hold.granted_output_tokens, hold.credits_per_usd)

    async def settle(self, payload: bytes) -> None:
        """Books a call. Raises ServiceError."""
        await self._call(lambda stub: stub.Settle, SettleRequest.FromString(payload))

    async def release(self, payload: bytes) -> None:
        """Frees the money of a call that was not made. Raises ServiceError."""
        await self._call(lambda stub: stub.Release, ReleaseRequest.FromString(payload))

    async def _call(
        self, method: "Callable[[BillingServiceAsyncStub], Method]", request: Message, until: float = math.inf
    ) -> Any:
        """Asks each replica once, not beyond `until`: every one of these calls may be repeated. Raises ServiceError."""
        metadata = call_metadata(self._credential, SYSTEM, "")
        for replica in self._replicas.in_order():
            try:
                # A frozen replica takes a try's whole time: the last one may not add that to the wait.
                timeout = min(limits.BILLING_SECONDS, max(0.0, until - time.monotonic()))
                return await method(self._stubs[replica.address])(request, timeout=timeout, metadata=metadata)
            except aio.AioRpcError as error:
                failure = to_service_error(error)
                if is_transport_failure(error):
                    replica.suspect()
                elif failure.reason != "UNAVAILABLE":
                    raise failure from None
        raise failure


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
    given = RatesMessage.FromString(stored)
    tiers = tuple(Tier(tier.above_input_tokens, _prices(tier.prices)) for tier in given.tiers)
    return Rates(_prices(given.base), tiers, given.request_fee.nano_usd)


def _prices(given: TokenPrices) -> Prices:
    whole = given.input.nano_usd
    cached = given.cached_input.nano_usd if given.HasField("cached_input") else whole
    write = given.cache_write.nano_usd if given.HasField("cache_write") else whole
    return Prices(whole, cached, write, given.output.nano_usd)
