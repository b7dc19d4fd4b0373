"""The billing service beside a conversation service: what it booked, and that everybody agrees about it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from grpc import aio

from kit.callers import SYSTEM
from kit.channels import CHANNEL_OPTIONS, call_metadata
from kit.settings import load
from services.billing.server import serve
from services.billing.settings import Settings
from services.conversation.billing import Payer
from services.conversation.limits import OUTBOX_LEASE_SECONDS
from tests.contract.conversation.harness import CREDENTIAL, WAIT_SECONDS, Sql, eventually
from tests.support.billing import RATES
from tests.support.books import BREACHES, WAITING
from tests.support.databases import Database
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.billing.v1.price_pb2 import Terms
from threadloom.billing.v1.usage_pb2 import Period, TokenUsage
from threadloom.common.v1.money_pb2 import Money
from threadloom.common.v1.rates_pb2 import Rates

# Every model these tests name. Whatever it is called, it costs the same.
MODELS = ("fake-model", "thread-model", "run-model")
LISTEN_SECONDS = 1.0
CREDITS_PER_USD = 1_000_000_000  # a credit a nano-USD, so that nothing is rounded away


class Entry(NamedTuple):
    """A ledger row."""

    model: str
    input: int
    output: int
    cached: int
    reasoning: int
    cost: int
    estimated: bool
    above_hold: bool
    late: bool


class Books:
    """A running billing service and its tables."""

    def __init__(self, server: "_Server", channel: aio.Channel, sql: Sql) -> None:
        self.address, self.sql = server.address, sql
        self._server, self._stub = server, BillingServiceStub(channel)

    async def price(self, model: str, rates: Rates = RATES) -> None:
        """Sets a price for every project."""
        await self._call(self._stub.SetPrice, api.SetPriceRequest(model=model, rates=rates))

    async def quota(
        self, project: UUID, user: str, nano: int, period: "Period.ValueType" = Period.PERIOD_TOTAL
    ) -> None:
        """Sets a user's quota."""
        limit = Money(nano_usd=nano)
        request = api.SetQuotaRequest(project_id=str(project), user_id=user, period=period, limit=limit)
        await self._call(self._stub.SetQuota, request)

    async def cap(self, project: UUID, nano: int, period: "Period.ValueType" = Period.PERIOD_TOTAL) -> None:
        """Sets a project's cap."""
        request = api.SetCapRequest(project_id=str(project), period=period, limit=Money(nano_usd=nano))
        await self._call(self._stub.SetCap, request)

    async def runs_per_minute(self, project: UUID, runs: int) -> None:
        """Sets a project's rate limit."""
        request = api.SetTermsRequest(project_id=str(project), terms=Terms(runs_per_minute=runs))
        await self._call(self._stub.SetTerms, request)

    async def sums(self, user: str = "") -> tuple[int, int]:
        """(held, spent) of all time: of a user, or of the whole of the one project that spends."""
        query = "SELECT held_nano, spent_nano FROM billing.accounts WHERE user_id = %s AND period = 'total'"
        rows = await self.sql.rows(query, user)
        return rows[0] if rows else (0, 0)

    async def ledger(self) -> list[Entry]:
        """Every row, oldest first."""
        query = (
            "SELECT model, tokens_in, tokens_out, cached_tokens, thinking_tokens, cost_nano, estimated, above_hold,"
            " late FROM billing.cost_ledger ORDER BY booked_at, api_call_id"
        )
        return [Entry(*row) for row in await self.sql.rows(query)]

    async def settled(self) -> list[Entry]:
        """The ledger, once everything that waits in the outbox has been received."""
        await eventually(self._is_told, OUTBOX_LEASE_SECONDS + WAIT_SECONDS)
        return await self.ledger()

    async def hold(self, payer: Payer, call: UUID, input_tokens: int, output_tokens: int) -> bytes:
        """Sets money aside as a conversation service does; the rates it would store."""
        request = api.PlaceHoldRequest(
            api_call_id=str(call),
            project_id=str(payer.project_id),
            user_id=payer.user_id,
            run_id=str(payer.run_id),
            thread_id=str(payer.thread_id),
            message_id=str(payer.message_id),
            model=payer.model,
            input_tokens_max=input_tokens,
            max_output_tokens=output_tokens,
            min_output_tokens=1,
        )
        rates: bytes = (await self._call(self._stub.PlaceHold, request)).hold.rates.SerializeToString()
        return rates

    async def settle(self, project: UUID, call: UUID, input_tokens: int, output_tokens: int, cost: int) -> None:
        """Books a call as an estimate, as a conversation service does."""
        usage = TokenUsage(input_tokens=input_tokens, output_tokens=output_tokens)
        request = api.SettleRequest(
            api_call_id=str(call), project_id=str(project), usage=usage, estimated=True, cost=Money(nano_usd=cost)
        )
        await self._call(self._stub.Settle, request)

    async def listen(self) -> None:
        """Gives the services a moment to tell what waits in the outbox; some tests leave none that could."""
        with suppress(AssertionError):
            await eventually(self._is_told, LISTEN_SECONDS)

    async def check(self) -> None:
        """Nothing breaks what must be true of money."""
        for what, query in BREACHES.items():
            assert await self.sql.rows(query) == [], what

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Billing is gone for so long; it comes back at its address."""
        await self._server.stop()
        try:
            yield
        finally:
            await self._server.start()

    async def _is_told(self) -> bool:
        return await self.sql.value(WAITING) == 0

    async def _call(self, method: Any, request: object) -> Any:
        return await method(request, metadata=call_metadata(CREDENTIAL, SYSTEM, ""), timeout=WAIT_SECONDS)


class _Server:
    """The service itself, started and stopped at one port."""

    def __init__(self, database: Database) -> None:
        self._environ = {
            "THREADLOOM_GRPC_LISTEN": "127.0.0.1:0",
            "BILLING_DATABASE_URL": database.billing_request_url,
            "BILLING_ENGINE_DATABASE_URL": database.billing_engine_url,
            "THREADLOOM_SERVICE_CREDENTIAL": CREDENTIAL,
            "BILLING_RUNS_PER_MINUTE": "1000000",
            "BILLING_CREDITS_PER_USD": str(CREDITS_PER_USD),
        }

    @property
    def address(self) -> str:
        """Where it listens, once it was started."""
        return self._environ["THREADLOOM_GRPC_LISTEN"]

    async def start(self) -> None:
        """Starts it, at the port it had."""
        self._stopped, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(serve(load(Settings, self._environ), self._stopped, ready))
        await asyncio.wait({self._task, ready}, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        self._environ["THREADLOOM_GRPC_LISTEN"] = f"127.0.0.1:{await ready}"

    async def stop(self) -> None:
        """Stops it."""
        self._stopped.set()
        await asyncio.wait_for(self._task, WAIT_SECONDS)


@asynccontextmanager
async def open_books(database: Database) -> AsyncIterator[Books]:
    """A billing service on the database, with prices."""
    server = _Server(database)
    await server.start()
    async with (
        aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel,
        await psycopg.AsyncConnection.connect(database.admin_url, autocommit=True) as connection,
    ):
        found = Books(server, channel, Sql(connection))
        for model in MODELS:
            await found.price(model)
        yield found
    await server.stop()
