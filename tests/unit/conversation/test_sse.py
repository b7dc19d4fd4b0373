"""The provider's stream, cut anywhere, gives the payloads the specification gives."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.conversation.providers.sse import DataLines, LineTooLong

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.one_of(
    st.sampled_from([b"", b"", b": comment", b":", b"event: x", b"id: 1", b"retry: 5", b"data", b"dat", b" data: no"]),
    st.binary(max_size=8).map(lambda raw: b"data:" + re.sub(rb"[\r\n]", b"", raw)),
    st.sampled_from([b"data: a", b"data:  two blanks", b"data:\xe2\x82\xac", b"data: [DONE]", b"data:: x"]),
)
STREAMS = st.lists(st.tuples(LINES, LINE_ENDS), max_size=12).map(lambda lines: b"".join(map(b"".join, lines)))


def reference(stream: bytes) -> list[bytes]:
    """The payloads by the letter of the specification, from the whole stream; an unfinished event counts."""
    found: list[bytes] = []
    data: list[bytes] = []
    for line in [*re.split(rb"\r\n|\n|\r", stream), b""]:
        name, colon, value = line.partition(b":")
        if not line and data:
            found.append(b"\n".join(data))
            data = []
        elif name == b"data" and colon:
            data.append(value.removeprefix(b" "))
    return found


def payloads(chunks: list[bytes]) -> list[bytes]:
    lines = DataLines()
    return [payload for chunk in chunks for payload in lines.feed(chunk)] + lines.rest()


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(borders)]


@given(STREAMS, st.lists(st.integers(0, 1000), max_size=6))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_any_stream_cut_anywhere_reads_as_the_specification_says(stream: bytes, places: list[int]) -> None:
    assert payloads(cut(stream, places)) == reference(stream)


@given(STREAMS)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_a_stream_byte_by_byte_reads_the_same(stream: bytes) -> None:
    assert payloads([stream[at : at + 1] for at in range(len(stream))]) == reference(stream)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_is_given_with_the_chunk_that_completes_it(end: bytes) -> None:
    lines = DataLines()
    assert lines.feed(b"data: a" + end) == []
    assert lines.feed(b"data: b" + end + end[:1]) == [b"a\nb"]
    assert lines.feed(end[1:] + b"data: c" + end + end) == [b"c"]
    assert lines.rest() == []


def test_crlf_split_between_its_bytes_is_one_line_end() -> None:
    assert payloads([b"data: a\r", b"\n", b"data: b\r", b"\n\r", b"\n"]) == [b"a\nb"]


def test_comments_and_other_fields_are_skipped() -> None:
    assert payloads([b": hi\n\nevent: x\nid: 1\ndata: a\n: hi\ndata: b\n\n: end\n\n"]) == [b"a\nb"]


def test_a_last_event_without_its_blank_line_is_not_lost() -> None:
    assert payloads([b"data: a\n\ndata: b"]) == [b"a", b"b"]


def test_a_megabyte_in_one_line_is_one_payload() -> None:
    big = b"x" * 1_000_000
    stream = b"data: " + big + b"\n\n"
    assert payloads([stream[at : at + 4096] for at in range(0, len(stream), 4096)]) == [big]


def test_a_line_that_grows_byte_by_byte_is_scanned_once() -> None:
    lines = DataLines()
    lines.feed(b"data: ")
    for _ in range(20_000):
        assert lines.feed(b"x") == []
    assert lines.feed(b"\n\n") == [b"x" * 20_000]


def test_a_line_is_taken_up_to_the_bound_and_refused_beyond_it() -> None:
    lines = DataLines(max_bytes=100)
    assert lines.feed(b"data:" + b"x" * 95) == []
    assert lines.feed(b"\n\n") == [b"x" * 95]
    with pytest.raises(LineTooLong):
        DataLines(max_bytes=100).feed(b"data:" + b"x" * 96)


def test_many_data_lines_of_one_event_count_together() -> None:
    with pytest.raises(LineTooLong):
        DataLines(max_bytes=100).feed(b"data: 12345\n" * 20)
