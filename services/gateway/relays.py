"""The gateway's relays: one stream a conversation replica for all runs followed there (durability.md 33).

A Relay hands what comes to the buffers of its follows and never waits for one of
them: a reader that is too slow gets what its buffer holds, and follows again from its seq.
Items are named by a follow id of our own choosing, so events cannot come before it is
known whose they are. Nothing here fails over: that is the Follower's.
"""

import asyncio
import itertools
import random
import time
from collections import deque
from typing import TYPE_CHECKING

import grpc
from grpc import aio
from grpc_status import rpc_status
from prometheus_client import Counter, Gauge

from kit.callers import SYSTEM, Caller
from kit.channels import to_service_error
from kit.clients import Service
from kit.errors import ServiceError
from kit.ids import new_id
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.gateway.clients import ConversationStubs
from services.gateway.limits import BUFFER_BATCHES, BUFFER_BYTES, RELAY_SECONDS
from threadloom.conversation.v1.conversation_service_pb2 import FollowRequest, RunRequest
from threadloom.conversation.v1.relay_service_pb2 import (
    RelayCaller,
    RelayFollow,
    RelayItem,
    RelayRefusal,
    RelayRequest,
    RelayResponse,
    RelayStart,
    RelayUnfollow,
)
from threadloom.conversation.v1.run_pb2 import RunEventBatch

if TYPE_CHECKING:  # this class exists in the stubs' types only
    from threadloom.conversation.v1.relay_service_pb2_grpc import RelayServiceAsyncStub

RELAYS = Gauge("threadloom_gateway_relays", "Relays that are open.")
OVERFLOWS = Counter("threadloom_gateway_overflows_total", "Follows ended because their readers were too slow.")


