"""Whose run is it: this process's lease, and the runs of processes that are gone (durability.md 7 to 9).

A lease is one row a process. It is renewed every 0.5 s for 5 s and never touches
ai_runs: one UPDATE over all runs deadlocks with appends.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import psycopg
import psycopg_pool
from prometheus_client import Counter

from kit.bus import Bus
from kit.db import OwnConnection, translated
from kit.errors import ServiceError
from kit.ids import new_id
from kit.tasks import spawn_essential, stop_task
from kit.telemetry import log
from services.conversation import limits
from services.conversation.journal import Journal
from services.conversation.store import owning
from services.conversation.store.owning import ClaimedRun

TAKEOVERS = Counter("threadloom_takeovers_total", "Runs claimed from another process.")
CLAIMED_AT_ONCE = 100  # runs of one dead process are spread over its heirs, round by round


def worker_subject(worker: UUID) -> str:
    """Where a process is told that one of its runs is to be cancelled."""
    return f"threadloom.worker.{worker}"


class Ownership:
    """This process as an owner. `on_claimed` gets every run taken over."""

    def __init__(self, dsn: str, pool: psycopg_pool.AsyncConnectionPool, journal: Journal, bus: Bus) -> None:
        # The lease must never wait behind the work it protects.
        self._connection = OwnConnection(dsn, limits.LEASE_SECONDS / 2)
        self.worker_id = new_id()
        self.on_claimed: Callable[[ClaimedRun], None] = lambda _: None
        self._pool, self._journal, self._bus = pool, journal, bus
        self._held_until = 0.0  # monotonic; one renewal before the lease really ends
        self._steady_since: float | None = None  # monotonic; since when every renewal worked
        self._renewed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._may_claim = True

    @property
    def holds_lease(self) -> bool:
        """Whether the lease runs by this process's own clock. A frozen process wakes up to False."""
        return time.monotonic() < self._held_until

    async def until_held(self) -> None:
        """Waits for a lease that runs."""
        while not self.holds_lease:
            self._renewed.clear()
            await self._renewed.wait()

    async def start(self) -> None:
        """Takes the lease (fails when the database is away) and keeps it."""
        with translated():
            await self._renew()
        self._bus.subscribe(worker_subject(self.worker_id), self._cancel_asked)
        self._task = spawn_essential(self._keep(), "lease")

    def stop_claiming(self) -> None:
        """Claims nothing any more: the process is leaving."""
        self._may_claim = False

    async def stop(self) -> None:
        """Ends the lease at once, so that nobody has to wait for it to run out."""
        await stop_task(self._task)
        try:
            await self._connection.use(lambda connection: owning.release_worker(connection, self.worker_id))
        except (psycopg.Error, TimeoutError) as error:
            log.warning("lease left to run out", error=type(error).__name__)
        await self._connection.close()

    async def seize(self, run: UUID, *, only_unowned: bool) -> ClaimedRun | None:
        """Takes one active run: any, or only one without a living owner."""
        with translated():
            async with self._pool.connection() as connection:
                return await owning.seize(connection, worker=self.worker_id, run=run, only_unowned=only_unowned)

    async def claim_one(self, run: UUID) -> None:
        """Takes on a run that waits for an owner. What goes wrong is left to the regular claims, of any process."""
        if not self._may_claim or not self.holds_lease:
            return
        try:
            claimed = await self.seize(run, only_unowned=True)
        except ServiceError as error:
            log.warning("run left to be claimed", run_id=str(run), error=error.reason)
            return
        if claimed is not None:
            self.on_claimed(self._obeying(claimed))

    def wake_owner(self, worker: UUID, run: UUID) -> None:
        """Tells a run's owner to look at it now; without NATS it looks within 0.5 s anyway."""
        self._bus.post(worker_subject(worker), run.bytes)

    async def _keep(self) -> None:
        while True:
            started = time.monotonic()
            try:
                await self._renew()
                await self._check_owned()
                if self._may_claim and self._is_steady(limits.LEASE_SECONDS):
                    await self._claim()
            except (psycopg.Error, TimeoutError) as error:
                self._steady_since = None
                log.warning("lease not renewed", error=type(error).__name__)
            await asyncio.sleep(max(0.05, started + limits.RENEWAL_SECONDS - time.monotonic()))

    async def _renew(self) -> None:
        asked = time.monotonic()
        if self._held_until and asked > self._held_until:
            self._steady_since = None  # frozen or cut off for longer than a lease
        await self._connection.use(
            lambda connection: owning.renew_lease(connection, self.worker_id, limits.LEASE_SECONDS)
        )
        self._held_until = asked + limits.LEASE_SECONDS - limits.RENEWAL_SECONDS
        self._steady_since = self._steady_since or asked
        self._renewed.set()

    def _is_steady(self, seconds: float) -> bool:
        """Whether every renewal worked for so long: after a database outage every lease looks expired."""
        return self._steady_since is not None and time.monotonic() - self._steady_since > seconds

    async def _check_owned(self) -> None:
        """Finds out what became of our runs elsewhere: taken over, deleted, asked to cancel, or left by everybody."""
        runs = self._journal.owned_runs
        if not runs:
            return
        ids = [run.run_id for run in runs]
        found = await self._connection.use(lambda connection: owning.owned_runs(connection, ids))
        for run in runs:
            if self._journal.owned(run.run_id) is not run or run.is_committing:
                continue  # it ended meanwhile, or its own commit will tell
            row = found.get(run.run_id)
            if row is None or row.epoch != run.epoch:
                self._journal.lose(run)
            elif row.is_cancelled or (row.is_left and self._is_steady_for_watching()):
                run.on_cancel()

    async def _claim(self) -> None:
        claimed = await self._connection.use(
            lambda connection: owning.claim_free(
                connection,
                worker=self.worker_id,
                known=[run.run_id for run in self._journal.owned_runs],
                adopt_seconds=limits.ADOPT_AFTER_SECONDS,
                limit=CLAIMED_AT_ONCE,
            )
        )
        for run in claimed:
            TAKEOVERS.inc()
            log.warning("run claimed", run_id=str(run.id), epoch=run.epoch, takeovers=run.takeovers)
            self.on_claimed(self._obeying(run))

    def _obeying(self, run: ClaimedRun) -> ClaimedRun:
        """A run that everybody has left is not made for nobody, unless an outage kept its followers from saying so."""
        return replace(run, is_cancelled=run.is_cancelled or (run.is_left and self._is_steady_for_watching()))

    def _is_steady_for_watching(self) -> bool:
        return self._is_steady(limits.WATCH_STEADY_SECONDS)

    def _cancel_asked(self, payload: bytes) -> None:
        if len(payload) == 16:
            run = self._journal.owned(UUID(bytes=payload))
            if run is not None:
                run.on_cancel()
