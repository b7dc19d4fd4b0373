"""Granting, closing and periods, without a database."""

from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.errors import ServiceError
from kit.pricing import Prices, Rates, upper_bound
from services.billing.domain.closing import OPEN, release, settle
from services.billing.domain.granting import Grant, Limit, Wish, grant, wait_for_window
from services.billing.domain.periods import accounts, start_of

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


@pytest.mark.parametrize("status", ["released", "expired"])
def test_a_late_settle_frees_nothing_twice(status: str) -> None:
    late, timely = settle(status, 10, 4), settle(OPEN, 10, 4)
    assert (late.held, late.spent, late.late) == (0, 4, True)
    assert (timely.held, timely.spent, timely.late) == (-10, 4, False)


@pytest.mark.parametrize("status", ["settled", "released", "expired"])
def test_a_closed_hold_is_not_released_again(status: str) -> None:
    found = release(status, 10)
    assert (found.status, found.held, found.spent) == (status, 0, 0)


@pytest.mark.parametrize(("used", "wait"), [(0, None), (2, None), (3, 12.5)])
def test_a_full_window_is_waited_for(used: int, wait: float | None) -> None:
    assert wait_for_window(used, 3, 12.5) == wait


def test_periods_begin_in_utc_and_accounts_are_sorted() -> None:
    day = date(2026, 2, 28)
    assert [start_of(period, day) for period in ("day", "month", "total")] == [
        day, date(2026, 2, 1), date(1970, 1, 1),
    ]  # fmt: skip
    keys = accounts(("", "zoe"), day)
    assert keys == sorted(keys)
    assert len(keys) == 6
