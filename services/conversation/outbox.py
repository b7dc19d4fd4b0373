"""Tells other services what the outbox holds, until they have received it.

A row is written in the transaction of the fact it tells, so neither exists without the
other. It is sent at least once, by any process; receivers know it by its id.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import NamedTuple, TypeVar
from uuid import UUID

import psycopg
import psycopg_pool
from prometheus_client import Counter, Gauge

from kit.db import is_away
from kit.errors import ServiceError
from kit.tasks import spawn_essential, stop_task
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.conversation import limits
from services.conversation.domain.retries import pause_after_refusals
from services.conversation.store import outbox
from services.conversation.store.outbox import Taken

SENT = Counter("threadloom_outbox_sent_total", "Rows of the outbox that were received.", ["topic"])
REFUSED = Counter("threadloom_outbox_refused_total", "Rows that were refused, to be tried again.", ["topic"])
WAITING = Gauge("threadloom_outbox_waiting", "Rows of the outbox, of all processes, when last looked.")
OLDEST = Gauge("threadloom_outbox_oldest_seconds", "Age of the outbox's oldest row when last looked; 0 without one.")

# Sends one payload; raises ServiceError when it was not received.
Send = Callable[[bytes], Awaitable[None]]
Found = TypeVar("Found")


class Fate(Enum):
    """What became of a row that was sent."""

    RECEIVED = "received"
    AWAY = "away"  # nobody there: nothing is wrong with the row
    REFUSED = "refused"  # a fault of ours, which time alone does not mend


class Round(NamedTuple):
    """How many rows were taken, and what became of them."""

    taken: int = 0
    received: int = 0
    away: int = 0


class Watch:
    """Whether something of a project was received since somebody began to watch."""

    def __init__(self, project: UUID) -> None:
        self.project, self.has_received = project, False


class Outbox:
    """Sends due rows, woken by `wake` and once a second. `senders` are by topic."""

    def __init__(self, pool: psycopg_pool.AsyncConnectionPool, senders: Mapping[str, Send]) -> None:
        self._pool, self._senders = pool, senders
        self._wake = asyncio.Event()
        self._watches: set[Watch] = set()
        self._draining = asyncio.Event()
        self._is_away = False  # as the last round found it
        self._sending: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        self._sending = spawn_essential(self._send_for_ever(), "outbox")
        self._looking = spawn_essential(self._look_for_ever(), "outbox look")

    async def drain(self, seconds: float) -> None:
        """Sends what is due until none of it is left, or for so long. Nothing is sent by itself afterwards."""
        self._draining.set()
        self._wake.set()
        try:
            async with asyncio.timeout(seconds):
                if self._sending is not None:
                    # Not cancelled: what it is sending would stay leased, and look as if it were not due.
                    await asyncio.wait({self._sending})
                await self._send_until_empty()
        except TimeoutError:
            log.warning("the outbox is left with rows", seconds=seconds)

    async def stop(self) -> None:
        """Ends. What is not received yet, others send, or the next start."""
        await stop_task(self._sending)
        await stop_task(self._looking)

    def wake(self) -> None:
        """Something was committed."""
        self._wake.set()

    @contextmanager
    def watch(self, project: UUID) -> Iterator[Watch]:
        """Notes whether something of the project is received here meanwhile."""
        watch = Watch(project)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    async def deliver(self, project: UUID) -> bool:
        """Sends what waits of one project now, due or not; whether any of it was received.

        Some of it another may be sending: whether that arrives in time, nobody here can know.
        """
        ends = asyncio.get_running_loop().time() + limits.OUTBOX_SEND_SECONDS
        try:
            rows = await self._use(
                lambda connection: outbox.take_of_project(
                    connection, project, seconds=limits.OUTBOX_LEASE_SECONDS, limit=limits.OUTBOX_ROWS
                )
            )
            return (await self._send_all(rows, ends)).received > 0
        except Exception as error:
            if not _may_pass(error):
                raise
            log.warning("the outbox could not deliver", error=type(error).__name__)
            return False

    async def send_due(self) -> Round:
        """One round."""
        # From before the lease begins: however late its answer comes, all sends end before the lease does.
        ends = asyncio.get_running_loop().time() + limits.OUTBOX_SEND_SECONDS
        rows = await self._use(
            lambda connection: outbox.take(connection, seconds=limits.OUTBOX_LEASE_SECONDS, limit=limits.OUTBOX_ROWS)
        )
        return await self._send_all(rows, ends)

    async def look(self) -> None:
        """Sets the gauges."""
        backlog = await self._use(outbox.look)
        WAITING.set(backlog.rows)
        OLDEST.set(backlog.seconds)

    # ------------------------------------------------------------------ a round

    async def _send_all(self, rows: Sequence[Taken], ends: float) -> Round:
        if not rows:
            return Round()
        fates = await asyncio.gather(*(self._send(row, ends) for row in rows))
        by_fate = {fate: [row for row, its in zip(rows, fates, strict=True) if its is fate] for fate in Fate}
        received, away, refused = by_fate[Fate.RECEIVED], by_fate[Fate.AWAY], by_fate[Fate.REFUSED]
        for row in received:
            SENT.labels(row.topic).inc()
        projects = {row.project for row in received}
        for watch in self._watches:
            watch.has_received |= watch.project in projects

        async def record(connection: psycopg.AsyncConnection) -> None:
            if received:
                await outbox.remove(connection, received)
            if away:
                await outbox.postpone(connection, away, limits.OUTBOX_POLL_SECONDS)
            if refused:
                pauses = [pause_after_refusals(row.attempts + 1) for row in refused]
                await outbox.refuse(connection, refused, pauses)

        await self._use(record)
        return Round(len(rows), len(received), len(away))

    async def _send(self, row: Taken, ends: float) -> Fate:
        try:
            async with asyncio.timeout_at(ends):
                await self._senders[row.topic](row.payload)
            return Fate.RECEIVED
        except TimeoutError:
            return Fate.AWAY
        except ServiceError as error:
            if error.reason == "UNAVAILABLE":
                return Fate.AWAY
            # Somebody must see it; the row stays until it is mended.
            REFUSED.labels(row.topic).inc()
            log.error("outbox row refused", topic=row.topic, id=str(row.id), code=error.reason, tries=row.attempts + 1)
        except Exception as error:
            # One row that cannot be sent must not keep the others.
            UNEXPECTED_ERRORS.labels("outbox").inc()
            log.error("outbox row failed", topic=row.topic, id=str(row.id), exc_info=error)
        return Fate.REFUSED

    async def _use(self, work: Callable[[psycopg.AsyncConnection], Awaitable[Found]]) -> Found:
        async with asyncio.timeout(limits.ANSWER_SECONDS), self._pool.connection() as connection:
            return await work(connection)

    # ------------------------------------------------------------------ loops

    async def _send_for_ever(self) -> None:
        while not self._draining.is_set():
            done = await self._try_round()
            if done.taken and not done.received:
                # The next round would end as this one did, be there ever so much to send: waking does not cut this.
                await _at_most_a_poll(self._draining)
            elif done.taken < limits.OUTBOX_ROWS:
                await _at_most_a_poll(self._wake)  # rows of others may be due too
                self._wake.clear()

    async def _send_until_empty(self) -> None:
        while True:
            was_away = self._is_away  # then there are rows that are due again within a poll
            done = await self._try_round()
            if not done.taken and not was_away:
                return
            if not done.received:
                await asyncio.sleep(limits.OUTBOX_POLL_SECONDS)

    async def _try_round(self) -> Round:
        try:
            done = await self.send_due()
        except Exception as error:
            if not _may_pass(error):
                raise
            log.warning("the outbox waits for the database", error=type(error).__name__)
            done = Round(taken=1, away=1)
        self._is_away = done.away > 0
        return done

    async def _look_for_ever(self) -> None:
        """On a timer of its own: how much waits matters most when the sending is busy or stuck."""
        while True:
            try:
                await self.look()
            except Exception as error:
                if not _may_pass(error):
                    raise
                log.warning("the outbox cannot be looked at", error=type(error).__name__)
            await asyncio.sleep(limits.OUTBOX_LOOK_SECONDS)


async def _at_most_a_poll(event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(limits.OUTBOX_POLL_SECONDS):
            await event.wait()


def _may_pass(error: Exception) -> bool:
    """Whether it is the database's: what waits stays where it is, and is sent later."""
    return isinstance(error, psycopg.Error) or is_away(error)
