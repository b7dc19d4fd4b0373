"""Money: an integer of 10⁻⁹ USD (nano-USD), and the three forms it is shown in. No float comes near it.

Totals are converted, never parts: what is rounded is rounded once, half even.
"""

import re

NANO_PER_USD = 1_000_000_000
NANO_PER_MICRO = 1_000
# What common.v1.Money and Postgres's bigint hold: about nine billion USD.
NANO_MAX = 2**63 - 1
# Rates come from people; this bound keeps a typing error out of the sums.
CREDITS_PER_USD_MAX = 1_000_000_000

# One text for each amount: no plus, no leading zeros, no minus zero.
USD_TEXT = re.compile(r"(-?)(0|[1-9][0-9]*)\.([0-9]{9})")
# What people write: 5, 0.15, 007.5. No sign, exponent, blank or separator, and never a rounding.
WRITTEN_USD = re.compile(r"([0-9]+)(?:\.([0-9]{1,9}))?")


def format_usd(nano: int) -> str:
    """The amount in USD with exactly 9 decimals, as `cost_usd` and `costUsd` carry it."""
    whole, rest = divmod(abs(nano), NANO_PER_USD)
    return f"{'-' if nano < 0 else ''}{whole}.{rest:09}"


def parse_usd(text: str) -> int:
    """Nano-USD of what `format_usd` writes; raises ValueError for every other text."""
    found = USD_TEXT.fullmatch(text)
    if found is None:
        raise ValueError("must be USD with 9 decimals, such as 0.000150000")
    sign, whole, rest = found.groups()
    # Python refuses to read thousands of digits; nobody means them.
    if len(whole) > len(str(NANO_MAX)):
        raise ValueError("is more than an amount can hold")
    nano = int(whole) * NANO_PER_USD + int(rest)
    if nano > NANO_MAX:
        raise ValueError("is more than an amount can hold")
    if sign and not nano:
        raise ValueError("must be USD with 9 decimals, such as 0.000150000")
    return -nano if sign else nano


def read_usd(text: str) -> int:
    """Nano-USD of an amount as people write it, digits with at most 9 decimals; raises ValueError for all else."""
    found = WRITTEN_USD.fullmatch(text)
    if found is None:
        raise ValueError("must be USD in plain digits with at most 9 decimals, such as 0.15")
    whole, decimals = found[1].lstrip("0"), found[2] or ""
    if len(whole) > len(str(NANO_MAX)):  # Python refuses to read thousands of digits
        raise ValueError("is more than an amount can hold")
    nano = int(whole or "0") * NANO_PER_USD + int(decimals.ljust(9, "0"))
    if nano > NANO_MAX:
        raise ValueError("is more than an amount can hold")
    return nano


def micro_usd(nano: int) -> int:
    """The amount in 10⁻⁶ USD, half even: the unit of `cost_cents_usd`."""
    return half_even(nano, NANO_PER_MICRO)


def credits(nano: int, credits_per_usd: int) -> int:
    """The amount in whole credits of a project that gives so many for a USD, half even."""
    if not 0 <= credits_per_usd <= CREDITS_PER_USD_MAX:
        raise ValueError(f"credits_per_usd must be 0 to {CREDITS_PER_USD_MAX}")
    return half_even(nano * credits_per_usd, NANO_PER_USD)


def half_even(numerator: int, denominator: int) -> int:
    """The quotient rounded to an integer, a half to the even neighbour. `denominator` is above 0."""
    quotient, rest = divmod(numerator, denominator)
    twice = 2 * rest
    if twice > denominator or (twice == denominator and quotient % 2):
        return quotient + 1
    return quotient
