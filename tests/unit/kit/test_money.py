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
    [
        ("0", 0),
        ("5", 5_000_000_000),
        ("5.00", 5_000_000_000),
        ("0.15", 150_000_000),
        ("00.15", 150_000_000),
        ("0.1", 100_000_000),
        ("0.000000001", 1),
        ("0.123456789", 123_456_789),
        ("9223372036.854775807", NANO_MAX),
        ("000000000000009223372036.854775807", NANO_MAX),
    ],
)
def test_an_amount_that_people_write_is_read(text: str, nano: int) -> None:
    assert read_usd(text) == nano


@given(st.integers(0, NANO_MAX))
@QUICK
def test_what_is_shown_can_be_written(nano: int) -> None:
    assert read_usd(format_usd(nano)) == nano
    shortest = format_usd(nano).rstrip("0").rstrip(".")
    assert read_usd(shortest) == nano


@pytest.mark.parametrize(
    "text",
    [
        "", ".", ".5", "5.", "5.0000000001", "-1", "+1", "-0", "1e3", "1E3", " 1", "1 ", "1\n", "\n1", "1,5", "1_000",
        "1,000.00", "$1", "0x10", "NaN", "Infinity", "inf", "١", "１", "1.٠", "1.5.5", "free",
    ],
)  # fmt: skip
def test_what_is_no_plain_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="plain digits"):
        read_usd(text)


def test_a_long_text_is_refused_in_no_time() -> None:
    # An expression that tries every way to split the zeros would take hours.
    with pytest.raises(ValueError, match="plain digits"):
        read_usd("0" * 1_000_000 + "x")
    assert read_usd("0" * 1_000_000 + "1") == 10**9


@pytest.mark.parametrize("text", ["9223372036.854775808", "9223372037", "10000000000", "9" * 5000, "9" * 5000 + ".5"])
def test_an_amount_that_is_too_large_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="more than an amount can hold"):
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
