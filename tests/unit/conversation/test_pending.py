"""What a run has pending: text that waits together becomes one event."""

from hypothesis import given, settings

from services.conversation.domain import events
from services.conversation.domain.pending import Pending
from services.conversation.limits import EVENT_TEXT_CHARS
from tests.unit.conversation.logs import finished_runs
from threadloom.conversation.v1.run_event_pb2 import RunEvent, TraceDelta


def waiting(log: list[RunEvent]) -> Pending:
    """The log's events, each put in as a run puts it."""
    pending = Pending()
    for event in log:
        kind = events.kind_of(event)
        if kind == "text_delta":
            text = event.text_delta.text
            pending.add_text(text, len(text.encode()), step=event.text_delta.step)
        elif kind == "trace_delta" and event.trace_delta.HasField("text"):
            text = event.trace_delta.text
            pending.add_text(text, len(text.encode()), trace=event.trace_delta.trace_id)
        else:
            pending.add(RunEvent.FromString(event.SerializeToString()))
    return pending


def through(log: list[RunEvent]) -> list[RunEvent]:
    """What comes out of it."""
    return waiting(log).take()


def parts(log: list[RunEvent]) -> list[tuple[str, str, str]]:
    """Every part's text, in order, however it is cut into events; other events as they are."""
    found: list[tuple[str, str, str]] = []
    for event in log:
        kind = events.kind_of(event)
        is_text = kind == "text_delta" or (kind == "trace_delta" and event.trace_delta.HasField("text"))
        text = (event.text_delta.text or event.trace_delta.text) if is_text else str(event)
        name = f"{event.text_delta.step}/{event.trace_delta.trace_id}"
        if is_text and found and found[-1][:2] == (kind, name):
            found[-1] = (kind, name, found[-1][2] + text)
        else:
            found.append((kind, name, text))
    return found


def test_neighbouring_deltas_of_one_part_become_one() -> None:
    merged = through([events.text_delta(1, "a"), events.text_delta(1, "b"), events.text_delta(1, "c")])
    assert [event.text_delta.text for event in merged] == ["abc"]


def test_deltas_of_two_parts_are_never_merged() -> None:
    given_events = [
        events.text_delta(1, "a"),
        events.text_delta(2, "b"),
        events.thinking_delta("evt_001", "c"),
        events.thinking_delta("evt_002", "d"),
        events.text_delta(2, "e"),
    ]
    assert through(given_events) == given_events


def test_deltas_are_not_merged_across_another_event() -> None:
    given_events = [events.text_delta(1, "a"), events.trace_ended("evt_001"), events.text_delta(1, "b")]
    assert through(given_events) == given_events


def test_figures_of_a_trace_are_not_merged_into_its_text() -> None:
    figures = RunEvent(trace_delta=TraceDelta(trace_id="evt_001"))
    figures.trace_delta.llm_request.model = "m"
    given_events = [events.thinking_delta("evt_001", "a"), figures, events.thinking_delta("evt_001", "b")]
    assert through(given_events) == given_events


def test_a_merged_delta_is_never_larger_than_an_event_may_be() -> None:
    half = "x" * (EVENT_TEXT_CHARS // 2)
    merged = through([events.text_delta(1, half), events.text_delta(1, half), events.text_delta(1, "y")])
    assert [len(event.text_delta.text) for event in merged] == [EVENT_TEXT_CHARS, 1]


@given(finished_runs())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_merging_changes_no_part(log: list[RunEvent]) -> None:
    for event in log:
        event.seq = 0
        event.ClearField("time")
    assert parts(through(log)) == parts(log)


def test_what_is_taken_is_about_as_large_as_was_asked_for_and_one_event_at_least() -> None:
    pending = waiting([events.trace_ended("evt_001"), *(events.text_delta(step, "x" * 100) for step in (1, 2, 3))])
    assert [events.kind_of(event) for event in pending.take(1)] == ["trace_ended"]
    assert [event.text_delta.step for event in pending.take(150)] == [1, 2]
    assert [event.text_delta.step for event in pending.take(150)] == [3]
    assert (pending.bytes, bool(pending)) == (0, False)


def test_what_was_put_back_stays_as_it_is_cut() -> None:
    """It may be stored, its answer lost: under its seq it must not change any more."""
    pending = waiting([events.text_delta(1, "a")])
    taken = pending.take()
    pending.add_text("b", 1, step=1)
    pending.put_back(taken)
    pending.add_text("c", 1, step=1)
    assert [event.text_delta.text for event in pending.take()] == ["a", "bc"]


def test_only_what_was_put_back_is_kept_when_the_rest_is_dropped() -> None:
    pending = waiting([events.text_delta(1, "a"), events.trace_ended("evt_001")])
    pending.put_back(pending.take())
    pending.add_text("b", 1, step=1)
    pending.keep_sealed()
    assert [events.kind_of(event) for event in pending.take()] == ["text_delta", "trace_ended"]
    pending.add_text("b", 1, step=1)
    pending.keep_sealed()
    assert not pending
    assert pending.bytes == 0
