"""The load client: posts a request on a socket of its own and times what comes back.

It reads each subject's server-sent events just enough to count the text of the deltas and
to see the end. The text must be exactly what the provider wrote, else the figure is void.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from bench.shape import DELTA_CHARS, Shape, text_of

STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
# Gaps a reader sees as a stutter.
GAP_SECONDS = 0.1
# Longer than any turn of the bench takes on a slow machine.
TURN_SECONDS = 40.0


class Void(Exception):
    """What arrived is not what the provider wrote: no figure can be made of it."""


@dataclass(frozen=True)
class Dialect:
    """How a subject writes a delta and its end. Texts of the bench need no JSON escapes."""

    before_text: bytes
    end: bytes


OPENAI = Dialect(b'"content":"', b"data: [DONE]")
CONVERSATIONS = Dialect(b'data: {"text":"', b"event: done\n")
UI_MESSAGES = Dialect(b'"delta":"', b"data: [DONE]")


@dataclass(frozen=True)
class Request:
    """One request, ready for the wire."""

    host: str
    port: int
    wire: bytes
    dialect: Dialect
    shape: Shape


@dataclass
class Turn:
    """One answer as its reader saw it. Times are of `time.perf_counter`, seconds."""

    shape: Shape
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between two arrivals that brought text

    @property
    def ttft(self) -> float:
        """From the request to the first text."""
        return self.first_at - self.sent_at

    @property
    def whole(self) -> float:
        """From the request to the frame that ends the turn."""
        return self.ended_at - self.sent_at


class Reader(asyncio.Protocol):
    """Reads one chunked answer. `finished` gets Void when it is not what the provider wrote."""

    def __init__(self, request: Request) -> None:
        self.turn = Turn(request.shape)
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dialect, self._raw, self._body = request.dialect, bytearray(), bytearray()
        self._has_head = False
        self._texts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that is not whole will not be."""
        self._fail(Void("The connection was closed in mid-answer."))

    def data_received(self, data: bytes) -> None:
        """Takes what came, cut anywhere."""
        now = time.perf_counter()
        self._raw += data
        if not self._has_head and not self._take_head():
            return
        is_over = self._take_chunks()
        if self._take_texts():
            self._note_arrival(now)
        if not self.turn.ended_at and self._dialect.end in self._body:
            self.turn.ended_at = now
        if is_over:
            self._check()

    def _take_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        status = STATUS.match(self._raw)
        if status is None or status[1] != b"200":
            head, _, body = self._raw.decode(errors="replace").partition("\r\n\r\n")
            self._fail(Void(f"It answered {head.splitlines()[0]}: {body[:300]}"))
            return False
        del self._raw[: end + 4]
        self._has_head = True
        return True

    def _take_chunks(self) -> bool:
        """Moves whole chunks to the body; whether the last one came."""
        raw, start = self._raw, 0
        while (line := raw.find(b"\r\n", start)) >= 0:
            size = int(raw[start:line].partition(b";")[0], 16)
            end = line + 2 + size + 2
            if end > len(raw):
                break
            self._body += raw[line + 2 : end - 2]
            start = end
            if size == 0:
                return True
        del raw[:start]
        return False

    def _take_texts(self) -> bool:
        """Takes the texts of whole deltas off the body; whether there was one."""
        body, mark, start, count = self._body, self._dialect.before_text, 0, len(self._texts)
        while (found := body.find(mark, start)) >= 0:
            begin = found + len(mark)
            end = body.find(b'"', begin)
            if end < 0:
                break
            if end > begin:
                self._texts.append(bytes(body[begin:end]))
            start = end
        if start:
            del body[:start]
        return len(self._texts) > count

    def _note_arrival(self, now: float) -> None:
        turn = self.turn
        if turn.first_at:
            turn.gaps.append(now - turn.last_at)
        else:
            turn.first_at = now
        turn.last_at = now

    def _check(self) -> None:
        got, expected = b"".join(self._texts).decode(), text_of(self.turn.shape.deltas)
        if got != expected:
            self._fail(Void(f"{len(got) / DELTA_CHARS:g} deltas came of {self.turn.shape.deltas}, or other ones."))
        elif not self.turn.ended_at:
            self._fail(Void(f"The answer ended without its last frame: {self._body[-300:].decode(errors='replace')}"))
        elif not self.finished.done():
            self.finished.set_result(None)

    def _fail(self, error: Void) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)


async def ask(request: Request, seconds: float = TURN_SECONDS) -> Turn:
    """One turn on a fresh connection, which is made before the clock starts. Raises Void or TimeoutError."""
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(lambda: Reader(request), request.host, request.port)
    try:
        reader.turn.sent_at = time.perf_counter()
        transport.write(request.wire)
        async with asyncio.timeout(seconds):
            await reader.finished
    finally:
        transport.close()
    return reader.turn


async def in_order(
    requests: Sequence[Request], pause_seconds: float = 0.0, enough_seconds: float = math.inf
) -> list[Turn]:
    """One after the other; none begins when `enough_seconds` are over."""
    turns, began = [], time.perf_counter()
    for request in requests:
        if time.perf_counter() - began > enough_seconds:
            break
        turns.append(await ask(request))
        await asyncio.sleep(pause_seconds)
    return turns


async def spread(
    requests: Sequence[Request], per_second: float, meanwhile: Callable[[], Awaitable[None]] | None = None
) -> list[Turn]:
    """Each begins at its own deadline, whatever the earlier ones do. `meanwhile` runs beside them."""
    loop = asyncio.get_running_loop()
    first = loop.time() + 0.05

    async def one(index: int, request: Request) -> Turn:
        await asyncio.sleep(first + index / per_second - loop.time())
        return await ask(request)

    tasks = [asyncio.create_task(one(index, request)) for index, request in enumerate(requests)]
    beside = asyncio.ensure_future(meanwhile()) if meanwhile else None
    try:
        turns = list(await asyncio.gather(*tasks))
        if beside:
            await beside
        return turns
    finally:
        for task in [*tasks, *([beside] if beside else [])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Void, TimeoutError):
                await task
