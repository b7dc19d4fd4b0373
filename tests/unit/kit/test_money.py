"""Money is one integer and is rounded from the total only."""

from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.money import CREDITS_PER_USD_MAX, NANO_MAX, credits, format_usd, half_even, micro_usd, parse_usd, read_usd
from threadloom.common.v1.money_pb2 import Money

QUICK = settings(derandomize=True, max_examples=200, deadline=None)
AMOUNTS = st.integers(-NANO_MAX, NANO_MAX)


@given(AMOUNTS)
@QUICK
def test_an_amount_survives_as_text_and_on_the_wire(nano: int) -> None:
    assert parse_usd(format_usd(nano)) == nano
    assert Money.FromString(Money(nano_usd=nano).SerializeToString()).nano_usd == nano


@pytest.mark.parametrize(
    ("nano", "text"),
    [
        (0, "0.000000000"),
        (150, "0.000000150"),
        (-1, "-0.000000001"),
        (3_700_000_000, "3.700000000"),
        (NANO_MAX, "9223372036.854775807"),
    ],
)
def test_an_amount_is_written_with_nine_decimals(nano: int, text: str) -> None:
    assert format_usd(nano) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "1.5", "0.0000000001", "1.00000000", "+1.000000000", "01.000000000", "-0.000000000", ".000000000",
        " 1.000000000", "1.000000000\n", "1e3", "NaN", "١.000000000", "1.00000000٠", "1,000000000",
        "9223372036.854775808", "9" * 5000 + ".000000000",
    ],
)  # fmt: skip
def test_no_other_text_is_an_amount(text: str) -> None:
    with pytest.raises(ValueError):
        parse_usd(text)


@pytest.mark.parametrize(
    ("text", "nano"),
    [("0", 0), ("5", 5 * 10**9), ("0.15", 150_000_000), ("007.50", 7_500_000_000), ("0.000000001", 1)],
)
def test_an_amount_is_read_as_people_write_it(text: str, nano: int) -> None:
    assert read_usd(text) == nano


@pytest.mark.parametrize(
    "text", ["", ".", ".5", "5.", "-1", "+1", "1e5", "1,5", "1_000", "$5", "٣", "0.0000000001", "NaN", "9" * 30]
)
def test_what_is_no_plain_amount_is_not_guessed_at(text: str) -> None:
    with pytest.raises(ValueError):
        read_usd(text)


@given(AMOUNTS, st.integers(1, 10**12))
@QUICK
def test_a_quotient_is_rounded_half_even(numerator: int, denominator: int) -> None:
    assert half_even(numerator, denominator) == round(Fraction(numerator, denominator))


@pytest.mark.parametrize(
    ("nano", "micro"), [(499, 0), (500, 0), (501, 1), (1500, 2), (2500, 2), (-500, 0), (-1500, -2)]
)
def test_micro_usd_rounds_an_exact_half_to_the_even_side(nano: int, micro: int) -> None:
    assert micro_usd(nano) == micro


@given(AMOUNTS, st.integers(0, CREDITS_PER_USD_MAX))
@QUICK
def test_credits_are_what_exact_decimals_say(nano: int, rate: int) -> None:
    with localcontext(prec=60):
        exact = (Decimal(nano) * rate / 10**9).to_integral_value(ROUND_HALF_EVEN)
    assert credits(nano, rate) == exact


@pytest.mark.parametrize("rate", [1, 3, 25, 100, 333, 1000])
def test_ten_thousand_cents_in_credits_are_never_off_by_one(rate: int) -> None:
    # Ref 79: a binary rate makes balances one credit low on exact halves.
    wrong = [cents for cents in range(10_001) if credits(cents * 10**7, rate) != round(Fraction(cents * rate, 100))]
    assert wrong == []


@pytest.mark.parametrize("rate", [-1, CREDITS_PER_USD_MAX + 1])
def test_a_credit_rate_has_bounds(rate: int) -> None:
    with pytest.raises(ValueError):
        credits(1, rate)
