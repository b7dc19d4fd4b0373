"""Tells webhooks what is to be told, at least once each, by any process of the service.

A row is leased, sent, and then written down as delivered: who is killed between the two has it sent again by
another once the lease ends, under the same id. A receiver that is slow, hangs or is away holds a few of the open
tries and no other webhook; after a failure it is tried one delivery at a time, after more with a rest between.
"""

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar
from uuid import UUID

import psycopg
import psycopg_pool
from prometheus_client import Counter, Gauge

from kit.db import is_away
from kit.errors import ServiceError
from kit.outbound import CannotReachError, Outbound
from kit.sealing import CannotOpenError, KeyRing
from kit.tasks import spawn_essential, stop_task
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.conversation import limits
from services.conversation.domain import webhooks
from services.conversation.domain.webhook_health import Health
from services.conversation.store import deliveries
from services.conversation.store.deliveries import Taken

PENDING = Gauge("threadloom_webhook_deliveries_pending", "Deliveries to be sent, of all processes, when last looked.")
DELIVERED = Counter("threadloom_webhook_delivered_total", "Deliveries that a receiver took.")
FAILED = Counter("threadloom_webhook_failed_total", "Tries that failed, by whether another follows.", ["is_last"])

Found = TypeVar("Found")


class Outcome(NamedTuple):
    """How a try ended. `error` is empty when the receiver took it; `asked`: its Retry-After in seconds."""

    status: int = 0
    error: str = ""
    asked: float | None = None


