"""A call's cost is exact, its hold is never too small, and no token is counted twice."""

from decimal import Decimal
from fractions import Fraction

import genai_prices
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.money import NANO_MAX, format_usd
from kit.pricing import (
    FEE_MAX,
    PRICE_MAX,
    TOKENS_MAX,
    Prices,
    Rates,
    Tier,
    Usage,
    cost,
    largest_output,
    upper_bound,
)
from services.billing.catalogue import rates_of

QUICK = settings(derandomize=True, max_examples=300, deadline=None)
USD = 10**9
TOKENS = st.integers(0, 3_000_000)
PRICES = st.builds(Prices, *[st.integers(0, 200 * USD)] * 4)
CLASSES = ("input", "cached_input", "cache_write", "output")


@st.composite
def rates(draw: st.DrawFn, *, rising: bool = False) -> Rates:
    """Any rates; with `rising`, no tier is cheaper than the one below."""
    base, tiers = draw(PRICES), []
    below = base
    for above in sorted(draw(st.sets(st.integers(1, 2_000_000), max_size=3))):
        found = draw(PRICES)
        if rising:
            found = Prices(*(max(getattr(found, name), getattr(below, name)) for name in CLASSES))
        tiers.append(Tier(above, found))
        below = found
    return Rates(base, tuple(tiers), draw(st.integers(0, USD)))


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    total, output = draw(TOKENS), draw(TOKENS)
    cached = draw(st.integers(0, total))
    return Usage(total, output, cached, draw(st.integers(0, total - cached)), draw(st.integers(0, output)))


@given(rates(), usages())
@QUICK
def test_a_cost_is_the_exact_sum_of_its_classes_rounded_once(found: Rates, usage: Usage) -> None:
    prices = found.prices_for(usage.input)
    plain = usage.input - usage.cached_input - usage.cache_write
    exact = Fraction(
        plain * prices.input
        + usage.cached_input * prices.cached_input
        + usage.cache_write * prices.cache_write
        + usage.output * prices.output,
        10**6,
    )
    assert cost(found, usage) == round(exact + found.request_fee)


@given(rates(rising=True), usages(), st.integers(0, 1000), st.integers(0, 1000))
@QUICK
def test_more_tokens_never_cost_less(found: Rates, usage: Usage, more_in: int, more_out: int) -> None:
    more = Usage(usage.input + more_in, usage.output + more_out, usage.cached_input, usage.cache_write)
    assert cost(found, more) >= cost(found, usage)


@given(rates(), usages())
@QUICK
def test_reasoning_is_not_added_to_the_output_it_is_part_of(found: Rates, usage: Usage) -> None:
    assert cost(found, usage) == cost(found, Usage(usage.input, usage.output, usage.cached_input, usage.cache_write))


@given(st.integers(0, 200 * USD), st.integers(0, 200 * USD), usages())
@QUICK
def test_classes_of_one_price_cost_as_much_as_their_whole(price: int, out: int, usage: Usage) -> None:
    found = Rates(Prices(price, price, price, out))
    assert cost(found, usage) == cost(found, Usage(usage.input, usage.output))


@given(rates(), usages(), st.integers(0, 1000), st.integers(0, 1000))
@QUICK
def test_no_call_within_its_bounds_costs_more_than_its_hold(
    found: Rates, usage: Usage, spare_in: int, spare_out: int
) -> None:
    assert cost(found, usage) <= upper_bound(found, usage.input + spare_in, usage.output + spare_out)


@given(rates(), TOKENS, st.integers(0, 10**12))
@QUICK
def test_the_largest_output_is_paid_and_one_more_is_not(found: Rates, input_upper: int, nano: int) -> None:
    most = largest_output(found, input_upper, nano)
    if most is None:
        assert upper_bound(found, input_upper, 0) > nano
        return
    assert upper_bound(found, input_upper, most) <= nano
    assert most == TOKENS_MAX or upper_bound(found, input_upper, most + 1) > nano


TIERED = Rates(
    Prices(2 * USD, 2 * USD, 2 * USD, 8 * USD), (Tier(200_000, Prices(4 * USD, 4 * USD, 4 * USD, 12 * USD)),)
)


