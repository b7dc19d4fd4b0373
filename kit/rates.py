"""Rates as they travel and as they are computed with."""

from kit.pricing import Prices, Rates, Tier
from threadloom.common.v1.money_pb2 import Money
from threadloom.common.v1.rates_pb2 import PriceTier, TokenPrices
from threadloom.common.v1.rates_pb2 import Rates as RatesMessage


def from_message(given: RatesMessage) -> Rates:
    """Rates to compute with. Raises ValueError when they are out of bounds."""
    tiers = tuple(Tier(tier.above_input_tokens, _prices(tier.prices)) for tier in given.tiers)
    return Rates(_prices(given.base), tiers, given.request_fee.nano_usd)


def to_message(rates: Rates) -> RatesMessage:
    """Rates to store or send, with a price for each class."""
    tiers = [PriceTier(above_input_tokens=tier.above, prices=_message(tier.prices)) for tier in rates.tiers]
    return RatesMessage(base=_message(rates.base), tiers=tiers, request_fee=Money(nano_usd=rates.request_fee))


def _prices(given: TokenPrices) -> Prices:
    whole = given.input.nano_usd
    cached = given.cached_input.nano_usd if given.HasField("cached_input") else whole
    write = given.cache_write.nano_usd if given.HasField("cache_write") else whole
    return Prices(whole, cached, write, given.output.nano_usd)


def _message(prices: Prices) -> TokenPrices:
    return TokenPrices(
        input=Money(nano_usd=prices.input),
        cached_input=Money(nano_usd=prices.cached_input),
        cache_write=Money(nano_usd=prices.cache_write),
        output=Money(nano_usd=prices.output),
    )
