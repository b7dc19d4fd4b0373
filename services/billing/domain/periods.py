"""Periods, in UTC."""

from datetime import date

PERIODS = ("day", "month", "total")
# Where the one account of all time begins.
EVER = date(1970, 1, 1)
# The user of a project's own accounts; no user has an empty id.
WHOLE_PROJECT = ""


def start_of(period: str, day: date) -> date:
    """The first day of the period that holds `day`."""
    return {"day": day, "month": day.replace(day=1), "total": EVER}[period]
