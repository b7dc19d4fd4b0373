"""Removes what is kept only for a while (old logs, seen requests, tickets, dead workers) and renews seals."""

import asyncio

import psycopg
import psycopg_pool

from kit.sealing import KeyRing
from kit.tasks import spawn_essential, stop_task
from kit.telemetry import log
from services.conversation import limits, webhooks
from services.conversation.provider_keys import seal_again
from services.conversation.store import deliveries
from services.conversation.store import log as event_log

# Each removes what is too old, in one statement that may run on several processes at once.
SWEEPS: tuple[tuple[str, dict[str, float]], ...] = (
    (
        "DELETE FROM conversation.idempotency_keys WHERE created_at < clock_timestamp() - make_interval(secs => %(s)s)",
        {"s": limits.IDEMPOTENCY_KEPT_SECONDS},
    ),
    ("DELETE FROM conversation.stream_tickets WHERE expires_at < clock_timestamp()", {}),
    (
        "DELETE FROM conversation.workers w WHERE lease_until < clock_timestamp() - make_interval(secs => %(s)s)"
        " AND NOT EXISTS (SELECT FROM conversation.ai_runs r WHERE r.worker_id = w.id AND r.status = 'running')",
        {"s": limits.DEAD_WORKERS_KEPT_SECONDS},
    ),
)


class Sweeper:
    """Sweeps every half minute. `kept_seconds` and `kept_bytes` bound the events of finished runs."""

    def __init__(
        self, pool: psycopg_pool.AsyncConnectionPool, kept_seconds: float, kept_bytes: float, ring: KeyRing
    ) -> None:
        self._pool, self._seconds, self._bytes = pool, kept_seconds, int(kept_bytes)
        self._ring = ring
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        self._task = spawn_essential(self._sweep_for_ever(), "sweeper")

    async def stop(self) -> None:
        """Ends."""
        await stop_task(self._task)

    async def sweep(self) -> None:
        """One round."""
        async with self._pool.connection() as connection:
            for statement, parameters in SWEEPS:
                await connection.execute(statement.encode(), parameters)
            await deliveries.remove_old(connection)
            trimmed = limits.SWEEP_RUNS
            while trimmed == limits.SWEEP_RUNS:
                trimmed = await event_log.trim_logs(
                    connection, seconds=self._seconds, max_bytes=self._bytes, limit=limits.SWEEP_RUNS
                )
            await seal_again(connection, self._ring, limits.SWEEP_PROVIDER_KEYS)
            await webhooks.seal_again(connection, self._ring, limits.SWEEP_WEBHOOKS)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(min(limits.SWEEP_SECONDS, self._seconds))
            try:
                await self.sweep()
            except (psycopg.Error, psycopg_pool.PoolTimeout) as error:
                log.warning("sweep skipped", error=type(error).__name__)
