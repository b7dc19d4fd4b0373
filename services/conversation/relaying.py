"""One gateway's relay: many runs started and followed over one stream (durability.md 33).

Each follow is a task that reads the very generator Run and Follow use. What all of
them have for the gateway when the stream is free to write goes out as one message,
so a commit of the journal costs one message, however many runs it holds.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import structlog
from prometheus_client import Gauge

from kit import callers
from kit.callers import current_caller
from kit.errors import ServiceError, invalid, seconds, unavailable
from kit.ids import new_id
from kit.interceptors import Call
from services.conversation import limits
from threadloom.conversation.v1 import relay_service_pb2 as api
from threadloom.conversation.v1.conversation_service_pb2 import FollowRequest, RunRequest
from threadloom.conversation.v1.run_pb2 import RunEventBatch

RELAYED = Gauge("threadloom_relayed_follows", "Follows that are told over relays.")

Batches = AsyncGenerator[RunEventBatch, None]
Start = Callable[[RunRequest], Batches]
Follow = Callable[[FollowRequest], Batches]

START_METHOD, FOLLOW_METHOD = "Relay/start", "Relay/follow"


class RelaySession:
    """One stream. `start` and `follow` run in a context whose caller is the follow's own."""

    def __init__(self, start: Start, follow: Follow) -> None:
        self._start, self._follow = start, follow
        self._waiting: deque[api.RelayResponse] = deque()  # items go straight into their message: no copy of a copy
        self._sizes: deque[int] = deque()  # bytes of each
        self._waiting_bytes = 0
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()
        self._follows: dict[int, asyncio.Task[None]] = {}
        self._newest_id = 0
        self._is_over = False

    async def serve(self, asks: AsyncIterator[api.RelayRequest]) -> AsyncIterator[api.RelayResponse]:
        """What the follows tell, until the gateway ends the stream. Raises INVALID_OPTIONS for a misused id."""
        reading = asyncio.create_task(self._read(asks))
        try:
            while not self._is_over:
                await self._filled.wait()
                if self._waiting:
                    yield self._take()
            await reading  # raises what the gateway did wrong
        finally:
            reading.cancel()
            self.close()
            await asyncio.wait({reading, *self._follows.values()})

    def close(self) -> None:
        """Ends every follow. For the end of the call: where its generator stood, gRPC just drops it."""
        self._is_over = True
        self._filled.set()
        self._emptied.set()  # nobody waits for room any more
        for task in self._follows.values():
            task.cancel()

    async def _read(self, asks: AsyncIterator[api.RelayRequest]) -> None:
        try:
            async for ask in asks:
                self._hear(ask)
        finally:
            self._is_over = True
            self._filled.set()

    def _hear(self, ask: api.RelayRequest) -> None:
        id = ask.follow_id
        if ask.HasField("unfollow"):
            task = self._follows.get(id)
            if task is not None:
                task.cancel()
            return
        if id <= self._newest_id:
            raise invalid("follow_id", "A relay's follow ids must rise: this one is not above the newest.")
        self._newest_id = id
        self._follows[id] = task = asyncio.create_task(self._tell(ask))
        RELAYED.inc()
        task.add_done_callback(lambda _: self._told(id))  # a task that is cancelled at once runs no line of its own

    async def _tell(self, ask: api.RelayRequest) -> None:
        """One follow from its ask to its last item. The task has a context of its own, and so its own caller."""
        id = ask.follow_id
        with Call(START_METHOD if ask.HasField("start") else FOLLOW_METHOD) as call:
            try:
                async with aclosing(self._batches(ask)) as batches:
                    async for batch in batches:
                        await self._room()
                        self._put(id).batch.CopyFrom(batch)
                        self._count()
                await self._room()
                self._put(id).end.SetInParent()
            except Exception as error:
                refusal = _refusal(call.failed(error))
                await self._room()
                self._put(id).refusal.CopyFrom(refusal)
            self._count()

    def _told(self, id: int) -> None:
        del self._follows[id]
        RELAYED.dec()

    def _batches(self, ask: api.RelayRequest) -> Batches:
        match ask.WhichOneof("ask"):
            case "start":
                asker = ask.start.caller
            case "follow":
                asker = ask.follow.caller
            case _:
                raise invalid("ask", "A relay starts, follows or unfollows.")
        structlog.contextvars.bind_contextvars(request_id=asker.request_id or str(new_id()))
        caller = callers.checked(asker.role, asker.project_id, asker.user_id)
        if len(self._follows) > limits.RELAY_FOLLOWS:
            raise unavailable("This relay follows as many runs as it may. Try again in a moment.")
        current_caller.set(caller)
        return self._start(ask.start.run) if ask.HasField("start") else self._follow(ask.follow.follow)

    async def _room(self) -> None:
        """Waits while the gateway does not read what waits already."""
        while self._waiting_bytes >= limits.RELAY_WAITING_BYTES and not self._is_over:
            self._emptied.clear()
            await self._emptied.wait()

    def _put(self, id: int) -> api.RelayItem:
        """A new item in the message that is next to be closed; to be filled at once, and counted."""
        if not self._waiting or self._sizes[-1] >= limits.RELAY_MESSAGE_BYTES:
            self._waiting.append(api.RelayResponse())
            self._sizes.append(0)
        return self._waiting[-1].items.add(follow_id=id)

    def _count(self) -> None:
        """Counts the newest item, now that it is filled."""
        size = self._waiting[-1].items[-1].ByteSize()
        self._sizes[-1] += size
        self._waiting_bytes += size
        self._filled.set()

    def _take(self) -> api.RelayResponse:
        """Everything that waits, up to a message's size."""
        taken = self._waiting.popleft()
        self._waiting_bytes -= self._sizes.popleft()
        if not self._waiting:
            self._filled.clear()
        self._emptied.set()
        return taken


def _refusal(error: ServiceError) -> api.RelayRefusal:
    wait = seconds(error.retry_after) if error.retry_after is not None else None
    return api.RelayRefusal(reason=error.reason, message=error.message, metadata=error.metadata, retry_after=wait)
