"""Tells other services what the outbox holds, until they have received it.

A row is written in the transaction of the fact it tells, so neither exists without the
other. It is sent at least once, by any process; receivers know it by its id.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import psycopg
import psycopg_pool
from prometheus_client import Counter, Gauge

from kit.errors import ServiceError
from kit.tasks import spawn_essential, stop_task
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.conversation import limits
from services.conversation.store import outbox
from services.conversation.store.outbox import Taken

SENT = Counter("threadloom_outbox_sent_total", "Rows of the outbox that were received.", ["topic"])
REFUSED = Counter("threadloom_outbox_refused_total", "Rows that were refused, to be tried again.", ["topic"])
WAITING = Gauge("threadloom_outbox_waiting", "Rows of the outbox, of all processes, when last looked.")

# Sends one payload; raises ServiceError when it was not received.
Send = Callable[[bytes], Awaitable[None]]


class Outbox:
    """Sends due rows, woken by `wake` and once a second. `senders` are by topic."""

    def __init__(self, pool: psycopg_pool.AsyncConnectionPool, senders: Mapping[str, Send]) -> None:
        self._pool, self._senders = pool, senders
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        self._task = spawn_essential(self._send_for_ever(), "outbox")

    async def stop(self) -> None:
        """Ends. What is not received yet, others send, or the next start."""
        await stop_task(self._task)

    def wake(self) -> None:
        """Something was committed."""
        self._wake.set()

    async def send_due(self) -> bool:
        """One round; whether there may be more."""
        async with self._pool.connection() as connection:
            rows = await outbox.take(connection, seconds=limits.OUTBOX_LEASE_SECONDS, limit=limits.OUTBOX_ROWS)
        if not rows:
            return False
        pauses = await asyncio.gather(*(self._send(row) for row in rows))
        received = [row for row, pause in zip(rows, pauses, strict=True) if pause is None]
        kept = [(row, pause) for row, pause in zip(rows, pauses, strict=True) if pause is not None]
        async with self._pool.connection() as connection:
            if received:
                await outbox.remove(connection, received)
            if kept:
                await outbox.postpone(connection, *zip(*kept, strict=True))
        for row in received:
            SENT.labels(row.topic).inc()
        return len(rows) == limits.OUTBOX_ROWS

    async def _send(self, row: Taken) -> float | None:
        """None when it was received, else the seconds to wait, longer each time."""
        try:
            await self._senders[row.topic](row.payload)
            return None
        except ServiceError as error:
            if error.reason != "UNAVAILABLE":
                # A fault of ours that somebody must see; the row stays until it is mended.
                REFUSED.labels(row.topic).inc()
                log.error("outbox row refused", topic=row.topic, id=str(row.id), code=error.reason, tries=row.attempts)
        except Exception as error:
            # One row that cannot be sent must not keep the others.
            UNEXPECTED_ERRORS.labels("outbox").inc()
            log.error("outbox row failed", topic=row.topic, id=str(row.id), exc_info=error)
        doubled: float = limits.OUTBOX_PAUSE_SECONDS * 2 ** min(row.attempts - 1, limits.OUTBOX_DOUBLINGS)
        return doubled

    async def _send_for_ever(self) -> None:
        while True:
            try:
                while await self.send_due():
                    pass
                if not await self._is_woken():
                    async with self._pool.connection() as connection:
                        WAITING.set(await outbox.waiting(connection))
            except (psycopg.Error, psycopg_pool.PoolTimeout) as error:
                log.warning("the outbox waits for the database", error=type(error).__name__)
                await asyncio.sleep(limits.OUTBOX_POLL_SECONDS)

    async def _is_woken(self) -> bool:
        """Waits for `wake`, or until it is time to look; rows of others may be due too."""
        try:
            async with asyncio.timeout(limits.OUTBOX_POLL_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True
