"""One HTTP/1.1 connection to the fake provider: requests in, exact bytes out, and what the client does to it.

httptools reads; writing is by hand, because the tests need control of every byte and every segment.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http.client import responses
from typing import cast

import httptools

from tests.fakes.calls import Call
from tests.fakes.replies import to_json

LAST_CHUNK = b"0\r\n\r\n"
# A reset makes many clients drop what they have not yet read. After the kernel of the client has everything,
# it gets this long to hand it over, so that "cut after K deltas" means that K were seen.
RESET_GRACE_SECONDS = 0.02
# The kernel does not say when its queue becomes empty, so it is asked.
FLUSH_POLL_SECONDS = 0.001
FLUSH_LIMIT_SECONDS = 5.0  # for a client that has stopped reading


@dataclass
class Request:
    """A request, whole. Header names are in lower case."""

    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    keep_alive: bool = True


def chunk(data: bytes) -> bytes:
    """`data` as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def response_head(status: int, headers: dict[str, str]) -> bytes:
    phrase = responses.get(status, "Scripted")
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


class Connection(asyncio.Protocol):
    """Answers its requests one after the other. `call` is the one being answered, for as long as it is open."""

    def __init__(
        self, handle: Callable[[Request, Connection], Awaitable[None]], open_connections: set[Connection]
    ) -> None:
        self._handle = handle
        self._open_connections = open_connections
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request()
        self._requests: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport
        self._has_no_more = False
        self.is_lost = False
        self.call: Call | None = None
        self.ignores_close = False

    # What asyncio reports.
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket().setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open_connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.write(response_head(400, {"connection": "close", "content-length": "0"}))
            self._transport.close()

    def eof_received(self) -> bool:
        """A client that says it will send no more has left, also if it could still read."""
        self._has_no_more = True
        goes_on = self._client_left()
        if not goes_on:
            self._transport.abort()
        return goes_on

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._open_connections.discard(self)
        self._writable.set()
        self._client_left()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _client_left(self) -> bool:
        """Record it at once. True if the open call goes on all the same."""
        if self.call is not None:
            self.call.leave()
            if self.ignores_close:
                return True
            self.call.end("closed_by_client")
        if self._task is not None:
            self._task.cancel()
        return False

    # What the parser reports.
    def on_url(self, url: bytes) -> None:
        self._request.path = httptools.parse_url(url).path.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._request.method = self._parser.get_method().decode("latin-1")
        if self._request.headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._request.body += body

    def on_message_complete(self) -> None:
        self._request.keep_alive = self._parser.should_keep_alive()
        self._requests.append(self._request)
        self._request = Request()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._answer_all())

    async def _answer_all(self) -> None:
        try:
            while self._requests and not self.is_lost:
                request = self._requests.popleft()
                await self._handle(request, self)
                self.call, self.ignores_close = None, False
                if self._has_no_more or not request.keep_alive:
                    self.close()
        except Exception:
            # A fault of the fake itself must fail the test that met it, not hang it.
            self.close()
            raise
        finally:
            self._task = None

    # What answers use.
    def write(self, data: bytes) -> None:
        if not self.is_lost:
            self._transport.write(data)

    async def drained(self) -> None:
        """Wait while the client is far behind."""
        await self._writable.wait()

    def write_json(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        data = to_json(value)
        fixed = {"content-type": "application/json", "content-length": str(len(data))}
        self.write(response_head(status, fixed | (headers or {})) + data)

    def close(self) -> None:
        """Close in order, after what was written."""
        self._transport.close()

    def abort(self) -> None:
        """Close at once, with what it was answering."""
        self.ignores_close = False
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

    async def reset(self) -> None:
        """End with a TCP reset, once all that was written has reached the client's machine."""
        await self._flushed()
        await asyncio.sleep(RESET_GRACE_SECONDS)
        if not self.is_lost:
            self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    async def _flushed(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FLUSH_LIMIT_SECONDS
        while not self.is_lost and loop.time() < deadline and self._unsent_bytes():  # noqa: ASYNC110
            await asyncio.sleep(FLUSH_POLL_SECONDS)

    def _unsent_bytes(self) -> int:
        """Bytes the client's kernel has not acknowledged (Linux), plus those ours has not been given."""
        ours = self._transport.get_write_buffer_size()
        try:
            queued = fcntl.ioctl(self._socket().fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        except OSError:
            return ours
        return ours + int(struct.unpack("i", queued)[0])

    def _socket(self) -> socket.socket:
        return cast(socket.socket, self._transport.get_extra_info("socket"))
