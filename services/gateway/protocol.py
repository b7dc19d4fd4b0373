"""The HTTP/1.1 protocol, bounded: uvicorn's, with a limit on a request's head in bytes and in time.

The parser underneath takes heads of any size, and uvicorn waits for them for ever.
"""

import asyncio

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kit.ids import new_id
from services.gateway.limits import HEAD_BYTES, HEAD_SECONDS
from services.gateway.problems import Problem

STATUS_LINES = {400: b"HTTP/1.1 400 Bad Request\r\n", 431: b"HTTP/1.1 431 Request Header Fields Too Large\r\n"}


class HeadTooLarge(Exception):
    """Stops the parser."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head that is too large with 431, and drops a connection whose head does not come."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a head."""
        super().connection_made(transport)
        self._head_bytes, self._is_in_head, self._is_too_large = 0, True, False
        self._head_timer: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what a head that is not complete takes up."""
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head_bytes, self._is_in_head = 0, True
        self._await_head()

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_in_head = False
        self._head_arrived()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, or not HTTP of a bearable size, in the shape of every other error."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # another response is being written: bytes of ours would end up inside it
            return
        request_id = str(new_id())
        problem = Problem("INVALID_OPTIONS", "This is not a valid HTTP/1.1 request.", request_id)
        status = 400
        if self._is_too_large:
            status, message = 431, f"The request line and headers are larger than {HEAD_BYTES} bytes."
            problem = Problem("CONTENT_TOO_LARGE", message, request_id, limit=HEAD_BYTES, unit="bytes")
        self._write_and_close(status, msgspec.json.encode(problem), request_id)

    def _write_and_close(self, status: int, body: bytes, request_id: str) -> None:
        head = (
            STATUS_LINES[status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (request_id.encode(), len(body))
        )
        self.transport.write(head + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        """A head can also arrive whole in one read."""
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            self._is_too_large = True
            raise HeadTooLarge  # the parser stops and asks for send_400_response

    def _refuse_head(self) -> None:
        self._is_too_large = True
        self.send_400_response("")

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._drop)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _drop(self) -> None:
        self._head_timer = None
        self.transport.close()
