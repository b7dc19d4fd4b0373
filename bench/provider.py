"""The fake provider: OpenAI chat completions from rendered bytes, at an exact pace.

A paced delta has a deadline counted from the stream's first one, so a late timer delays no
later delta. Each delta is an HTTP chunk of its own. `python -m bench.provider PORT`.
"""

import asyncio
import functools
import json
import re
import signal
import sys
from typing import Any, cast

import uvloop

from bench.shape import Shape, delta, shape_in

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)
REFUSED = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 25\r\n\r\nNo stream is named there."
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
# Handed to the socket at once in a burst; below it the loop's own cost would be what is measured.
PIECE_BYTES = 256 * 1024


def _chunk(payload: bytes) -> bytes:
    event = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _completion(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
    body = {
        "id": "chatcmpl-Bench0123456789abcdefghijklmn",
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": "gpt-4o-mini-2024-07-18",
        "service_tier": "default",
        "system_fingerprint": "fp_0123456789",
        "choices": choices,
        "usage": usage,
    }
    return _chunk(json.dumps(body, separators=(",", ":")).encode())


def _choice(words: dict[str, str], finish: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": words, "logprobs": None, "finish_reason": finish}]


ROLE = _completion(_choice({"role": "assistant", "content": ""}))


@functools.cache
def _delta(index: int) -> bytes:
    return _completion(_choice({"content": delta(index)}))


@functools.cache
def _end(deltas: int) -> bytes:
    usage = {"prompt_tokens": 20, "completion_tokens": deltas, "total_tokens": 20 + deltas}
    return _completion(_choice({}, "stop")) + _completion([], usage) + _chunk(b"[DONE]") + b"0\r\n\r\n"


@functools.cache
def rendered(deltas: int) -> bytes:
    """The whole body of an answer."""
    return ROLE + b"".join(map(_delta, range(deltas))) + _end(deltas)


class Connection(asyncio.Protocol):
    """One client's connection: requests one after the other, kept alive."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._rest = memoryview(b"")
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody reads any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._rest = memoryview(b"")

    def data_received(self, data: bytes) -> None:
        """Answers each whole request."""
        self._received += data
        head = self._received.find(b"\r\n\r\n")
        if head < 0:
            return
        length = LENGTH.search(self._received, 0, head)
        end = head + 4 + (int(length[1]) if length else 0)
        if len(self._received) < end:
            return
        body = bytes(self._received[head + 4 : end])
        del self._received[:end]
        shape = shape_in(body)
        if shape is None:
            self._transport.write(REFUSED)
        elif shape.interval_ms:
            self._begin(shape)
        else:
            self._rest = memoryview(HEAD + rendered(shape.deltas))
            self._pour()

    # ------------------------------------------------------------------ paced

    def _begin(self, shape: Shape) -> None:
        self._shape, self._sent, self._first_at = shape, 0, self._loop.time()
        self._transport.write(HEAD + ROLE)
        self._tick()

    def _tick(self) -> None:
        """Sends what is due, and comes again for the next deadline."""
        shape, interval = self._shape, self._shape.interval_ms / 1000
        # Loop timers have steps of a millisecond: what is due within half of one is due now.
        due = min(shape.deltas, 1 + int((self._loop.time() - self._first_at + 0.0005) / interval))
        self._transport.write(b"".join(map(_delta, range(self._sent, due))))
        self._sent = due
        if due < shape.deltas:
            self._timer = self._loop.call_at(self._first_at + due * interval, self._tick)
        else:
            self._transport.write(_end(shape.deltas))

    # ------------------------------------------------------------------ burst

    def pause_writing(self) -> None:
        """The reader is behind."""
        self._is_full = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._is_full = False
        self._pour()

    def _pour(self) -> None:
        while self._rest and not self._is_full:
            piece, self._rest = self._rest[:PIECE_BYTES], self._rest[PIECE_BYTES:]
            self._transport.write(piece)


async def serve(port: int) -> asyncio.Server:
    """Listens on 127.0.0.1."""
    return await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=1024)


async def _main(port: int) -> None:
    await serve(port)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1])))
