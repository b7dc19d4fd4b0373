"""Prices of models over gRPC, and the command `price`, which sets one."""

from dataclasses import dataclass
from datetime import UTC, datetime

from deploy.local.calls import as_system, channel
from deploy.local.data_folder import DataFolder
from deploy.local.processes import StackError
from deploy.local.running import project_called, running_stack
from kit.money import NANO_PER_USD, format_usd, read_usd
from kit.pricing import FEE_MAX, PRICE_MAX
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.common.v1.money_pb2 import Money
from threadloom.common.v1.rates_pb2 import Rates, TokenPrices

SERVICE = "billing"
PAGE_SIZE = 200  # the most the service gives
# What small models cost. The demo model is free, but an answer that costs nothing shows nothing.
DEMO_RATES = Rates(base=TokenPrices(input=Money(nano_usd=read_usd("0.15")), output=Money(nano_usd=read_usd("0.60"))))
USAGE = """\
make price MODEL=gpt-x IN=0.15 OUT=0.60

sets what a model costs, in USD per million tokens. Optional:
  CACHED=0.075      input read from the provider's cache; like IN when left out
  CACHE_WRITE=0.19  input written to the provider's cache; like IN when left out
  FEE=0.01          USD for each call, besides its tokens
  PROJECT=acme      only for this project, instead of for every one"""


class Prices:
    """The prices of a billing service at an address, called as another service of ours. Raises StackError."""

    def __init__(self, address: str, credential: str) -> None:
        self._address, self._credential = address, credential

    def set_price(self, model: str, rates: Rates, project: str = "") -> Rates:
        """Sets a model's price, for every project unless the id of one is given; the rates as kept."""
        request = api.SetPriceRequest(model=model, rates=rates, project_id=project)
        with channel(SERVICE, self._address) as billing:
            return BillingServiceStub(billing).SetPrice(request, **as_system(self._credential)).price.rates

    def is_known(self, model: str, project: str) -> bool:
        """Whether a project's calls of the model have a price: one that was set, or a published one."""
        from services.billing.catalogue import published_rates  # the whole list: no other command waits for it

        return model in self._models(project) or published_rates(model, datetime.now(UTC)) is not None

    def _models(self, project: str) -> set[str]:
        """The models with a price that was set for the project or for every one."""
        found: set[str] = set()
        request = api.ListPricesRequest(project_id=project, page_size=PAGE_SIZE)
        with channel(SERVICE, self._address) as billing:
            while True:
                page = BillingServiceStub(billing).ListPrices(request, **as_system(self._credential))
                found |= {price.model for price in page.prices}
                request.page_token = page.next_page_token
                if not page.next_page_token:
                    return found


@dataclass(frozen=True)
class PriceWish:
    """What `make price` was given, as it was written; empty: left out."""

    model: str
    input: str
    output: str
    cached_input: str = ""
    cache_write: str = ""
    fee: str = ""
    project: str = ""

    def rates(self) -> Rates:
        """The rates meant. Raises StackError."""
        if not self.model or not self.input or not self.output:
            missing = {"MODEL": self.model, "IN": self.input, "OUT": self.output}
            names = ", ".join(name for name, given in missing.items() if not given)
            raise StackError(f"{names} must be given.\n\n{USAGE}")
        prices = TokenPrices(
            input=_amount("IN", self.input, PRICE_MAX),
            cached_input=_amount("CACHED", self.cached_input, PRICE_MAX),
            cache_write=_amount("CACHE_WRITE", self.cache_write, PRICE_MAX),
            output=_amount("OUT", self.output, PRICE_MAX),
        )
        return Rates(base=prices, request_fee=_amount("FEE", self.fee, FEE_MAX))


def price_model(folder: DataFolder, wish: PriceWish) -> None:
    """Sets a price in the running stack and prints it. Raises StackError."""
    rates = wish.rates()
    stack = running_stack(folder)
    project = project_called(stack, wish.project).id if wish.project else ""
    kept = Prices(stack["grpc"][SERVICE][0], stack["service_credential"]).set_price(wish.model, rates, project)
    print(f"model         {wish.model}")
    print(f"project       {wish.project or 'every one that has no price of its own'}")
    print(f"input         {_written(kept.base.input)} USD per million tokens")
    print(f"cached input  {_written(kept.base.cached_input)}")
    print(f"cache write   {_written(kept.base.cache_write)}")
    print(f"output        {_written(kept.base.output)}")
    print(f"fee           {_written(kept.request_fee)} USD per call")


def _amount(name: str, raw: str, most: int) -> Money | None:
    if not raw:
        return None
    try:
        nano = read_usd(raw)
    except ValueError as error:
        raise StackError(f"{name}={raw}: {error}") from None
    if not 0 <= nano <= most:
        raise StackError(f"{name}={raw}: must be 0 to {most // NANO_PER_USD:,} USD")
    return Money(nano_usd=nano)


def _written(amount: Money) -> str:
    return format_usd(amount.nano_usd).rstrip("0").rstrip(".")
