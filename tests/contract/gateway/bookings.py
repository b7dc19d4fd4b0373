"""Holds and booked calls of a project, made as the conversation service makes them."""

from typing import Any, Self

from grpc import aio

from kit.callers import SYSTEM
from kit.channels import CHANNEL_OPTIONS, call_metadata
from kit.ids import new_id
from kit.money import format_usd
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.billing.v1.usage_pb2 import TokenUsage
from threadloom.common.v1.money_pb2 import Money
from threadloom.common.v1.rates_pb2 import Rates, TokenPrices

MODEL = "booked-model"
# A token costs 1,000 nano-USD, in or out.
NANO = 1000
PER_MILLION = Money(nano_usd=NANO * 10**6)
CALL_SECONDS = 20.0


class Bookings:
    """BillingService at an address, for one project. `calls` are the holds that were asked for."""

    def __init__(self, address: str, credential: str, project: str) -> None:
        self._channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = BillingServiceStub(self._channel)
        self._metadata = call_metadata(credential, SYSTEM, "request-of-tests")
        self._project = project
        self._runs: dict[str, str] = {}  # one for each user: the rate limit counts runs
        self.calls: list[api.PlaceHoldRequest] = []

    async def __aenter__(self) -> Self:
        rates = Rates(base=TokenPrices(input=PER_MILLION, output=PER_MILLION))
        await self._call(self._stub.SetPrice, api.SetPriceRequest(model=MODEL, rates=rates))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def hold(self, user: str, input_tokens: int, output_tokens: int) -> str:
        """Sets money aside; gives the amount as text."""
        ids = {name: str(new_id()) for name in ("api_call_id", "thread_id", "message_id")}
        request = api.PlaceHoldRequest(
            project_id=self._project,
            user_id=user,
            run_id=self._runs.setdefault(user, str(new_id())),
            model=MODEL,
            input_tokens_max=input_tokens,
            max_output_tokens=max(output_tokens, 1),
            min_output_tokens=1,
            **ids,
        )
        self.calls.append(request)
        answer = await self._call(self._stub.PlaceHold, request)
        return format_usd(answer.hold.amount.nano_usd)

    async def book(self, user: str, input_tokens: int, output_tokens: int) -> str:
        """Books a call; gives its cost as text."""
        await self.hold(user, input_tokens, output_tokens)
        request = api.SettleRequest(
            api_call_id=self.calls[-1].api_call_id,
            project_id=self._project,
            usage=TokenUsage(input_tokens=input_tokens, output_tokens=output_tokens),
            cost=Money(nano_usd=NANO * (input_tokens + output_tokens)),
        )
        answer = await self._call(self._stub.Settle, request)
        return format_usd(answer.entry.cost.nano_usd)

    async def _call(self, method: Any, request: Any) -> Any:
        return await method(request, metadata=self._metadata, timeout=CALL_SECONDS)
