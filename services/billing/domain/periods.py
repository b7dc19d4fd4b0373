"""Periods, in UTC, and the accounts a call of a day is booked in."""

from collections.abc import Sequence
from datetime import date
from typing import NamedTuple

PERIODS = ("day", "month", "total")
# Where the one account of all time begins.
EVER = date(1970, 1, 1)
# The user of a project's own accounts; no user has an empty id.
WHOLE_PROJECT = ""


class AccountKey(NamedTuple):
    """An account within its project. Sorted by these, all locks are taken in one order."""

    user: str
    period: str
    start: date


def start_of(period: str, day: date) -> date:
    """The first day of the period that holds `day`."""
    return {"day": day, "month": day.replace(day=1), "total": EVER}[period]


def accounts(users: Sequence[str], day: date) -> list[AccountKey]:
    """The accounts of these users on that day, in the order they are locked."""
    return sorted(AccountKey(user, period, start_of(period, day)) for user in users for period in PERIODS)
