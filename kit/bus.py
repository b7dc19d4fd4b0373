"""NATS, core only: it wakes and carries, and may lose messages without harm (durability.md 29).

While it is away publishing drops and nothing fails; subscriptions hold, and are
live again when it is back.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from prometheus_client import Counter

from kit.tasks import spawn_essential
from kit.telemetry import log

DROPPED = Counter("threadloom_bus_dropped_total", "Messages not published: NATS was away or slow.")
CONNECT_SECONDS = 2
RECONNECT_WAIT_SECONDS = 0.2
# Beyond either NATS is slower than we write, and followers read from Postgres.
WAITING_MESSAGES = 10_000
WAITING_BYTES = 16 * 1024 * 1024

Handler = Callable[[bytes], None]


class Interest:
    """A subject somebody wants; `subscription` is set while NATS knows of it."""

    def __init__(self, subject: str, handler: Handler) -> None:
        self.subject, self.handler = subject, handler
        self.subscription: Subscription | None = None
        self.is_wanted = True


class Bus:
    """One connection to NATS, which never hears itself. `url` may hold credentials; they are never logged."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = Client()
        self._interests: set[Interest] = set()
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._waiting_bytes = 0
        self._attaching = asyncio.Lock()
        self._wake = asyncio.Event()
        self._publisher: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        """Whether NATS can be reached now."""
        return bool(self._client.is_connected)

    def start(self) -> None:
        """Begins to connect, for as long as it takes, and to publish."""
        self._spawn(self._connect())
        self._publisher = spawn_essential(self._publish_waiting(), "bus")

    def post(self, subject: str, payload: bytes) -> None:
        """Publishes soon and in order; drops when NATS is away."""
        is_full = len(self._waiting) >= WAITING_MESSAGES or self._waiting_bytes > WAITING_BYTES
        if is_full or not self._client.is_connected:
            DROPPED.inc()
            return
        self._waiting.append((subject, payload))
        self._waiting_bytes += len(payload)
        self._wake.set()

    def subscribe(self, subject: str, handler: Handler) -> Interest:
        """Calls the handler with each payload from soon on, also after NATS was away."""
        interest = Interest(subject, handler)
        self._interests.add(interest)
        if self._client.is_connected:
            self._spawn(self._attach(interest))
        return interest

    def unsubscribe(self, interest: Interest) -> None:
        """Ends a subscription."""
        interest.is_wanted = False
        self._interests.discard(interest)
        if interest.subscription is not None:
            self._spawn(self._detach(interest.subscription))

    async def close(self) -> None:
        """Publishes what waits, for a moment, and closes the connection."""
        with suppress(nats.errors.Error, asyncio.TimeoutError, OSError):
            if self._client.is_connected:
                while self._waiting:
                    await self._client.publish(*self._waiting.popleft())
                await self._client.flush(timeout=1)
        tasks = [self._publisher, *self._tasks] if self._publisher else [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client.is_connected or self._client.is_reconnecting:
            await self._client.close()

    async def _connect(self) -> None:
        await self._client.connect(
            servers=[self._url],
            connect_timeout=CONNECT_SECONDS,
            no_echo=True,
            reconnect_time_wait=RECONNECT_WAIT_SECONDS,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            error_cb=self._on_error,
            reconnected_cb=self._attach_all,
        )
        await self._attach_all()

    async def _attach_all(self) -> None:
        """The client brings back what it knew; what was wanted while it was away is new to it."""
        for interest in list(self._interests):
            await self._attach(interest)

    async def _attach(self, interest: Interest) -> None:
        async with self._attaching:
            if interest.subscription is not None or not interest.is_wanted:
                return

            async def on_message(message: Msg) -> None:
                interest.handler(message.data)

            with suppress(nats.errors.Error, OSError):
                interest.subscription = await self._client.subscribe(interest.subject, cb=on_message)
        await self._drop_unwanted(interest)

    async def _drop_unwanted(self, interest: Interest) -> None:
        """It may have been given up while it was being made."""
        if not interest.is_wanted and interest.subscription is not None:
            await self._detach(interest.subscription)

    async def _detach(self, subscription: Subscription) -> None:
        with suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()

    async def _publish_waiting(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                subject, payload = self._waiting.popleft()
                self._waiting_bytes -= len(payload)
                try:
                    await self._client.publish(subject, payload)
                except (nats.errors.Error, OSError):
                    DROPPED.inc()

    async def _on_error(self, error: Exception) -> None:
        log.warning("nats", error=type(error).__name__)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
