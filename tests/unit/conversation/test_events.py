"""Building and checking events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.conversation.domain import endings, events
from services.conversation.domain.events import EventOrder, UnbalancedLog
from services.conversation.limits import EVENT_TEXT_CHARS
from tests.unit.conversation.logs import finished_runs, llm_request, numbered, thinking, usage
from threadloom.conversation.v1.run_event_pb2 import RetryTrace, RunEvent


@given(st.text(max_size=20), st.integers(1, 3))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_pieces_join_to_the_text_and_fit(text: str, times: int) -> None:
    long = (text + "\U0001f600") * (EVENT_TEXT_CHARS * times // (len(text) + 1) + 1)
    found = list(events.pieces(long))
    assert "".join(found) == long
    assert max(map(len, found)) <= EVENT_TEXT_CHARS


def test_numbering_counts_on_without_gaps() -> None:
    log = [events.text_delta(1, "a"), events.text_delta(1, "b")]
    events.number(log, 7)
    assert [event.seq for event in log] == [7, 8]
    assert all(event.HasField("time") for event in log)


@given(finished_runs())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_a_log_an_owner_writes_is_balanced(log: list[RunEvent]) -> None:
    order = EventOrder()
    for event in log:
        order.check(event)
    assert order.is_over
    assert not order.open_traces


STARTED = [events.run_started("u", "m"), events.reply_started("m", "p", 1), events.step_started(1)]
FINISH = endings.finish("stop", "m", 1.0)
UNBALANCED: dict[str, list[RunEvent]] = {
    "nothing before run_started": [events.reply_started("m", "p", 1)],
    "a second run_started": [STARTED[0], STARTED[0]],
    "a second reply": [*STARTED[:2], STARTED[1]],
    "a step before the reply": [STARTED[0], events.step_started(1)],
    "a step inside a step": [*STARTED, events.step_started(2)],
    "text outside a step": [*STARTED[:2], events.text_delta(1, "a")],
    "text of another step": [*STARTED, events.text_delta(2, "a")],
    "the end of another step": [*STARTED, endings.end_step(2, "stop", usage(1))],
    "superseding a step that ended": [
        *STARTED,
        endings.end_step(1, "stop", usage(1)),
        events.step_superseded(1, 0, 0, usage(1)),
    ],
    "a trace opened twice": [*STARTED, thinking("evt_001", 1), thinking("evt_001", 1)],
    "a trace opened again": [*STARTED, *events.retry_trace("evt_001", 1, RetryTrace()), thinking("evt_001", 1)],
    "a delta of no trace": [*STARTED, events.thinking_delta("evt_001", "a")],
    "a delta of a closed trace": [
        *STARTED,
        *events.retry_trace("evt_001", 1, RetryTrace()),
        events.thinking_delta("evt_001", "a"),
    ],
    "a trace closed twice": [*STARTED, *events.retry_trace("evt_001", 1, RetryTrace()), events.trace_ended("evt_001")],
    "an end with an open trace": [*STARTED[:2], llm_request("evt_001", 1), FINISH],
    "an end with an open step": [*STARTED, FINISH],
    "anything after the end": [*STARTED[:2], FINISH, events.trace_ended("evt_001")],
    "a second end": [*STARTED[:2], FINISH, FINISH],
}


@pytest.mark.parametrize("name", UNBALANCED)
def test_an_unbalanced_log_is_refused(name: str) -> None:
    copies = [RunEvent.FromString(event.SerializeToString()) for event in UNBALANCED[name]]
    *before, last = numbered(copies)
    order = EventOrder()
    for event in before:
        order.check(event)
    with pytest.raises(UnbalancedLog):
        order.check(last)


@pytest.mark.parametrize("seq", [0, 1, 3])
def test_a_gap_or_a_repeat_in_seq_is_refused(seq: int) -> None:
    order = EventOrder()
    order.check(numbered([events.run_started("u", "m")])[0])
    with pytest.raises(UnbalancedLog):
        order.check(numbered([events.reply_started("m", "p", 1)], seq)[0])


def test_a_kind_of_a_later_version_is_taken_in_order() -> None:
    order = EventOrder()
    order.check(numbered([events.run_started("u", "m")])[0])
    order.check(numbered([RunEvent()], 2)[0])
    assert order.seq == 2
