"""The books after any failure: what billing booked is what the provider charges, and nothing stays set aside."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.conversation.domain.tokens import PIECE_CHARS
from tests.chaos.record import Record
from tests.fakes.calls import Call
from tests.support.books import BREACHES

OPEN_HOLDS = "SELECT api_call_id, run_id, placed_at FROM billing.holds WHERE status = 'open'"
MADE = """
SELECT c.id::text, c.status, c.usage_source, l.tokens_in, l.tokens_out, l.thinking_tokens, l.cached_tokens, l.estimated
FROM conversation.api_calls c LEFT JOIN billing.cost_ledger l ON l.api_call_id = c.id
"""
# How a call may have ended that was recorded as sent and yet never reached the provider.
BROKEN_OFF = ("cut", "cancelled")
CUT_TOKENS = 2  # at most that many more where a text is cut in two to be counted


@dataclass(frozen=True)
class Entry:
    """An attempt as we recorded it, and its ledger row: None in every figure when there is none."""

    call: str
    status: str
    source: str
    input: int | None
    output: int | None
    reasoning: int | None
    cached: int | None
    is_estimated: bool | None

    @property
    def is_booked(self) -> bool:
        """Whether it is in the ledger."""
        return self.is_estimated is not None

    @property
    def text(self) -> int:
        """Tokens of the text."""
        return (self.output or 0) - (self.reasoning or 0)


def check_books(record: Record, calls: Iterable[Call]) -> None:
    """All of it; the outbox must be empty. `calls` are all the provider ever got from this database's services."""
    for what, query in BREACHES.items():
        assert record.rows(query) == [], what
    assert record.rows(OPEN_HOLDS) == []
    entries = {entry.call: entry for entry in (Entry(*row) for row in record.rows(MADE))}
    for call in calls:
        check_bill(call, entries.pop(call.client_request_id or ""))
    for entry in entries.values():
        check_unseen(entry)


def check_bill(call: Call, entry: Entry) -> None:
    """The ledger says of a call what the provider does; of a broken one no more output than was sent."""
    bill = call.bill
    if bill is None:  # refused, or broken off before it was understood
        check_unseen(entry)
        return
    assert entry.is_booked, (call, entry)
    if not entry.is_estimated:
        assert call.outcome == "finished", (call, entry)
        found = {
            "input": entry.input,
            "output": entry.output,
            "cached": entry.cached,
            "reasoning": entry.reasoning,
        }
        assert found == bill, (call, entry)
        return
    assert entry.status != "succeeded", (call, entry)
    # The provider's bill of a broken answer knows no reasoning. A long text is counted in pieces: some tokens more.
    cuts = len(call.text) // PIECE_CHARS
    assert entry.text <= bill["output"] - bill["reasoning"] + CUT_TOKENS * cuts, (call, entry)
    # We count a token more for each message than the provider does: an estimate must not be too low.
    assert 0 <= (entry.input or 0) - bill["input"] <= len(call.body["messages"]), (call, entry)


def check_unseen(entry: Entry) -> None:
    """Nothing is booked of a call the provider never saw, or only that it was about to see it."""
    if not entry.is_booked:
        return
    assert entry.status in BROKEN_OFF, entry
    assert (entry.source, entry.is_estimated, entry.output) == ("estimated", True, 0), entry