class FollowLost(Exception):
    """Nothing more comes of this follow, for a reason that is not the run's. `why` is a word for the metrics."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Follow:
    """What one reader gets of a run over a relay. Read by one task."""

    def __init__(self, relay: "Relay", id: int) -> None:
        self._relay, self._id = relay, id
        self._waiting: deque[tuple[RunEventBatch, int]] = deque()  # with its bytes, of a reader that lags
        self._bytes = 0
        self._end: ServiceError | FollowLost | None = None
        self._is_over = False  # nothing more comes; what waits can still be read
        self._reader: asyncio.Future[None] | None = None

    async def read(self) -> RunEventBatch | None:
        """The next batch, None after the last. Raises ServiceError when refused, FollowLost."""
        while not self._waiting:
            if self._end is not None:
                raise self._end
            if self._is_over:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        batch, size = self._waiting.popleft()
        self._bytes -= size
        return batch

    def cancel(self, why: str = "left") -> None:
        """Follows no longer. A reader that waits gets FollowLost."""
        if not self._is_over:
            self._relay.unfollow(self._id, is_suspect=why == "silent")
            self.end(FollowLost(why))

    def put(self, batch: RunEventBatch) -> None:
        """Hands a batch to the reader. Beyond the buffer's bound no more comes: FollowLost follows what waits.

        What waits is in order, so it is kept: a reader that got none of it would ask for the same again,
        and never come further when one message holds more than the buffer.
        """
        if self._wake():
            self._waiting.append((batch, 0))
            return
        size = batch.ByteSize()
        self._waiting.append((batch, size))
        self._bytes += size
        if len(self._waiting) > BUFFER_BATCHES or self._bytes > BUFFER_BYTES:
            OVERFLOWS.inc()
            self.cancel("slow")

    def end(self, why: ServiceError | FollowLost | None) -> None:
        """Nothing more comes."""
        if not self._is_over:
            self._is_over, self._end = True, why
            self._wake()

    def _wake(self) -> bool:
        """Whether the reader waited, and takes what comes now."""
        if self._reader is None or self._reader.done():
            return False
        self._reader.set_result(None)
        return True


class Relay:
    """One stream to one replica. Opens at once; it is of use while `is_open`."""

    def __init__(self, stub: "RelayServiceAsyncStub", metadata: tuple[tuple[str, str], ...]) -> None:
        self._call = stub.Relay(metadata=metadata)
        self._asks: deque[RelayRequest] = deque()
        self._asked = asyncio.Event()
        self._follows: dict[int, Follow] = {}
        self._ids = itertools.count(1)
        # Not all at once, and before the server ends the connection for its age.
        self._retires_at = time.monotonic() + RELAY_SECONDS * random.uniform(0.8, 1.0)
        self._is_closed = self._is_retired = False
        self._reading = asyncio.create_task(self._read())
        self._writing = asyncio.create_task(self._write())
        RELAYS.inc()

    @property
    def is_open(self) -> bool:
        """Whether it takes new follows."""
        return not (self._is_closed or self._is_retired) and time.monotonic() < self._retires_at

    def start(self, caller: Caller, request_id: str, run: RunRequest) -> Follow:
        """Starts a run and follows it."""
        return self._ask(RelayRequest(start=RelayStart(caller=_caller(caller, request_id), run=run)))

    def follow(self, caller: Caller, request_id: str, asked: FollowRequest) -> Follow:
        """Follows a run."""
        return self._ask(RelayRequest(follow=RelayFollow(caller=_caller(caller, request_id), follow=asked)))

    def unfollow(self, id: int, *, is_suspect: bool = False) -> None:
        """Ends a follow. One that was silent for too long takes the relay's good name along."""
        if is_suspect:
            self.retire()
        if self._follows.pop(id, None) is not None:
            self._send(RelayRequest(follow_id=id, unfollow=RelayUnfollow()))
            self._close_if_done()

    def retire(self) -> None:
        """Takes no new follows, and closes when it has none left."""
        self._is_retired = True
        self._close_if_done()

    def _ask(self, ask: RelayRequest) -> Follow:
        ask.follow_id = id = next(self._ids)
        follow = Follow(self, id)
        if self._is_closed:
            follow.end(FollowLost("broken"))
        else:
            self._follows[id] = follow
            self._send(ask)
        return follow

    def _send(self, ask: RelayRequest) -> None:
        self._asks.append(ask)
        self._asked.set()

    def _close_if_done(self) -> None:
        if not self._follows and not self.is_open:
            self._call.cancel()  # the reader sees it and tidies up

    async def _write(self) -> None:
        try:
            while True:
                while self._asks:
                    await self._call.write(self._asks.popleft())
                self._asked.clear()
                await self._asked.wait()
        except (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError):
            pass  # the stream is gone: the reader is told, too

    async def _read(self) -> None:
        why: ServiceError | FollowLost = FollowLost("broken")
        try:
            while isinstance(response := await self._call.read(), RelayResponse):
                for item in response.items:
                    self._hand_over(item)
            # A stream that ends without a status of its own is a replica that shuts down.
            why = await self._reason()
        except aio.AioRpcError as error:
            why = _loss(error)
        except asyncio.CancelledError:
            pass  # we closed it, or its channel
        except Exception as error:
            # A consumer loop: the followers go elsewhere, and somebody must hear of it.
            UNEXPECTED_ERRORS.labels("relay").inc()
            log.error("relay failed", exc_info=error)
        finally:
            self._ended(why)

    def _hand_over(self, item: RelayItem) -> None:
        follow = self._follows.get(item.follow_id)
        if follow is None:
            return  # it was left a moment ago
        match item.WhichOneof("told"):
            case "batch":
                follow.put(item.batch)
            case "refusal":
                self._forget(item.follow_id, _refused(item.refusal))
            case "end":
                self._forget(item.follow_id, None)

    def _forget(self, id: int, why: ServiceError | None) -> None:
        self._follows.pop(id).end(why)
        self._close_if_done()

    async def _reason(self) -> "ServiceError | FollowLost":
        code = await self._call.code()
        return FollowLost("ended" if code is grpc.StatusCode.OK else "broken")

    def _ended(self, why: ServiceError | FollowLost) -> None:
        self._is_closed = True
        self._writing.cancel()
        self._call.cancel()  # a no-op, but where reading failed here
        RELAYS.dec()
        for follow in self._follows.values():
            follow.end(why)
        self._follows.clear()


class Relays:
    """One relay for each replica of the conversation service, made when it is first needed."""

    def __init__(self, conversation: Service[ConversationStubs]) -> None:
        self.conversation = conversation
        self._relays: dict[str, Relay] = {}

    def to(self, stubs: ConversationStubs) -> Relay:
        """The relay to this replica."""
        address = stubs.replica.address
        relay = self._relays.get(address)
        if relay is not None and relay.is_open:
            return relay
        if relay is not None:
            relay.retire()
        relay = Relay(stubs.relay, self.conversation.metadata(SYSTEM, str(new_id())))
        self._relays[address] = relay
        return relay


def _caller(caller: Caller, request_id: str) -> RelayCaller:
    project = str(caller.project) if caller.project is not None else ""
    return RelayCaller(role=caller.role.value, project_id=project, user_id=caller.user, request_id=request_id)


def _loss(error: aio.AioRpcError) -> ServiceError | FollowLost:
    """Why the stream broke: a refusal of ours, or its transport."""
    if rpc_status.from_call(error) is not None:
        return to_service_error(error)
    log.info("relay lost", code=error.code().name)
    return FollowLost("broken")


def _refused(refusal: RelayRefusal) -> ServiceError:
    wait = refusal.retry_after.ToNanoseconds() / 1e9 if refusal.HasField("retry_after") else None
    return ServiceError(refusal.reason, refusal.message, dict(refusal.metadata), wait)
