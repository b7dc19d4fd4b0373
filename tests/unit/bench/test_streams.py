"""The bench's provider and its load client: what is counted is what was written. No figure is asserted."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bench.load import CONVERSATIONS, OPENAI, UI_MESSAGES, Dialect, Reader, Request, Turn, Void, ask, in_order, spread
from bench.provider import serve
from bench.shape import DELTA_CHARS, Shape, delta, shape_in, text_of
from bench.subjects.subject import post
from bench.workloads import ideal_rate

DONE = {
    OPENAI: b"data: [DONE]\n\n",
    UI_MESSAGES: b"data: [DONE]\n\n",
    CONVERSATIONS: b'id: r:9.1\nevent: done\ndata: {"run_id":"r"}\n\n',
}


@asynccontextmanager
async def provider() -> AsyncIterator[Callable[[Shape], Request]]:
    server = await serve(0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield lambda shape: post(port, "/v1/chat/completions", {"messages": [{"content": str(shape)}]}, OPENAI, shape)
    finally:
        server.close()


def wire(pieces: list[bytes]) -> bytes:
    """An answer with these pieces of a body, each an HTTP chunk."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


async def read(dialect: Dialect, shape: Shape, *parts: bytes) -> Turn:
    """What the client makes of an answer that arrives in these parts."""
    reader = Reader(Request("", 0, b"", dialect, shape))
    for part in parts:
        reader.data_received(part)
    assert reader.finished.done()
    await reader.finished
    return reader.turn


def frame(dialect: Dialect, text: str) -> bytes:
    """The text as a subject of this dialect writes it."""
    if dialect is CONVERSATIONS:
        return b'id: r:1.1\nevent: delta\ndata: {"text":"%b"}\n\n' % text.encode()
    return b'data: {"type":"text-delta","id":"0",%b%b"}\n\n' % (dialect.before_text, text.encode())


def test_a_shape_is_found_in_the_last_message_of_a_request() -> None:
    body = b'{"messages":[{"content":"%b"},{"content":"%b"}]}' % (str(Shape(7)).encode(), str(Shape(9, 20)).encode())
    assert shape_in(body) == Shape(9, 20)


@pytest.mark.parametrize("body", [b"hello", b"bench:0:0", b"bench:10001:0"])
def test_what_names_no_possible_stream_is_none(body: bytes) -> None:
    assert shape_in(body) is None


def test_deltas_are_of_one_length_and_differ() -> None:
    deltas = [delta(index) for index in range(10_000)]
    assert {len(text) for text in deltas} == {DELTA_CHARS}
    assert len(set(deltas)) == len(deltas)


@pytest.mark.parametrize("shape", [Shape(1), Shape(2_000), Shape(1, 1), Shape(40, 1)], ids=str)
async def test_the_provider_writes_each_delta_once(shape: Shape) -> None:
    async with provider() as request:
        turn = await ask(request(shape))
    assert turn.sent_at <= turn.first_at <= turn.last_at <= turn.ended_at


async def test_a_paced_stream_comes_at_its_deadlines_and_not_before() -> None:
    shape = Shape(10, 20)
    async with provider() as request:
        turn = await ask(request(shape))
    # Loop timers have steps of a millisecond, at both ends.
    assert turn.last_at - turn.first_at >= shape.seconds - 0.002


async def test_streams_beside_each_other_are_told_apart() -> None:
    async with provider() as request:
        turns = await spread([request(Shape(count, 1)) for count in (3, 30, 17)], per_second=1_000)
    assert [turn.shape.deltas for turn in turns] == [3, 30, 17]


async def test_a_request_without_a_shape_is_void() -> None:
    async with provider() as request:
        wire = request(Shape(3))
        other = Request(wire.host, wire.port, wire.wire.replace(b"bench", b"other"), OPENAI, Shape(3))
        with pytest.raises(Void, match="400"):
            await in_order([other])


@pytest.mark.parametrize("dialect", DONE, ids=["openai", "ui messages", "conversations"])
async def test_merged_deltas_count_by_their_text_wherever_the_answer_is_cut(dialect: Dialect) -> None:
    text = text_of(6)
    answer = wire([frame(dialect, text[:5]), frame(dialect, text[5:20]) + frame(dialect, text[20:]), DONE[dialect]])
    for cut in range(1, len(answer)):
        turn = await read(dialect, Shape(6), answer[:cut], answer[cut:])
        assert turn.ended_at
    turn = await read(dialect, Shape(6), *(answer[index : index + 1] for index in range(len(answer))))
    assert len(turn.gaps) == 1  # text came with two of the chunks


@pytest.mark.parametrize(
    ("text", "end", "why"),
    [
        (text_of(5), DONE[CONVERSATIONS], "5 deltas came of 6"),
        (text_of(7), DONE[CONVERSATIONS], "7 deltas came of 6"),
        (text_of(6).replace("0003", "0004"), DONE[CONVERSATIONS], "or other ones"),
        (text_of(6), b": nothing\n\n", "without its last frame"),
    ],
    ids=["lost", "doubled", "changed", "unended"],
)
async def test_what_is_not_exact_is_void(text: str, end: bytes, why: str) -> None:
    with pytest.raises(Void, match=why):
        await read(CONVERSATIONS, Shape(6), wire([frame(CONVERSATIONS, text), end]))


async def test_an_answer_that_is_cut_short_is_void() -> None:
    reader = Reader(Request("", 0, b"", OPENAI, Shape(6)))
    reader.data_received(wire([frame(OPENAI, text_of(6)), DONE[OPENAI]])[:-5])
    reader.connection_lost(None)
    with pytest.raises(Void, match="mid-answer"):
        await reader.finished


def test_the_ideal_rate_counts_the_start_of_all_streams() -> None:
    # 200 streams of 100 deltas: the last begins after 1.99 s and takes 1.98 s.
    assert ideal_rate(Shape(100, 20), 200, 100.0) == pytest.approx(20_000 / 3.97)
