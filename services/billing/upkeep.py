"""Frees holds that nobody closed, removes old ones, and proves again and again that the books agree."""

import asyncio
from dataclasses import dataclass

import psycopg
import psycopg_pool
from prometheus_client import Counter, Gauge

from kit.tasks import spawn_essential, stop_task
from kit.telemetry import log
from services.billing import limits

EXPIRED = Counter("threadloom_billing_holds_expired_total", "Holds that nobody settled or released in time.")
BREACHES = Gauge("threadloom_billing_breaches", "Accounts that differ from ledger and holds, when last looked.")

# One hold a transaction: each takes its accounts in the order of their key, so nothing waits in a circle.
# SKIP LOCKED: whoever holds the row closes it.
TAKE = (
    "SELECT api_call_id, project_id, user_id, day, amount_nano FROM billing.holds"
    " WHERE status = 'open' AND expires_at <= clock_timestamp() ORDER BY expires_at LIMIT 1 FOR UPDATE SKIP LOCKED"
)
OF_HOLD = (
    " project_id = %(project)s AND user_id IN ('', %(user)s) AND (period, start) IN"
    " (('day', %(day)s::date), ('month', date_trunc('month', %(day)s::date)::date), ('total', '1970-01-01'))"
)
LOCK = f'SELECT FROM billing.accounts WHERE {OF_HOLD} ORDER BY user_id COLLATE "C", period, start FOR UPDATE'
FREE = f"UPDATE billing.accounts SET held_nano = held_nano - %(amount)s WHERE {OF_HOLD}"
EXPIRE = "UPDATE billing.holds SET status = 'expired', closed_at = clock_timestamp() WHERE api_call_id = %(id)s"

KEPT_SECONDS = {
    "settled": limits.SETTLED_HOLDS_KEPT_SECONDS,
    "released": limits.UNBOOKED_HOLDS_KEPT_SECONDS,
    "expired": limits.UNBOOKED_HOLDS_KEPT_SECONDS,
}
# SKIP LOCKED: a late settle books it this moment.
REMOVE = (
    "DELETE FROM billing.holds WHERE api_call_id = ANY(ARRAY("
    "SELECT api_call_id FROM billing.holds WHERE status = %(status)s"
    " AND closed_at <= clock_timestamp() - make_interval(secs => %(kept)s) ORDER BY closed_at LIMIT %(most)s"
    " FOR UPDATE SKIP LOCKED))"
)

# One statement, so one snapshot: what moves meanwhile is wholly in it or wholly not.
COMPARE = """
WITH booked AS (
    SELECT project_id, user_id, day, 0 AS held, cost_nano AS spent FROM billing.cost_ledger
    UNION ALL SELECT project_id, user_id, day, amount_nano, 0 FROM billing.holds WHERE status = 'open'
), keyed AS (
    SELECT b.project_id, o.user_id, p.period, p.start, b.held, b.spent FROM booked b
    CROSS JOIN LATERAL (VALUES (b.user_id), ('')) o (user_id)
    CROSS JOIN LATERAL (VALUES ('day', b.day), ('month', date_trunc('month', b.day)::date),
        ('total', '1970-01-01'::date)) p (period, start)
), sums AS (
    SELECT project_id, user_id, period, start, sum(held) AS held, sum(spent) AS spent FROM keyed GROUP BY 1, 2, 3, 4
)
SELECT coalesce(a.project_id, s.project_id)::text, coalesce(a.period, s.period), coalesce(a.start, s.start)::text,
    coalesce(a.held_nano, 0), coalesce(s.held, 0)::bigint, coalesce(a.spent_nano, 0), coalesce(s.spent, 0)::bigint
FROM billing.accounts a FULL JOIN sums s USING (project_id, user_id, period, start)
WHERE coalesce(a.held_nano, 0) <> coalesce(s.held, 0) OR coalesce(a.spent_nano, 0) <> coalesce(s.spent, 0)
"""


@dataclass(frozen=True)
class Breach:
    """An account that differs from what it should be; nano-USD."""

    project: str
    period: str
    start: str
    held: int
    held_in_holds: int
    spent: int
    spent_in_ledger: int


class Upkeep:
    """Sweeps every half minute, compares every five."""

    def __init__(self, pool: psycopg_pool.AsyncConnectionPool) -> None:
        self._pool = pool
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins."""
        self._tasks = [
            spawn_essential(self._sweep_for_ever(), "hold sweeper"),
            spawn_essential(self._reconcile_for_ever(), "reconciliation"),
        ]

    async def stop(self) -> None:
        """Ends."""
        for task in self._tasks:
            await stop_task(task)

    async def sweep(self) -> int:
        """Frees expired holds, by the database's clock; how many."""
        freed = 0
        async with self._pool.connection() as connection:
            while freed < limits.SWEEP_HOLDS and await self._expire_one(connection):
                freed += 1
        EXPIRED.inc(freed)
        return freed

    async def remove(self) -> int:
        """Removes holds that were closed long ago, in short statements; how many."""
        removed = 0
        async with self._pool.connection() as connection:
            for status, kept in KEPT_SECONDS.items():
                values = {"status": status, "kept": kept, "most": limits.REMOVED_HOLDS}
                for _ in range(limits.REMOVALS):
                    found = (await connection.execute(REMOVE.encode(), values)).rowcount
                    removed += found
                    if found < limits.REMOVED_HOLDS:
                        break
        return removed

    async def reconcile(self) -> list[Breach]:
        """Every account that is not the sum of its ledger rows and open holds."""
        async with self._pool.connection() as connection, connection.transaction():
            await connection.execute(f"SET LOCAL statement_timeout = {limits.RECONCILE_MS}".encode())
            found = [Breach(*row) for row in await (await connection.execute(COMPARE.encode())).fetchall()]
        BREACHES.set(len(found))
        for breach in found:
            log.error("the books do not agree", **vars(breach))
        return found

    async def _expire_one(self, connection: psycopg.AsyncConnection) -> bool:
        async with connection.transaction():
            row = await (await connection.execute(TAKE.encode())).fetchone()
            if row is None:
                return False
            values = dict(zip(("id", "project", "user", "day", "amount"), row, strict=True))
            await connection.execute(LOCK.encode(), values)
            await connection.execute(FREE.encode(), values)
            await connection.execute(EXPIRE.encode(), values)
            log.warning("hold expired", api_call_id=str(values["id"]))
            return True

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(limits.SWEEP_SECONDS)
            try:
                await self.sweep()
                await self.remove()
            except (psycopg.Error, psycopg_pool.PoolTimeout) as error:
                log.warning("sweep skipped", error=type(error).__name__)

    async def _reconcile_for_ever(self) -> None:
        while True:
            await asyncio.sleep(limits.RECONCILE_SECONDS)
            try:
                await self.reconcile()
            except (psycopg.Error, psycopg_pool.PoolTimeout) as error:
                log.warning("reconciliation skipped", error=type(error).__name__)
