"""The published price list (genai-prices, data inside the wheel, no network) as rates.

The list matches slugs by patterns too, so that one that is not on it may get the price of
one it resembles. Here a slug is priced only when it is listed (docs/decisions/0013).
"""

import re
from datetime import datetime
from decimal import Decimal
from functools import lru_cache

from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import ClauseEquals, ClauseOr, MatchLogic, ModelInfo, ModelPrice, TieredPrices

from kit.money import NANO_PER_USD
from kit.pricing import Prices, Rates, Tier

Entry = Decimal | TieredPrices | None
# The classes that `Prices` knows. What a model asks for other kinds of tokens (audio, say) is not read: no call
# of ours has any.
PRICED = {"input_mtok", "cache_read_mtok", "cache_write_mtok", "output_mtok", "requests_kcount"}
REQUESTS_PER_PRICE = 1000
MODELS_KNOWN = 1024  # slugs looked up before; the list is the wheel's and does not change while we run
# How makers name a snapshot of a model: claude-sonnet-4-5-20250929, gpt-4o-mini-2024-07-18.
SNAPSHOT = re.compile(r"-20\d\d(-?)(0[1-9]|1[0-2])\1(0[1-9]|[12]\d|3[01])\Z")


def published_rates(model: str, at: datetime) -> Rates | None:
    """The rates of a listed model at a time: some have a price by night, or from a day on.

    None when it is not listed or its prices are not exact in nano-USD.
    """
    listed = _listed(model.lower())
    try:
        return None if listed is None else rates_of(listed.get_prices(at))
    except ValueError:
        return None


@lru_cache(MODELS_KNOWN)
def _listed(slug: str) -> ModelInfo | None:
    """The model that is listed under this very name, or of which the name is a dated snapshot, at its maker."""
    makers = (one for one in get_snapshot().providers if one.model_match is not None and one.model_match.is_match(slug))
    maker = next(makers, None)
    found = None if maker is None else maker.find_model(slug)
    if found is None:
        return None
    return found if {slug, SNAPSHOT.sub("", slug)} & {found.id.lower(), *_names(found.match)} else None


def _names(match: MatchLogic) -> set[str]:
    """The names a model is listed under, patterns left out."""
    if isinstance(match, ClauseEquals):
        return {match.equals.lower()}
    return set().union(*map(_names, match.or_)) if isinstance(match, ClauseOr) else set()


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
