"""Granting and periods, without a database."""

from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.errors import ServiceError
from kit.pricing import Prices, Rates, upper_bound
from services.billing.domain.granting import Grant, Limit, Wish, grant
from services.billing.domain.periods import start_of

RATES = Rates(Prices(2_000_000, 2_000_000, 2_000_000, 5_000_000))  # 2 and 5 nano-USD a token
AMOUNTS = st.integers(0, 5000)
PERIODS = st.sampled_from(["day", "month", "total"])
LIMITS = st.lists(st.builds(Limit, st.booleans(), PERIODS, AMOUNTS, AMOUNTS), max_size=4)


@given(LIMITS, st.integers(0, 300), st.integers(1, 300), st.integers(1, 300))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_a_grant_is_the_most_that_every_limit_pays(limits: list[Limit], tokens: int, most: int, least: int) -> None:
    wish = Wish(tokens, max(most, least), min(most, least))
    left = min((limit.left for limit in limits), default=10**9)
    short = [one for one in limits if upper_bound(RATES, tokens, wish.output_min) > one.left]
    if short:
        with pytest.raises(ServiceError) as refused:
            grant(RATES, wish, limits)
        is_quota = any(one.is_quota for one in short)
        assert refused.value.reason == ("QUOTA_EXCEEDED" if is_quota else "AI_BUDGET_EXCEEDED")
        return
    found = grant(RATES, wish, limits)
    assert found.amount == upper_bound(RATES, tokens, found.output) <= left
    assert wish.output_min <= found.output <= wish.output_max
    assert found.output == wish.output_max or upper_bound(RATES, tokens, found.output + 1) > left


def test_no_limit_is_no_check() -> None:
    assert grant(RATES, Wish(10, 4, 1), []) == Grant(4, 40)


def test_periods_begin_with_their_first_day() -> None:
    day = date(2026, 2, 28)
    assert [start_of(period, day) for period in ("day", "month", "total")] == [
        day, date(2026, 2, 1), date(1970, 1, 1),
    ]  # fmt: skip