class Deliverer:
    """Sends due deliveries. `pauses`: seconds before each further try."""

    def __init__(
        self,
        pool: psycopg_pool.AsyncConnectionPool,
        outbound: Outbound,
        ring: KeyRing,
        pauses: Sequence[float] = limits.WEBHOOK_PAUSES,
    ) -> None:
        self._pool, self._outbound, self._ring, self._pauses = pool, outbound, ring, pauses
        self._wake = asyncio.Event()
        self._open: dict[asyncio.Task[None], Taken] = {}
        self._health = Health()
        self._taking: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        self._taking = spawn_essential(self._take_for_ever(), "webhooks")
        self._looking = spawn_essential(self._look_for_ever(), "webhooks look")

    def wake(self) -> None:
        """Something was committed."""
        self._wake.set()

    async def stop(self) -> None:
        """Takes nothing more, lets what is under way end within 1.5 s, and gives the rest to others.

        ANSWER_SECONDS longer at most when the database does not answer.
        """
        await stop_task(self._taking)
        await stop_task(self._looking)
        if self._open:
            await asyncio.wait(self._open, timeout=limits.WEBHOOK_DRAIN_SECONDS)
        await asyncio.gather(*(self._break_off(task, row) for task, row in list(self._open.items())))

    async def take(self) -> int:
        """Begins a try of what is due, as far as there is room; how many."""
        room = limits.WEBHOOK_TRIES_OPEN - len(self._open)
        if room <= 0:
            return 0
        now = time.monotonic()
        rooms = self._health.rooms(now)
        for id, count in Counts(row.webhook_id for row in self._open.values()).items():
            rooms[id] = max(0, rooms.get(id, limits.WEBHOOK_PARALLEL) - count)
        open_of = Counts(row.project_id for row in self._open.values())
        project_rooms = {id: max(0, limits.WEBHOOK_PROJECT_TRIES - count) for id, count in open_of.items()}
        rows = await self._use(
            lambda connection: deliveries.take(connection, rooms=rooms, project_rooms=project_rooms, limit=room)
        )
        for row in rows:
            task = asyncio.create_task(self._deliver(row), name="webhook")
            self._open[task] = row
            task.add_done_callback(self._close)
        return len(rows)

    def _close(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        self._wake.set()

    async def _break_off(self, task: asyncio.Task[None], row: Taken) -> None:
        await stop_task(task)
        try:
            await self._use(lambda connection: deliveries.give_back(connection, row))
        except Exception as error:  # its lease ends by itself
            log.warning("webhook try not given back", id=str(row.id), error=type(error).__name__)

    # ------------------------------------------------------------------ a try

    async def _deliver(self, row: Taken) -> None:
        try:
            outcome = await self._send(row)
            self._health.note(row.webhook_id, not outcome.error, time.monotonic())
            await self._record(row, outcome)
        except Exception as error:
            # The lease ends and it is sent again. One that goes wrong keeps nobody else.
            if not (isinstance(error, psycopg.Error) or is_away(error)):
                UNEXPECTED_ERRORS.labels("webhooks").inc()
            log.warning("webhook try not written down", id=str(row.id), error=type(error).__name__)

    async def _send(self, row: Taken) -> Outcome:
        try:
            secret = self._ring.open(bytes(row.sealed), place(row.project_id, row.webhook_id))
        except CannotOpenError as error:
            log.error("webhook secret does not open", webhook_id=str(row.webhook_id), cause=str(error))
            return Outcome(error="The signing secret can no longer be read: rotate it.")
        body = row.payload.encode()
        signature = webhooks.sign(secret, str(row.id), int(time.time()), body)
        try:
            answer = await self._outbound.request(
                "POST",
                row.url,
                headers={"Content-Type": "application/json", **signature},
                body=body,
                seconds=limits.WEBHOOK_SECONDS,
                max_bytes=limits.WEBHOOK_ANSWER_BYTES,
            )
        except CannotReachError as error:
            return Outcome(error=str(error))
        except ServiceError as error:
            return Outcome(error=error.message)
        if 200 <= answer.status < 300:
            return Outcome(answer.status)
        asked = webhooks.retry_after(answer.headers.get("Retry-After"), datetime.now(UTC))
        return Outcome(answer.status, f"The receiver answered {answer.status}.", asked)

    async def _record(self, row: Taken, outcome: Outcome) -> None:
        if not outcome.error:
            await self._use(lambda connection: deliveries.delivered(connection, row, outcome.status))
            DELIVERED.inc()
            return
        is_gone = outcome.status == 410
        pause = None if is_gone else webhooks.pause_after(row.attempts + 1, self._pauses, outcome.asked)

        async def record(connection: psycopg.AsyncConnection) -> None:
            if is_gone:
                await deliveries.disable(connection, row)
            await deliveries.failed(connection, row, outcome.status, outcome.error, pause)

        await self._use(record)
        FAILED.labels(str(pause is None).lower()).inc()
        log.info(
            "webhook try failed",
            webhook_id=str(row.webhook_id),
            id=str(row.id),
            status=outcome.status,
            tries=row.attempts + 1,
            is_last=pause is None,
        )

    async def _use(self, work: Callable[[psycopg.AsyncConnection], Awaitable[Found]]) -> Found:
        async with asyncio.timeout(limits.ANSWER_SECONDS), self._pool.connection() as connection:
            return await work(connection)

    # ------------------------------------------------------------------ loops

    async def _take_for_ever(self) -> None:
        while True:
            self._wake.clear()
            looked = time.monotonic()
            try:
                await self.take()
            except Exception as error:
                if not (isinstance(error, psycopg.Error) or is_away(error)):
                    raise
                log.warning("webhooks wait for the database", error=type(error).__name__)
                await asyncio.sleep(limits.WEBHOOK_POLL_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.WEBHOOK_POLL_SECONDS):
                    await self._wake.wait()
            await asyncio.sleep(max(0.0, looked + limits.WEBHOOK_GAP_SECONDS - time.monotonic()))

    async def _look_for_ever(self) -> None:
        while True:
            try:
                PENDING.set(await self._use(deliveries.count_pending))
            except Exception as error:
                if not (isinstance(error, psycopg.Error) or is_away(error)):
                    raise
            await asyncio.sleep(limits.OUTBOX_LOOK_SECONDS)


def place(project: UUID, webhook: UUID) -> str:
    """Where a secret is sealed for: it opens for this webhook only."""
    return f"conversation.webhooks:{project}:{webhook}"


async def seal_again(connection: psycopg.AsyncConnection, ring: KeyRing, limit: int) -> int:
    """Seals up to `limit` secrets that are under an older key of the ring under its first; returns how many."""
    count = 0
    for webhook, project, old in await deliveries.sealed_under(connection, ring.older_ids, limit):
        try:
            secret = ring.open(old, place(project, webhook))
        except CannotOpenError as error:
            log.error("webhook secret does not open", webhook_id=str(webhook), cause=str(error))
            continue
        sealed = ring.seal(secret, place(project, webhook))
        count += await deliveries.replace_sealed(connection, webhook, old, sealed, ring.first_id)
    return count
