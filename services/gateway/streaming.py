"""One run as a response of server-sent events: the head's hold, frames, keep-alive, and every way to end."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from prometheus_client import Gauge, Histogram
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kit.errors import ServiceError, from_event_error, unavailable
from services.gateway.following import Follower, Unreachable, unreachable
from services.gateway.limits import Patience
from services.gateway.middleware import ClientLeft, TransferBroken, exchange_of
from services.gateway.wire import sse
from services.gateway.wire.frames import Cursor, Encoder, unseen
from threadloom.conversation.v1.run_event_pb2 import RunEvent

STREAMS = Gauge("threadloom_gateway_streams", "Event streams that are open.")
FIRST_BYTE_SECONDS = Histogram("threadloom_gateway_first_byte_seconds", "From the request to the head of its stream.")

# What ends the wait for the provider's answer (durability.md 13).
ANSWERS = frozenset(("reply_started", "run_finished", "run_failed"))

MakeEncoder = Callable[[str, str], Encoder]


class Streams:
    """The open event streams of this process."""

    def __init__(self) -> None:
        self._open: set[EventStream] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def add(self, stream: "EventStream") -> None:
        """Counts a stream in."""
        self._open.add(stream)
        self._none_left.clear()
        STREAMS.set(len(self._open))

    def discard(self, stream: "EventStream") -> None:
        """Counts a stream out."""
        self._open.discard(stream)
        if not self._open:
            self._none_left.set()
        STREAMS.set(len(self._open))

    async def drain(self, seconds: float) -> None:
        """Lets the streams end by themselves, then breaks those that are left: their clients resume elsewhere."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._none_left.wait()
        for stream in list(self._open):
            stream.give_up()


class EventStream:
    """An ASGI response. It ends cleanly only after a terminal frame; otherwise it breaks the transfer.

    With `holds_head` the status waits for the provider's answer, so that a failure
    before it is an HTTP error; without, it goes out as soon as the run is known.
    """

    def __init__(
        self,
        follower: Follower,
        make_encoder: MakeEncoder,
        streams: Streams,
        patience: Patience,
        cursor: Cursor | None = None,
        holds_head: bool = False,
    ) -> None:
        self._follower, self._make_encoder, self._streams = follower, make_encoder, streams
        self._patience, self._cursor, self._holds_head = patience, cursor, holds_head
        self._encoder: Encoder | None = None
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._sent_at = self._loop.time()
        self._has_started = False
        self._is_ending = False
        self._held: list[bytes] = []
        self._held_since: float | None = None  # when the run was known; the head waits only so long
        self._task: asyncio.Task[object] | None = None
        self._why: type[Exception] | None = None  # why the task was cancelled by us

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the stream. Raises ServiceError before the head; TransferBroken or ClientLeft at any time."""
        self._task, self._scope, self._send = asyncio.current_task(), scope, send
        self._follower.on_stall = lambda: self._stop(TransferBroken)
        watcher = asyncio.create_task(self._until_client_left(receive))
        self._streams.add(self)
        try:
            await self._serve()
        except asyncio.CancelledError:
            if self._why is None or self._task is None or self._task.uncancel() > 0:
                raise
            raise self._ended_by_us() from None
        finally:
            self._streams.discard(self)
            self._follower.close()
            watcher.cancel()

    def give_up(self) -> None:
        """Breaks the transfer: the process is about to end."""
        self._stop(TransferBroken)

    def _stop(self, why: type[Exception]) -> None:
        if self._why is None and self._task is not None:
            self._why = why
            self._task.cancel()

    def _ended_by_us(self) -> Exception:
        if self._why is TransferBroken and not self._has_started:
            return unavailable("This server is about to stop. Try again.")
        return self._why() if self._why is not None else TransferBroken()

    async def _until_client_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_ending:  # a response that is complete reads as a disconnect, too
            self._stop(ClientLeft)

    async def _serve(self) -> None:
        while not self._is_ending:
            try:
                events = await self._follower.next()
            except ServiceError as error:
                await self._refused(error)
                return
            except Unreachable:
                raise TransferBroken if self._has_started else unreachable() from None
            await self._pass_on(events)

    async def _pass_on(self, events: Sequence[RunEvent]) -> None:
        """All frames of one batch go out in one write."""
        body = self._encode(events)
        self._is_ending = self._follower.is_done
        if not self._has_started:
            self._held.append(body)
            if self._may_start(events):
                await self._start()
        elif body or self._is_ending:
            await self._write(body)
        elif self._loop.time() - self._sent_at > self._patience.keep_alive - self._patience.heartbeat:
            await self._write(sse.KEEP_ALIVE)

    def _encode(self, events: Sequence[RunEvent]) -> bytes:
        if not events:
            return b""
        if self._encoder is None:
            self._encoder = self._make_encoder(self._follower.run_id, self._follower.message_id)
        encode, cursor = self._encoder.encode, self._cursor
        if cursor is None:
            return b"".join([sse.to_bytes(frame) for event in events for frame in encode(event)])
        if events[-1].seq > cursor.seq:
            self._cursor = None
        return b"".join([sse.to_bytes(frame) for event in events for frame in unseen(encode(event), event, cursor)])

    def _may_start(self, events: Sequence[RunEvent]) -> bool:
        """Whether the head can go out. Raises the failure that came before the reply."""
        if not self._holds_head:
            return self._follower.has_answered
        for event in events:
            kind = event.WhichOneof("kind")
            if kind == "run_failed" and event.run_failed.before_reply:
                raise from_event_error(event.run_failed.error)
            if kind in ANSWERS:
                return True
        if self._held_since is None and self._follower.run_id:
            self._held_since = self._loop.time()
        # Looked at with every heartbeat, so the last one in time must let it go.
        longest = self._patience.hold - self._patience.heartbeat
        return self._held_since is not None and self._loop.time() - self._held_since > longest

    async def _start(self) -> None:
        """Sends the head, and what was held."""
        self._has_started = True
        exchange_of(self._scope).run_id = self._follower.run_id
        FIRST_BYTE_SECONDS.observe(self._loop.time() - self._begun_at)
        headers = [*sse.HEADERS, (b"x-run-id", self._follower.run_id.encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        held = b"".join(self._held)
        if held or self._is_ending:
            await self._write(held)

    async def _write(self, body: bytes) -> None:
        self._sent_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": not self._is_ending})

    async def _refused(self, error: ServiceError) -> None:
        """The service will not tell more: a status before the head, the terminal frame after it."""
        if not self._has_started:
            raise error
        encoder = self._encoder or self._make_encoder(self._follower.run_id, self._follower.message_id)
        self._is_ending = True
        await self._write(sse.to_bytes(encoder.refused(error)))


class ActiveRunStream(EventStream):
    """The stream of a thread's active run: 204 when none is active, the signal at which an EventSource stops."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the stream, or 204."""
        try:
            await super().__call__(scope, receive, send)
        except ServiceError as error:
            if error.reason != "NOT_FOUND":
                raise
            await Response(status_code=204)(scope, receive, send)