@pytest.mark.parametrize(
    ("tokens", "usd"),
    [(199_999, "0.399998000"), (200_000, "0.400000000"), (200_001, "0.800004000")],
)
def test_a_tier_begins_above_its_border_and_holds_for_every_token(tokens: int, usd: str) -> None:
    assert format_usd(cost(TIERED, Usage(tokens, 0))) == usd
    assert format_usd(upper_bound(TIERED, tokens, 0)) == usd


def test_a_hold_for_a_long_prompt_is_priced_at_the_tier_that_applies() -> None:
    # Ref 94: five long prompts at the dear tier, money for two.
    money, admitted = 2 * upper_bound(TIERED, 300_000, 1000), 0
    for _ in range(5):
        if (hold := upper_bound(TIERED, 300_000, 1000)) <= money:
            money, admitted = money - hold, admitted + 1
    assert admitted == 2


def test_a_cheaper_tier_above_does_not_shrink_the_hold_below_it() -> None:
    falling = Rates(Prices(10 * USD, 10 * USD, 10 * USD, 0), (Tier(1000, Prices(USD, USD, USD, 0)),))
    assert upper_bound(falling, 1001, 0) == cost(falling, Usage(1000, 0)) == 10_000_000


def test_a_dear_cache_write_is_in_the_hold() -> None:
    found = Rates(Prices(3 * USD, USD, 4 * USD, 15 * USD))
    assert upper_bound(found, 1000, 0) == cost(found, Usage(1000, 0, cache_write=1000))


def test_ten_thousand_tiny_calls_sum_to_ten_thousand_times_one() -> None:
    # Ref 81: rows that round to 0 make thousands of calls free. 0.15 USD a million tokens.
    found = Rates(Prices(150_000_000, 75_000_000, 150_000_000, 600_000_000))
    total = sum(cost(found, Usage(1, 0)) for _ in range(10_000))
    assert format_usd(total) == "0.001500000"


def test_the_largest_call_fits_an_amount() -> None:
    dear = Prices(*[PRICE_MAX] * 4)
    assert upper_bound(Rates(dear, (), FEE_MAX), TOKENS_MAX, TOKENS_MAX) < NANO_MAX


def test_free_output_is_bounded_by_what_a_count_holds() -> None:
    assert largest_output(Rates(Prices(0, 0, 0, 0)), 10, 0) == TOKENS_MAX


@pytest.mark.parametrize("more", [{"cached_input": 6, "cache_write": 5}, {"reasoning": 6}, {"cached_input": -1}])
def test_a_part_larger_than_its_whole_is_no_usage(more: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Usage(10, 5, **more)


def test_tiers_out_of_order_are_no_rates() -> None:
    prices = TIERED.base
    with pytest.raises(ValueError):
        Rates(prices, (Tier(5, prices), Tier(5, prices)))


# Published per million tokens (USD): OpenAI gpt-5-mini 0.25 in, 0.025 cached, 2 out; Anthropic Claude
# Sonnet 4.5 up to 200,000 tokens 3 in, 0.30 cache read, 3.75 cache write, 15 out; Google Gemini 2.5 Pro
# above 200,000 tokens 2.50 in, 0.25 cached, 15 out.
PUBLISHED = [
    # 2,000 × 0.25 + 8,000 × 0.025 + 2,000 × 2
    ("openai", "gpt-5-mini", Usage(10_000, 2_000, cached_input=8_000, reasoning=1_500), "0.004700000"),
    # 3 × 3 + 12,304 × 3.75 + 550 × 15
    ("anthropic", "claude-sonnet-4-5", Usage(12_307, 550, cache_write=12_304), "0.054399000"),
    # 210,000 × 2.50 + 40,000 × 0.25 + 2,000 × 15
    ("google", "gemini-2.5-pro", Usage(250_000, 2_000, cached_input=40_000), "0.565000000"),
]


@pytest.mark.parametrize(("provider", "model", "usage", "usd"), PUBLISHED)
def test_a_published_price_is_reproduced_to_the_last_digit(provider: str, model: str, usage: Usage, usd: str) -> None:
    theirs = genai_prices.calc_price(
        genai_prices.Usage(
            input_tokens=usage.input,
            cache_read_tokens=usage.cached_input,
            cache_write_tokens=usage.cache_write,
            output_tokens=usage.output,
        ),
        model,
        provider_id=provider,
    )
    ours = cost(rates_of(theirs.model_price), usage)
    assert format_usd(ours) == usd
    assert Decimal(usd) == theirs.total_price
