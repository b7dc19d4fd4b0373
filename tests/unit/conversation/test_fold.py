"""A run's state is the fold of its log, wherever it was cut and whoever went on."""

from datetime import UTC, datetime
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from kit.errors import ServiceError
from services.conversation import translate
from services.conversation.domain import endings, events
from services.conversation.domain.fold import RunState
from services.conversation.domain.usage import add_usage
from services.conversation.store.messages import MessageRow
from tests.unit.conversation.logs import continued_runs, finished_runs, fold, numbered, text_left, thinking, usage
from threadloom.common.v1.money_pb2 import Money
from threadloom.conversation.v1.message_pb2 import Usage
from threadloom.conversation.v1.run_event_pb2 import RetryTrace, RunEvent

ID = UUID("01900000-0000-7000-8000-000000000001")
PROPERTY = settings(derandomize=True, max_examples=40, deadline=None)


def a_streaming_row(text: str, text_seq: int) -> MessageRow:
    return MessageRow(
        id=ID,
        thread_id=ID,
        run_id=ID,
        position=2,
        role="assistant",
        status="streaming",
        parts=b"",
        text=text,
        text_seq=text_seq,
        model="m",
        provider="",
        tokens_in=0,
        tokens_out=0,
        thinking_tokens=0,
        cached_tokens=0,
        cache_write_tokens=0,
        cost_nano=0,
        cost_credits=0,
        usage_estimated=False,
        latency_ms=0,
        finish_reason="",
        error=None,
        created_at=datetime.now(UTC),
    )


@given(finished_runs())
@PROPERTY
def test_the_text_is_that_of_all_steps(log: list[RunEvent]) -> None:
    state = fold(log)
    assert state.text == text_left(log)
    assert state.text_chars == len(state.text)
    assert not state.is_superseded


@given(continued_runs())
@PROPERTY
def test_a_run_cut_anywhere_and_made_again_keeps_the_text_that_was_not_superseded(
    made: tuple[list[RunEvent], str],
) -> None:
    log, text = made
    state = fold(log)
    assert state.is_over
    assert state.text == text
    assert state.text_chars == len(text)


@given(continued_runs())
@PROPERTY
def test_superseding_tells_how_much_was_shown_and_how_much_remains(made: tuple[list[RunEvent], str]) -> None:
    log, _ = made
    for at, event in enumerate(log):
        if event.HasField("step_superseded"):
            before = fold(log[:at])
            step_text = "".join(
                e.text_delta.text for e in log[:at] if e.HasField("text_delta") and e.text_delta.step == before.step
            )
            told = event.step_superseded
            assert (told.shown_chars, told.kept_chars) == (len(step_text), len(before.text) - len(step_text))


@given(continued_runs(), st.data())
@PROPERTY
def test_closing_what_is_open_balances_a_log_cut_anywhere(
    made: tuple[list[RunEvent], str], data: st.DataObject
) -> None:
    log = made[0][: data.draw(st.integers(1, len(made[0]) - 1))]
    state = fold(log)
    text = state.text
    before, consumed = state.usage, Usage(output_tokens=3, cost=Money(nano_usd=5), estimated=True)
    told, untold = endings.close_open(state, consumed, endings.CANCELLED)
    told.append(endings.finish(endings.CANCELLED, "m", 1.0, untold))
    for event in numbered(told, state.last_seq + 1):
        endings.complete(state, event, 1_000_000_000)
        state.apply(event)
    assert state.is_over
    assert state.text == text
    assert state.usage == add_usage(before, consumed)  # once, whether a step tells it or the end alone
    assert state.cost_credits == state.usage.cost.nano_usd


@given(continued_runs())
@PROPERTY
def test_a_snapshot_and_the_log_behind_it_are_the_fold_at_every_cut(made: tuple[list[RunEvent], str]) -> None:
    log, _ = made
    states, state = [], RunState()
    for event in log:
        state.apply(event)
        states.append((state.text, state.has_reply, bool(state.texts)))
    snapshots = [("", 0), *((text, seq) for seq, (text, _, has_text) in enumerate(states, 1) if has_text)]
    payloads = [event.SerializeToString() for event in log]
    for text, seq in snapshots:
        for end in range(max(seq, 1), len(log) + 1):
            found = translate.streaming_message(a_streaming_row(text, seq), payloads[seq:end])
            expected, has_reply, _ = states[end - 1]
            assert (found is not None) == has_reply
            if found is not None:
                assert (found.text, found.cursor_seq) == (expected, end)


