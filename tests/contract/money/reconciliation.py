"""The ledger against the provider's own bill, call by call. Pure, but for the query that reads the calls.

What may differ, and nothing else:

- A call whose end nobody heard is estimated: its owner was lost (`cut`), it was cancelled, it went silent,
  broke, ignored its limit, or told no figures. Its input is ours, which counts one token a message more
  than the provider; its output is what was shown, so never more than was sent.
- A call that is in the ledger and not at the provider, or refused there, was lost, cancelled or given up
  between the record that it is sent and its answer: input only.
- `above_hold` needs a provider that ignores its limit, `late` a hold that the schedule let expire.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.fakes.calls import Call
from tests.fakes.counting import count_tokens

CALLS = """
SELECT c.id::text, c.user_id, c.status, c.error_code, c.usage_source, l.api_call_id IS NOT NULL,
    l.tokens_in, l.tokens_out, l.cached_tokens, l.thinking_tokens, l.cost_nano, l.estimated, l.above_hold, l.late,
    coalesce(h.amount_nano, 0), coalesce(h.status, '')
FROM conversation.api_calls c LEFT JOIN billing.cost_ledger l ON l.api_call_id = c.id
LEFT JOIN billing.holds h ON h.api_call_id = c.id WHERE c.project_id = %s
"""


class Booked(NamedTuple):
    """An api call with its ledger row, if it has one, and its hold."""

    id: str
    user: str
    status: str
    error_code: str
    source: str
    has_row: bool
    input: int
    output: int
    cached: int
    reasoning: int
    cost: int
    estimated: bool
    above_hold: bool
    late: bool
    held: int
    hold_status: str

    @property
    def is_unheard(self) -> bool:
        """Whether we may have left before the provider was done."""
        return self.status in ("cut", "cancelled") or self.error_code == "AI_PROVIDER_TIMEOUT"

    @property
    def excess(self) -> int:
        """Nano-USD that no limit was asked for."""
        if not self.has_row:
            return 0
        return self.cost if self.late else max(0, self.cost - self.held)


def differences(
    booked: Sequence[Booked], calls: Mapping[str, Call], expired: Collection[str], script_of: Mapping[str, str]
) -> Iterator[str]:
    """Every way in which the ledger is not the bill. `script_of`: the words of each call's last message."""
    for entry in booked:
        call = calls.get(entry.id)
        words = script_of.get(entry.id, "")
        for what in _of_call(entry, call, words):
            yield f"{what}: {entry}, {call and (call.outcome, call.deltas_sent, call.bill, words)}"
        if entry.late and entry.id not in expired:
            yield f"late, and its hold never expired: {entry}"
        if entry.above_hold and "unlimited" not in words:
            yield f"above its hold, and its provider kept the limit: {entry}, {words}"


def _of_call(entry: Booked, call: Call | None, words: str) -> Iterator[str]:
    if entry.status in ("started", "sent"):
        yield "a call was left open"
    bill = call.bill if call is not None else None
    if call is None or bill is None:
        if entry.has_row and not (entry.is_unheard and entry.estimated and entry.output == entry.cached == 0):
            yield "booked, and the provider charges nothing"
        return
    if not entry.has_row:
        yield "the provider charges it, and it is not booked"
        return
    if not entry.estimated:
        if call.outcome != "finished":
            yield "not estimated, and it never finished"
        if (entry.input, entry.output, entry.cached, entry.reasoning) != tuple(
            bill[kind] for kind in ("input", "output", "cached", "reasoning")
        ):
            yield "the figures differ"
        return
    is_silent = "usage=never" in words
    if call.outcome == "finished" and not (entry.is_unheard or is_silent or "unlimited" in words):
        yield "estimated, and the provider told its figures"
    if entry.input != call.prompt_tokens + len(call.body["messages"]):
        yield "the estimated input differs"
    if entry.output > most_output(call):
        yield "more output is estimated than was sent"
    if is_silent and entry.status == "succeeded" and "unlimited" not in words and entry.output != bill["output"]:
        yield "the whole answer was read, and not all of it is booked"


def most_output(call: Call) -> int:
    """The most output tokens that can have been shown. The bill of a broken call counts its text alone."""
    whole: int = call.whole["completion_tokens"]
    if call.outcome == "finished":
        return whole
    thought: int = call.whole["completion_tokens_details"]["reasoning_tokens"]
    return min(whole, count_tokens(call.text) + thought * (call.deltas_sent > 0))
