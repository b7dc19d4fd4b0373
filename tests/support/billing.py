"""The billing service as tests meet it: a client in the role `system`, and its tables as the superuser sees them."""

from collections.abc import Callable
from typing import Any, Self
from uuid import UUID

import grpc
import psycopg
from psycopg.rows import namedtuple_row

from kit.callers import SYSTEM
from kit.channels import call_metadata
from kit.ids import new_id
from services.conversation.domain.tokens import tokenizer_of
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.billing.v1.price_pb2 import Price
from threadloom.billing.v1.usage_pb2 import LedgerEntry, Period, PeriodUsage
from threadloom.common.v1.money_pb2 import Money
from threadloom.common.v1.rates_pb2 import Rates, TokenPrices

CALL_SECONDS = 10.0
PAGE_SIZE = 200  # the most the service gives
# What a cluster's model costs: nano-USD for a token of each class. All different, so that no mix-up goes unseen.
INPUT_NANO, CACHED_INPUT_NANO, OUTPUT_NANO = 1_000, 100, 2_000
TOKENS_PER_PRICE = 1_000_000
# The same as prices: 1.00, 0.10 and 2.00 USD for a million tokens.
RATES = Rates(
    base=TokenPrices(
        input=Money(nano_usd=INPUT_NANO * TOKENS_PER_PRICE),
        cached_input=Money(nano_usd=CACHED_INPUT_NANO * TOKENS_PER_PRICE),
        output=Money(nano_usd=OUTPUT_NANO * TOKENS_PER_PRICE),
    )
)


# How the service counts for models nobody described.
TOKENIZER = tokenizer_of("fake-model")


def input_bound(*texts: str) -> int:
    """The input tokens a hold is for, of a request with messages of these texts."""
    messages = [{"content": text} for text in texts]
    return TOKENIZER.input_bound(messages, TOKENIZER.count_input(messages))


def cost_nano(input_tokens: int, output_tokens: int, cached_input_tokens: int = 0) -> int:
    """What a call of a cluster's model costs. Cached tokens are a part of the input."""
    uncached = input_tokens - cached_input_tokens
    return INPUT_NANO * uncached + CACHED_INPUT_NANO * cached_input_tokens + OUTPUT_NANO * output_tokens


class Billing:
    """BillingService at an address, called as another service of ours. Blocks; raises grpc.RpcError."""

    def __init__(self, address: str, credential: str) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)])
        self._stub, self._credential = BillingServiceStub(self._channel), credential

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def set_price(self, model: str, rates: Rates = RATES, project: str = "") -> None:
        """Sets a model's price, for every project unless one is named."""
        self._call(self._stub.SetPrice, api.SetPriceRequest(model=model, rates=rates, project_id=project))

    def prices(self, project: str = "") -> list[Price]:
        """The prices that were set for every project, and those of one if it is named; the first 200."""
        request = api.ListPricesRequest(project_id=project, page_size=PAGE_SIZE)
        return list(self._call(self._stub.ListPrices, request).prices)

    def set_quota(
        self, project: str, user: str, nano: int | None, period: "Period.ValueType" = Period.PERIOD_TOTAL
    ) -> None:
        """Sets a user's quota in nano-USD; None removes it."""
        limit = None if nano is None else Money(nano_usd=nano)
        request = api.SetQuotaRequest(project_id=project, user_id=user, period=period, limit=limit)
        self._call(self._stub.SetQuota, request)

    def set_cap(self, project: str, nano: int | None, period: "Period.ValueType" = Period.PERIOD_TOTAL) -> None:
        """Sets a project's cap in nano-USD; None removes it."""
        limit = None if nano is None else Money(nano_usd=nano)
        self._call(self._stub.SetCap, api.SetCapRequest(project_id=project, period=period, limit=limit))

    def usage(self, project: str, user: str = "") -> "dict[Period.ValueType, PeriodUsage]":
        """What a user, or the whole project, spent and has held in the periods that run now."""
        answer = self._call(self._stub.GetUsage, api.GetUsageRequest(project_id=project, user_id=user))
        return {usage.period: usage for usage in answer.periods}

    def ledger(self, project: str, user: str = "") -> list[LedgerEntry]:
        """Every entry of a project, or of one of its users, newest first."""
        found: list[LedgerEntry] = []
        token = ""
        while True:
            request = api.ListLedgerRequest(project_id=project, user_id=user, page_size=PAGE_SIZE, page_token=token)
            page = self._call(self._stub.ListLedger, request)
            found += page.entries
            token = page.next_page_token
            if not token:
                return found

    def _call(self, method: Callable[..., Any], request: object) -> Any:
        metadata = call_metadata(self._credential, SYSTEM, str(new_id()))
        return method(request, metadata=metadata, timeout=CALL_SECONDS)


class Books:
    """The tables behind it, read past every rule. Rows have a field for each column."""

    def __init__(self, admin_url: str) -> None:
        self._url = admin_url

    def ledger(self, project: str | UUID) -> list[Any]:
        """A project's rows of billing.cost_ledger, oldest first."""
        query = "SELECT * FROM billing.cost_ledger WHERE project_id = %s ORDER BY booked_at, api_call_id"
        return self._rows(query, project)

    def open_holds(self) -> list[Any]:
        """The rows of billing.holds whose money is still set aside, of every project."""
        return self._rows("SELECT * FROM billing.holds WHERE status = 'open' ORDER BY placed_at")

    def outbox_rows(self) -> int:
        """How many settlements and releases conversation still has to deliver."""
        ((count,),) = self._rows("SELECT count(*) FROM conversation.outbox")
        return int(count)

    def _rows(self, query: str, *arguments: object) -> list[Any]:
        with psycopg.connect(self._url, row_factory=namedtuple_row) as connection:
            return connection.execute(query.encode(), arguments).fetchall()
