"""The ledger as CSV (RFC 4180), and when it is wanted. Pure."""

import csv
import io
from collections.abc import Iterable

from services.gateway.routes.admin_shapes import LedgerEntry

MEDIA_TYPE = "text/csv"
COLUMNS = LedgerEntry.__struct_fields__
# What a spreadsheet takes for the beginning of a formula. User ids and models are what others chose to call
# themselves; an apostrophe in front makes them text there, and is what readers of such files expect.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def header() -> bytes:
    """The first line."""
    return _lines([COLUMNS])


def rows(entries: Iterable[LedgerEntry]) -> bytes:
    """A line for each entry."""
    return _lines([cell(getattr(entry, column)) for column in COLUMNS] for entry in entries)


def cell(value: str | int | bool | None) -> str:
    """A value as the text of a cell."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            return f"'{value}" if value.startswith(FORMULA_STARTS) else value


def _lines(lines: Iterable[Iterable[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerows(lines)
    return text.getvalue().encode()


def is_preferred(accept: str) -> bool:
    """Whether a header Accept asks for CSV before JSON. Naming neither means JSON."""
    wanted = {"application/json": 0.0, MEDIA_TYPE: 0.0}
    for one in accept.lower().split(","):
        name, *parameters = (part.strip() for part in one.split(";"))
        if name in wanted:
            wanted[name] = _quality(parameters)
    return wanted[MEDIA_TYPE] > wanted["application/json"]


def _quality(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0