@given(finished_runs())
@PROPERTY
def test_folding_counts_every_byte_of_the_log(log: list[RunEvent]) -> None:
    assert fold(log).log_bytes == sum(event.ByteSize() for event in log)


@given(finished_runs())
@PROPERTY
def test_traces_are_recorded_whole_and_in_order(log: list[RunEvent]) -> None:
    traces = fold(log).recorded_traces()
    opened = [event.trace_started.trace_id for event in log if event.HasField("trace_started")]
    assert [trace.trace_id for trace in traces] == opened == [events.trace_id(n) for n in range(1, len(opened) + 1)]
    for trace in traces:
        deltas = [
            e.trace_delta.text for e in log if e.HasField("trace_delta") and e.trace_delta.trace_id == trace.trace_id
        ]
        assert trace.text == "".join(deltas)
        assert trace.HasField("end_time")


def test_the_usage_of_superseded_steps_is_in_the_total() -> None:
    log = [
        events.run_started("u", "m"),
        events.reply_started("m", "p", 1),
        events.step_started(1),
        events.text_delta(1, "lost"),
        events.step_superseded(1, 4, 0, Usage(input_tokens=3, output_tokens=5, estimated=True)),
        events.step_started(2),
        events.text_delta(2, "kept"),
        endings.end_step(2, "stop", Usage(input_tokens=10, output_tokens=20, thinking_tokens=2, cached_tokens=1)),
    ]
    state = fold(numbered(log))
    end = endings.finish("stop", "m", 1.0)
    endings.complete(state, end, 0)
    assert end.run_finished.usage == Usage(
        input_tokens=13, output_tokens=25, thinking_tokens=2, cached_tokens=1, estimated=True
    )
    assert end.run_finished.text == "kept"


def test_the_end_repeats_the_text_only_when_something_was_superseded() -> None:
    state = fold(numbered([events.run_started("u", "m"), events.reply_started("m", "p", 1)]))
    end = endings.finish("stop", "m", 1.0)
    endings.complete(state, end, 0)
    assert not end.run_finished.HasField("text")
    assert (end.run_finished.model, end.run_finished.provider) == ("m", "p")


def test_retries_are_counted_and_traces_left_open_are_listed() -> None:
    log = [
        events.run_started("u", "m"),
        *events.retry_trace("evt_001", 1, RetryTrace(attempt=2)),
        events.reply_started("m", "p", 2),
        events.step_started(1),
        thinking("evt_002", 1),
        events.thinking_delta("evt_002", "hm"),
    ]
    state = fold(numbered(log))
    assert (state.retries, state.open_trace_ids(), state.step_thinking) == (1, ["evt_002"], "hm")
    told = endings.supersede(state, Usage())
    assert [events.kind_of(event) for event in told] == [
        "trace_ended",
        "trace_started",
        "trace_ended",
        "step_superseded",
    ]
    assert told[1].trace_started.retry.attempt == 3


def test_a_run_that_never_answered_is_made_again_without_withdrawing_anything() -> None:
    told = endings.supersede(fold(numbered([events.run_started("u", "m")])), Usage())
    assert [events.kind_of(event) for event in told] == ["trace_started", "trace_ended"]
    assert told[0].trace_started.retry.withdrawn_chars == 0


def test_a_failure_is_told_by_an_error_trace_first() -> None:
    error = ServiceError("AI_PROVIDER_ERROR", "It broke.", {"provider": "openai", "status": "500"})
    early = endings.fail(error, before_reply=True, trace="evt_001", step=1)
    assert early[-1].run_failed.before_reply
    late = endings.fail(error, before_reply=False, trace="evt_001", step=1)
    assert [events.kind_of(event) for event in late] == ["trace_started", "trace_ended", "run_failed"]
    assert late[0].trace_started.error.error == late[2].run_failed.error
    assert late[2].run_failed.error.provider_status == 500


def test_adding_usage_adds_every_figure() -> None:
    first = Usage(input_tokens=1, output_tokens=2, thinking_tokens=3, cached_tokens=4)
    assert add_usage(first, usage(7)) == Usage(input_tokens=2, output_tokens=9, thinking_tokens=3, cached_tokens=4)
    assert add_usage(first, Usage(estimated=True)).estimated
    paid = Usage(cost=Money(nano_usd=7), cache_write_tokens=5)
    assert add_usage(paid, paid) == Usage(cost=Money(nano_usd=14), cache_write_tokens=10)
