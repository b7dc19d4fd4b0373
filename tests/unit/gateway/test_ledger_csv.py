"""The ledger as CSV: quoted by RFC 4180, harmless in a spreadsheet, asked for by Accept."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.routes import ledger_csv
from services.gateway.routes.admin_render import ledger_entry
from tests.unit.gateway.billing_replica import entry

QUICK = settings(derandomize=True, max_examples=200, deadline=None)


def read(raw: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(raw.decode(), newline="")))


def test_a_line_is_what_the_entry_says() -> None:
    written = ledger_csv.header() + ledger_csv.rows([ledger_entry(entry())])
    assert written.decode() == (
        "api_call_id,created_at,user_id,conversation_id,message_id,run_id,model,input_tokens,cached_tokens,"
        "cache_write_tokens,output_tokens,thinking_tokens,usage_estimated,cost_usd,above_hold,late\r\n"
        "01900000-0000-7000-8000-000000000001,2026-03-01T10:00:00.000005Z,alice,01900000-0000-7000-8000-00000000000a,"
        "msg_01900000-0000-7000-8000-000000000002,01900000-0000-7000-8000-000000000001,m,11,3,2,7,5,"
        "false,0.000000150,false,true\r\n"
    )


def test_no_message_is_an_empty_cell() -> None:
    found = entry()
    found.message_id = ""
    assert read(ledger_csv.rows([ledger_entry(found)]))[0][4] == ""


@pytest.mark.parametrize("user", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "=cmd|' /C calc'!A0", "="])
def test_what_looks_like_a_formula_is_text(user: str) -> None:
    assert read(ledger_csv.rows([ledger_entry(entry(user=user))]))[0][2] == "'" + user


@pytest.mark.parametrize("user", ["a=1", "1-1", "a@example.com", "'=1", " =1", "auth0|7", "ü", "日本"])
def test_what_does_not_stays_as_it_is(user: str) -> None:
    assert read(ledger_csv.rows([ledger_entry(entry(user=user))]))[0][2] == user


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=5))
@QUICK
def test_every_text_is_read_back(users: list[str]) -> None:
    rows = read(ledger_csv.rows(ledger_entry(entry(user=user)) for user in users))
    assert [row[2] for row in rows] == [ledger_csv.cell(user) for user in users]
    assert not any(row[2].startswith(ledger_csv.FORMULA_STARTS) for row in rows)


def test_cells_with_commas_and_quotes_are_quoted() -> None:
    line = ledger_csv.rows([ledger_entry(entry(user='a,"b"'))]).decode()
    assert ',"a,""b""",' in line


@pytest.mark.parametrize(
    ("accept", "is_csv"),
    [
        ("text/csv", True),
        ("TEXT/CSV; charset=utf-8", True),
        ("text/csv, */*;q=0.1", True),
        ("text/csv, application/json;q=0.5", True),
        ("application/json;q=0.4, text/csv;q=0.5", True),
        ("", False),
        ("*/*", False),
        ("text/*", False),
        ("application/json", False),
        ("application/json, text/csv;q=0.9", False),
        ("application/json, text/csv", False),
        ("text/csv;q=0", False),
        ("text/csv;q=x", False),
        ("text/csvs", False),
        (";;,,;q", False),
    ],
)
def test_accept_asks_for_csv(accept: str, is_csv: bool) -> None:
    assert ledger_csv.is_preferred(accept) is is_csv
