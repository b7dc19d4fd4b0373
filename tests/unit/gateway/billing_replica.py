"""A billing replica at transport level: a real gRPC server whose answers a test writes."""

import asyncio
from typing import Any, Self

from google.protobuf.timestamp_pb2 import Timestamp

from kit.callers import Caller, current_caller
from kit.errors import ServiceError
from kit.serving import Server
from tests.unit.gateway.replica import CREDENTIAL, MESSAGE_ID, PROJECT_ID, RUN_ID, THREAD_ID
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.billing_service_pb2_grpc import (
    BillingServiceServicer,
    add_BillingServiceServicer_to_server,
)
from threadloom.billing.v1.price_pb2 import Price, Terms
from threadloom.billing.v1.usage_pb2 import PERIOD_DAY, LedgerEntry, PeriodUsage, TokenUsage
from threadloom.common.v1.money_pb2 import Money

STAMP = Timestamp(seconds=1_772_359_200, nanos=5_000)


def entry(number: int = 1, user: str = "alice") -> LedgerEntry:
    """A booked call."""
    return LedgerEntry(
        api_call_id=f"01900000-0000-7000-8000-{number:012x}",
        project_id=PROJECT_ID,
        user_id=user,
        run_id=RUN_ID,
        thread_id=THREAD_ID,
        message_id=MESSAGE_ID,
        model="m",
        usage=TokenUsage(
            input_tokens=11, cached_input_tokens=3, cache_write_tokens=2, output_tokens=7, reasoning_tokens=5
        ),
        cost=Money(nano_usd=150),
        late=True,
        create_time=STAMP,
    )


class BillingReplica(BillingServiceServicer):
    """Answers as the test says, and remembers what it was asked."""

    def __init__(self, *pages: list[LedgerEntry] | ServiceError) -> None:
        self.pages = list(pages)
        self.requests: list[Any] = []
        self.callers: list[Caller] = []
        self.failure: ServiceError | None = None
        self.asked = asyncio.Event()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = Server(CREDENTIAL, ["threadloom.billing.v1.BillingService"])
        add_BillingServiceServicer_to_server(self, self._server.grpc)
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1:0')}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Ends at once, calls under way included."""
        await self._server.stop(0)

    def _note(self, request: Any) -> None:
        self.requests.append(request)
        self.callers.append(current_caller.get())
        self.asked.set()
        if self.failure is not None:
            raise self.failure

    async def ListLedger(self, request: api.ListLedgerRequest, _: Any) -> api.ListLedgerResponse:  # type: ignore[override]
        self._note(request)
        number = int(request.page_token or 0)
        page = self.pages[number]
        if isinstance(page, ServiceError):
            raise page
        more = str(number + 1) if number + 1 < len(self.pages) else ""
        return api.ListLedgerResponse(entries=page, next_page_token=more)

    async def SetPrice(self, request: api.SetPriceRequest, _: Any) -> api.SetPriceResponse:  # type: ignore[override]
        self._note(request)
        kept = Price(model=request.model, project_id=PROJECT_ID, rates=request.rates, update_time=STAMP)
        return api.SetPriceResponse(price=kept)

    async def ListPrices(self, request: api.ListPricesRequest, _: Any) -> api.ListPricesResponse:  # type: ignore[override]
        self._note(request)
        return api.ListPricesResponse()

    async def SetQuota(self, request: api.SetQuotaRequest, _: Any) -> api.SetQuotaResponse:  # type: ignore[override]
        self._note(request)
        return api.SetQuotaResponse(quota=_kept(request))

    async def GetQuota(self, request: api.GetQuotaRequest, _: Any) -> api.GetQuotaResponse:  # type: ignore[override]
        self._note(request)
        return api.GetQuotaResponse()

    async def SetCap(self, request: api.SetCapRequest, _: Any) -> api.SetCapResponse:  # type: ignore[override]
        self._note(request)
        return api.SetCapResponse(cap=_kept(request))

    async def GetCap(self, request: api.GetCapRequest, _: Any) -> api.GetCapResponse:  # type: ignore[override]
        self._note(request)
        return api.GetCapResponse()

    async def GetUsage(self, request: api.GetUsageRequest, _: Any) -> api.GetUsageResponse:  # type: ignore[override]
        self._note(request)
        return api.GetUsageResponse(periods=[PeriodUsage(period=PERIOD_DAY)])

    async def SetTerms(self, request: api.SetTermsRequest, _: Any) -> api.SetTermsResponse:  # type: ignore[override]
        self._note(request)
        return api.SetTermsResponse(terms=request.terms)

    async def GetTerms(self, request: api.GetTermsRequest, _: Any) -> api.GetTermsResponse:  # type: ignore[override]
        self._note(request)
        return api.GetTermsResponse(terms=Terms(credits_per_usd=1000, runs_per_minute=60))


def _kept(request: api.SetQuotaRequest | api.SetCapRequest) -> PeriodUsage | None:
    return PeriodUsage(period=request.period, limit=request.limit) if request.HasField("limit") else None
