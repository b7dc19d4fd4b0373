"""The published price list (genai-prices, data inside the wheel, no network) as rates."""

from decimal import Decimal
from functools import lru_cache

from genai_prices import Usage, calc_price
from genai_prices.types import ModelPrice, TieredPrices

from kit.money import NANO_PER_USD
from kit.pricing import Prices, Rates, Tier

Entry = Decimal | TieredPrices | None
# The classes that `Prices` knows. What a model asks for other kinds of tokens (audio, say) is not read: no call
# of ours has any.
PRICED = {"input_mtok", "cache_read_mtok", "cache_write_mtok", "output_mtok", "requests_kcount"}
REQUESTS_PER_PRICE = 1000


@lru_cache(maxsize=1024)
def published_rates(model: str) -> Rates | None:
    """The rates of a model on the list; None when it is not on it or its prices are not exact in nano-USD."""
    try:
        return rates_of(calc_price(Usage(input_tokens=0, output_tokens=0), model).model_price)
    except (LookupError, ValueError):
        return None


def rates_of(price: ModelPrice) -> Rates:
    """Rates from the list's own data. Raises ValueError when they cannot be told exactly."""
    entries: dict[str, Entry] = {name: value for name, value in vars(price).items() if name in PRICED}
    if not entries.get("input_mtok"):
        raise ValueError("no price for input")
    borders = {tier.start for entry in entries.values() if isinstance(entry, TieredPrices) for tier in entry.tiers}
    tiers = tuple(Tier(border, _prices(entries, border + 1)) for border in sorted(borders))
    fee = _nano(entries.get("requests_kcount"), 0) or 0
    if fee % REQUESTS_PER_PRICE:
        raise ValueError("a request's fee is finer than a nano-USD")
    return Rates(_prices(entries, 0), tiers, fee // REQUESTS_PER_PRICE)


def _prices(entries: dict[str, Entry], tokens: int) -> Prices:
    whole = _nano(entries["input_mtok"], tokens) or 0
    cached, write = (_nano(entries.get(name), tokens) for name in ("cache_read_mtok", "cache_write_mtok"))
    output = _nano(entries.get("output_mtok"), tokens) or 0  # embeddings have none
    return Prices(whole, whole if cached is None else cached, whole if write is None else write, output)


def _nano(entry: Entry, tokens: int) -> int | None:
    """Nano-USD of an entry for a call with so much input."""
    if isinstance(entry, TieredPrices):
        reached = [tier.price for tier in entry.tiers if tokens > tier.start]
        entry = reached[-1] if reached else entry.base
    if entry is None:
        return None
    found = int(entry * NANO_PER_USD)
    if found != entry * NANO_PER_USD:
        raise ValueError("a price is finer than a nano-USD a million tokens")
    return found
