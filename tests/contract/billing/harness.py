"""A real billing service in this process, and callers who talk to it over gRPC."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from grpc import aio

from kit.callers import Caller
from kit.channels import CHANNEL_OPTIONS, call_metadata, to_service_error
from kit.errors import ServiceError
from kit.ids import new_id
from services.billing.upkeep import Upkeep
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.billing.v1.hold_pb2 import Hold
from threadloom.billing.v1.usage_pb2 import TokenUsage
from threadloom.common.v1.money_pb2 import Money
from threadloom.common.v1.rates_pb2 import Rates, TokenPrices

CREDENTIAL = "service-credential-of-tests"
WAIT_SECONDS = 20.0
# A token costs 1,000 nano-USD, in or out.
NANO = 1000
RATES = Rates(base=TokenPrices(input=Money(nano_usd=NANO * 10**6), output=Money(nano_usd=NANO * 10**6)))
MODEL = "test-model"
CREDITS_PER_USD = 1234  # of the deployment


class Person:
    """A caller at the service."""

    def __init__(self, channel: aio.Channel, caller: Caller) -> None:
        self.caller = caller
        self.metadata = call_metadata(CREDENTIAL, caller, "request-of-tests")
        self.billing = BillingServiceStub(channel)

    async def call(self, method: Callable[..., Any], request: object) -> Any:
        """The answer; raises the ServiceError it was refused with."""
        try:
            return await method(request, metadata=self.metadata, timeout=WAIT_SECONDS)
        except aio.AioRpcError as error:
            raise to_service_error(error) from error

    async def refusal(self, method: Callable[..., Any], request: object) -> ServiceError:
        """The error it is refused with."""
        try:
            found = await self.call(method, request)
        except ServiceError as error:
            return error
        raise AssertionError(f"answered: {found}")


@dataclass
class Service:
    """A running service, its upkeep to call by hand, and the database as its superuser sees it."""

    channel: aio.Channel
    people: dict[str, Person]
    upkeep: Upkeep
    sql: psycopg.AsyncConnection

    @property
    def system(self) -> Person:
        return self.people["system"]

    @property
    def role(self) -> Person:
        return self.people["role"]

    @property
    def project(self) -> UUID:
        assert self.role.caller.project is not None
        return self.role.caller.project

    def ask(self, **fields: Any) -> api.PlaceHoldRequest:
        """A request for a hold of alice's: 10 tokens in and 10 out, so 20,000 nano-USD."""
        usual: dict[str, Any] = {
            "api_call_id": str(new_id()), "project_id": str(self.project), "user_id": "alice",
            "run_id": str(new_id()), "thread_id": str(new_id()), "message_id": str(new_id()), "model": MODEL,
            "input_tokens_max": 10, "max_output_tokens": 10, "min_output_tokens": 10,
        }  # fmt: skip
        return api.PlaceHoldRequest(**(usual | fields))

    async def place(self, request: api.PlaceHoldRequest) -> Hold:
        found: Hold = (await self.system.call(self.system.billing.PlaceHold, request)).hold
        return found

    async def settle(self, id: str, tokens_in: int, tokens_out: int, cost: int | None = None) -> Any:
        """The entry of a call with so many tokens."""
        total = NANO * (tokens_in + tokens_out) if cost is None else cost
        request = api.SettleRequest(
            api_call_id=id,
            project_id=str(self.project),
            usage=TokenUsage(input_tokens=tokens_in, output_tokens=tokens_out),
            cost=Money(nano_usd=total),
        )
        return (await self.system.call(self.system.billing.Settle, request)).entry

    async def release(self, request: api.PlaceHoldRequest) -> int:
        """The state of a call's hold afterwards."""
        return int((await self.system.call(self.system.billing.Release, release_of(request))).state)

    async def cap(self, nano: int, period: int = 3) -> None:
        request = api.SetCapRequest(period=period, limit=Money(nano_usd=nano))  # type: ignore[arg-type]
        await self.role.call(self.role.billing.SetCap, request)

    async def quota(self, nano: int, user: str = "alice", period: int = 3) -> None:
        request = api.SetQuotaRequest(user_id=user, period=period, limit=Money(nano_usd=nano))  # type: ignore[arg-type]
        await self.role.call(self.role.billing.SetQuota, request)

    async def sums(self) -> tuple[int, int]:
        """(held, spent) of the project, all time."""
        answer = await self.role.call(self.role.billing.GetUsage, api.GetUsageRequest())
        return answer.periods[2].held.nano_usd, answer.periods[2].spent.nano_usd

    async def rows(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        cursor = await self.sql.execute(query.encode(), arguments)
        return await cursor.fetchall() if cursor.description else []


def release_of(request: api.PlaceHoldRequest, **fields: str) -> api.ReleaseRequest:
    """The release of the call a hold is asked for."""
    usual = {field.name: getattr(request, field.name) for field in api.ReleaseRequest.DESCRIPTOR.fields}
    return api.ReleaseRequest(**(usual | fields))


async def outcomes(service: Service, requests: list[api.PlaceHoldRequest]) -> list[Hold | ServiceError]:
    """What becomes of requests that are sent at once."""
    found = await asyncio.gather(*(service.place(request) for request in requests), return_exceptions=True)
    assert all(isinstance(one, Hold | ServiceError) for one in found), found
    return found  # type: ignore[return-value]


def reasons(found: list[Hold | ServiceError]) -> list[str]:
    """The refusals among them."""
    return [one.reason for one in found if isinstance(one, ServiceError)]


def open_service(port: int, callers: dict[str, Caller], upkeep: Upkeep, sql: psycopg.AsyncConnection) -> Service:
    """The service at a port as these callers see it."""
    channel = aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
    return Service(channel, {name: Person(channel, caller) for name, caller in callers.items()}, upkeep, sql)
