"""One run as a response of server-sent events: the head's hold, frames, keep-alive, and every way to end."""

import asyncio
from collections.abc import Callable, Sequence

from prometheus_client import Histogram
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kit.errors import ServiceError, from_event_error
from services.gateway.following import Follower, Unreachable, unreachable
from services.gateway.limits import Patience
from services.gateway.middleware import TransferBroken, exchange_of
from services.gateway.transfers import Streams, Transfer
from services.gateway.wire import sse
from services.gateway.wire.frames import Cursor, Encoder, unseen
from threadloom.conversation.v1.run_event_pb2 import RunEvent

FIRST_BYTE_SECONDS = Histogram("threadloom_gateway_first_byte_seconds", "From the request to the head of its stream.")

# What ends the wait for the provider's answer (durability.md 13).
ANSWERS = frozenset(("reply_started", "run_finished", "run_failed"))

MakeEncoder = Callable[[str, str], Encoder]


class EventStream(Transfer):
    """One run's frames. It ends cleanly only after a terminal frame.

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
        super().__init__(streams)
        self._follower, self._make_encoder = follower, make_encoder
        self._patience, self._cursor, self._holds_head = patience, cursor, holds_head
        self._encoder: Encoder | None = None
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._sent_at = self._loop.time()
        self._held: list[bytes] = []
        self._held_since: float | None = None  # when the run was known; the head waits only so long
        # A reader that takes nothing for too long is let go.
        follower.on_stall = self.give_up

    def close(self) -> None:
        """Ends the call to the service."""
        self._follower.close()

    async def serve(self) -> None:
        """Passes on what the follower gives. Raises ServiceError before the head, TransferBroken."""
        while not self.is_ending:
            try:
                events = await self._follower.next()
            except ServiceError as error:
                await self._refused(error)
                return
            except Unreachable:
                raise TransferBroken if self.has_started else unreachable() from None
            await self._pass_on(events)

    async def _pass_on(self, events: Sequence[RunEvent]) -> None:
        """All frames of one batch go out in one write."""
        body = self._encode(events)
        self.is_ending = self._follower.is_done
        if not self.has_started:
            self._held.append(body)
            if self._may_start(events):
                await self._begin()
        elif body or self.is_ending:
            await self._put(body)
        elif self._loop.time() - self._sent_at > self._patience.keep_alive - self._patience.heartbeat:
            await self._put(sse.KEEP_ALIVE)

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

    async def _begin(self) -> None:
        """Sends the head, and what was held."""
        exchange_of(self.scope).run_id = self._follower.run_id
        FIRST_BYTE_SECONDS.observe(self._loop.time() - self._begun_at)
        headers = [*sse.HEADERS, (b"x-run-id", self._follower.run_id.encode())]
        await self.start(headers)
        held = b"".join(self._held)
        if held or self.is_ending:
            await self._put(held)

    async def _put(self, body: bytes) -> None:
        self._sent_at = self._loop.time()
        await self.write(body)

    async def _refused(self, error: ServiceError) -> None:
        """The service will not tell more: a status before the head, the terminal frame after it."""
        if not self.has_started:
            raise error
        encoder = self._encoder or self._make_encoder(self._follower.run_id, self._follower.message_id)
        self.is_ending = True
        await self._put(sse.to_bytes(encoder.refused(error)))


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
