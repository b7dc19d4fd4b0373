"""What holds for every run: balance, one end, rising ids, and resuming at any frame."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings

from services.gateway.wire import sse
from services.gateway.wire.frames import WHOLE_EVENT, Cursor, Frame, parse_cursor, unseen
from tests.wire.scripts import NAMES, RUN_ID, encoder, frames_of, runs, script
from threadloom.conversation.v1.run_event_pb2 import RunEvent

TERMINAL = (b"done", b"error")


def cursor_of(frame: Frame) -> Cursor:
    found = parse_cursor(frame.id.decode())
    assert found is not None
    return found


def resumed(events: list[RunEvent], cursor: Cursor) -> list[Frame]:
    """What a reader at the cursor gets from a fresh encoder fed only from the cursor's seq on."""
    fresh = encoder()
    return [
        frame for event in events if event.seq >= cursor.seq for frame in unseen(fresh.encode(event), event, cursor)
    ]


def check_balance(events: list[RunEvent]) -> None:
    opened, closed = [], []
    for frame in frames_of(events):
        data = json.loads(frame.data)
        if frame.event == b"trace_start":
            opened.append(data["id"])
        if frame.event == b"trace_end":
            assert data["id"] in opened
            closed.append(data["id"])
    assert len(set(opened)) == len(opened)
    assert sorted(opened) == sorted(closed)


def check_end(events: list[RunEvent]) -> None:
    ends = [frame.event in TERMINAL for frame in frames_of(events)]
    assert ends.count(True) == 1
    assert ends[-1]


def check_ids(events: list[RunEvent]) -> None:
    places = [(cursor.seq, cursor.index) for cursor in map(cursor_of, frames_of(events))]
    assert all(before < after for before, after in pairwise(places))
    assert all(index < WHOLE_EVENT for _, index in places)


def check_resume(events: list[RunEvent]) -> None:
    frames = frames_of(events)
    for at, frame in enumerate(frames[:-1], 1):
        assert resumed(events, cursor_of(frame)) == frames[at:]
    # At the end and behind it the end is told again.
    assert resumed(events, cursor_of(frames[-1])) == frames[-1:]
    assert resumed(events, Cursor(RUN_ID, events[-1].seq, WHOLE_EVENT)) == frames[-1:]


def check_lines(events: list[RunEvent]) -> None:
    for frame in frames_of(events):
        assert sse.to_bytes(frame).count(b"\n") == 4
        # By every idea of a line: some client libraries split at U+2028 and its like.
        assert len(sse.to_bytes(frame).decode().splitlines()) == 4


CHECKS = (check_balance, check_end, check_ids, check_resume, check_lines)


@pytest.mark.parametrize("name", NAMES)
def test_written_runs_keep_the_rules(name: str) -> None:
    for check in CHECKS:
        check(script(name))


@settings(derandomize=True, deadline=None)
@given(runs())
def test_made_up_runs_keep_the_rules(events: list[RunEvent]) -> None:
    for check in CHECKS:
        check(events)


def test_unknown_events_give_no_frames() -> None:
    assert encoder().encode(RunEvent(seq=5)) == ()


def test_text_is_the_same_after_a_withdrawal() -> None:
    text, told = "", ""
    for frame in frames_of(script("superseded")):
        data = json.loads(frame.data)
        if frame.event == b"delta":
            text += data["text"]
        elif frame.event == b"withdraw":
            text = text[: data["keep"]]
        elif frame.event == b"done":
            told = data["text"]
    assert text == told == "The second answer."


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12.1",
        f"{RUN_ID}",
        f"{RUN_ID}:12",
        f"{RUN_ID}:12.",
        f"{RUN_ID}:-1.1",
        f"{RUN_ID}:1.1 ",
        f"{RUN_ID}:1.1\n",
        f"{RUN_ID}:9223372036854775808.1",
        f"{RUN_ID}:١.1",
        f"{RUN_ID.upper()}x:1.1",
        f"{RUN_ID.replace('-', '0')}:1.1",
    ],
)
def test_what_is_no_cursor_is_none(text: str) -> None:
    assert parse_cursor(text) is None


def test_a_cursor_reads_back() -> None:
    cursor = Cursor(RUN_ID, 9223372036854775807, 2)
    assert parse_cursor(str(cursor)) == cursor
