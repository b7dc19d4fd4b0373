"""What a model call costs: rates × usage in integers, rounded once a call (durability.md 26, 27).

Prices are integers of nano-USD per million tokens, so that every published price is
exact; token counts times prices are therefore 10⁻⁶ nano-USD ("parts" below) until
the one rounding at the end. Pure: billing and conversation compute the same cost.
"""

from dataclasses import dataclass, fields

from kit.money import half_even

TOKENS_PER_PRICE = 1_000_000
# Bounds that keep every cost within kit.money.NANO_MAX: more tokens than any model
# reads, 100,000 USD a million tokens, 1,000 USD a request.
TOKENS_MAX = 1_000_000_000
PRICE_MAX = 100_000 * 1_000_000_000
FEE_MAX = 1_000 * 1_000_000_000


@dataclass(frozen=True)
class Prices:
    """Nano-USD per million tokens of each class. A class without a price of its own has its whole's price."""

    input: int
    cached_input: int
    cache_write: int
    output: int  # reasoning included

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), PRICE_MAX)

    @property
    def dearest_input(self) -> int:
        """The price of an input token whose class is not known yet."""
        return max(self.input, self.cached_input, self.cache_write)


@dataclass(frozen=True)
class Tier:
    """Prices of a whole call whose input is more than `above` tokens."""

    above: int
    prices: Prices

    def __post_init__(self) -> None:
        _check("above", self.above, TOKENS_MAX)


@dataclass(frozen=True)
class Rates:
    """A model's prices at one moment. `tiers` rise by `above`; `request_fee` is nano-USD a call."""

    base: Prices
    tiers: tuple[Tier, ...] = ()
    request_fee: int = 0

    def __post_init__(self) -> None:
        _check("request_fee", self.request_fee, FEE_MAX)
        borders = [tier.above for tier in self.tiers]
        if borders != sorted(set(borders)):
            raise ValueError("tiers must rise by their input size")

    def prices_for(self, input_tokens: int) -> Prices:
        """The prices of a call with so much input. They hold for all of its tokens, not only those above."""
        found = self.base
        for tier in self.tiers:
            if input_tokens > tier.above:
                found = tier.prices
        return found


@dataclass(frozen=True)
class Usage:
    """A call's tokens. Every token is of one price class: adapters normalise what providers report.

    `cached_input` and `cache_write` are disjoint parts of `input`, `reasoning` is a part of `output`.
    """

    input: int
    output: int
    cached_input: int = 0
    cache_write: int = 0
    reasoning: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), TOKENS_MAX)
        if self.cached_input + self.cache_write > self.input:
            raise ValueError("cached_input and cache_write are parts of input")
        if self.reasoning > self.output:
            raise ValueError("reasoning is a part of output")


def cost(rates: Rates, usage: Usage) -> int:
    """Nano-USD of the call, rounded half even."""
    prices = rates.prices_for(usage.input)
    parts = (
        prices.input * (usage.input - usage.cached_input - usage.cache_write)
        + prices.cached_input * usage.cached_input
        + prices.cache_write * usage.cache_write
        + prices.output * usage.output  # reasoning is in it
        + rates.request_fee * TOKENS_PER_PRICE
    )
    return half_even(parts, TOKENS_PER_PRICE)


def upper_bound(rates: Rates, input_upper: int, max_output: int) -> int:
    """Nano-USD that no call with at most so many tokens passes: what a hold takes. Rounded up."""
    _check("input_upper", input_upper, TOKENS_MAX)
    _check("max_output", max_output, TOKENS_MAX)
    parts = max(fixed + price * max_output for fixed, price in _worst(rates, input_upper))
    return -(-parts // TOKENS_PER_PRICE)


def largest_output(rates: Rates, input_upper: int, nano: int) -> int | None:
    """The most output tokens for which `upper_bound` is at most `nano`; None when not even 0 is paid."""
    _check("input_upper", input_upper, TOKENS_MAX)
    most = TOKENS_MAX
    for fixed, price in _worst(rates, input_upper):
        left = nano * TOKENS_PER_PRICE - fixed
        if left < 0:
            return None
        if price:
            most = min(most, left // price)
    return most


def _worst(rates: Rates, input_upper: int) -> list[tuple[int, int]]:
    """(parts without output, output price) of the dearest call in each tier the input may end up in.

    The input is only bounded from above, and a higher tier may be the cheaper one,
    so the tier of the bound alone could hold too little.
    """
    steps = [(0, rates.base), *((tier.above, tier.prices) for tier in rates.tiers)]
    tops = [above for above, _ in steps[1:]] + [TOKENS_MAX]
    fee = rates.request_fee * TOKENS_PER_PRICE
    return [
        (prices.dearest_input * min(top, input_upper) + fee, prices.output)
        for (above, prices), top in zip(steps, tops, strict=True)
        if input_upper > above or not above
    ]


def _check(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be 0 to {most}")
