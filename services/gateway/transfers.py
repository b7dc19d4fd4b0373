"""Responses that are written piece by piece: counted, drained, and broken where they cannot be completed."""

import asyncio
import contextlib
from abc import ABC, abstractmethod

from prometheus_client import Gauge
from starlette.types import Receive, Scope, Send

from kit.errors import unavailable
from services.gateway.middleware import ClientLeft, TransferBroken

STREAMS = Gauge("threadloom_gateway_streams", "Event streams and exports that are open.")


class Streams:
    """The open transfers of this process."""

    def __init__(self) -> None:
        self._open: set[Transfer] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def add(self, stream: "Transfer") -> None:
        """Counts a transfer in."""
        self._open.add(stream)
        self._none_left.clear()
        STREAMS.set(len(self._open))

    def discard(self, stream: "Transfer") -> None:
        """Counts a transfer out."""
        self._open.discard(stream)
        if not self._open:
            self._none_left.set()
        STREAMS.set(len(self._open))

    async def drain(self, seconds: float) -> None:
        """Lets them end by themselves, then breaks those that are left: their clients resume elsewhere."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._none_left.wait()
        for stream in list(self._open):
            stream.give_up()


class Transfer(ABC):
    """An ASGI response. It ends cleanly only when it is complete; otherwise it breaks the transfer.

    A subclass writes it in `serve`, with `start` once and `write` until `is_ending`.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.has_started = False
        # Set before the last piece is written: what is complete reads as a disconnect, too.
        self.is_ending = False
        self._task: asyncio.Task[object] | None = None
        self._why: type[Exception] | None = None  # why the task was cancelled by us

    @abstractmethod
    async def serve(self) -> None:
        """Writes the response. Raises ServiceError before the head, TransferBroken at any time."""

    def close(self) -> None:  # noqa: B027 - not every response holds something
        """Lets go of what the response is made from."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the response. Raises ServiceError before the head; TransferBroken or ClientLeft at any time."""
        self._task, self.scope, self._send = asyncio.current_task(), scope, send
        watcher = asyncio.create_task(self._until_client_left(receive))
        self._streams.add(self)
        try:
            await self.serve()
        except asyncio.CancelledError:
            if self._why is None or self._task is None or self._task.uncancel() > 0:
                raise
            raise self._ended_by_us() from None
        finally:
            self._streams.discard(self)
            self.close()
            watcher.cancel()

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the head."""
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, body: bytes) -> None:
        """Sends a piece, the last one when `is_ending`. Waits while the reader takes nothing."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not self.is_ending})

    def give_up(self) -> None:
        """Breaks the transfer: the process is about to end, or nobody reads."""
        self._stop(TransferBroken)

    def _stop(self, why: type[Exception]) -> None:
        if self._why is None and self._task is not None:
            self._why = why
            self._task.cancel()

    def _ended_by_us(self) -> Exception:
        if self._why is TransferBroken and not self.has_started:
            return unavailable("This server is about to stop. Try again.")
        return self._why() if self._why is not None else TransferBroken()

    async def _until_client_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.is_ending:
            self._stop(ClientLeft)
