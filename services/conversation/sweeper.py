"""Removes what is kept only for a while: old logs, seen requests, tickets, dead workers."""

import asyncio

import psycopg
import psycopg_pool

from kit.telemetry import UNEXPECTED_ERRORS, log
from services.conversation import limits
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

    def __init__(self, pool: psycopg_pool.AsyncConnectionPool, kept_seconds: float, kept_bytes: float) -> None:
        self._pool, self._seconds, self._bytes = pool, kept_seconds, int(kept_bytes)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        self._task = asyncio.create_task(self._sweep_for_ever())

    async def stop(self) -> None:
        """Ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sweep(self) -> None:
        """One round."""
        async with self._pool.connection() as connection:
            for statement, parameters in SWEEPS:
                await connection.execute(statement.encode(), parameters)
            trimmed = limits.SWEEP_RUNS
            while trimmed == limits.SWEEP_RUNS:
                trimmed = await event_log.trim_logs(
                    connection, seconds=self._seconds, max_bytes=self._bytes, limit=limits.SWEEP_RUNS
                )

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(min(limits.SWEEP_SECONDS, self._seconds))
            try:
                await self.sweep()
            except (psycopg.Error, psycopg_pool.PoolTimeout) as error:
                log.warning("sweep skipped", error=type(error).__name__)
            except Exception as error:
                # A consumer loop: the next round may work.
                UNEXPECTED_ERRORS.labels("sweeper").inc()
                log.error("sweep failed", exc_info=error)
