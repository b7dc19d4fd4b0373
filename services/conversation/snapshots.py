"""Keeps the stored text of streaming replies at most about a second old (R108).

A reader gets the snapshot and the log behind it (durability.md 17), so a round that
is skipped costs it a longer tail and nothing else.
"""

import asyncio

import psycopg
import psycopg_pool

from kit.tasks import spawn_essential, stop_task
from kit.telemetry import log
from services.conversation import limits
from services.conversation.journal import Journal, RunLog
from services.conversation.store import log as event_log


class Snapshots:
    """Refreshes the texts of the journal's runs, many in one statement."""

    def __init__(self, journal: Journal, pool: psycopg_pool.AsyncConnectionPool) -> None:
        self._journal, self._pool = journal, pool
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        self._task = spawn_essential(self._refresh(), "snapshots")

    async def stop(self) -> None:
        """Ends."""
        await stop_task(self._task)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(limits.SNAPSHOT_SECONDS)
            stale = [run for run in self._journal.owned_runs if run.state.last_seq > run.snapshot_seq]
            for at in range(0, len(stale), limits.BATCH_RUNS):
                try:
                    await self._write(stale[at : at + limits.BATCH_RUNS])
                except (psycopg.Error, psycopg_pool.PoolTimeout) as error:
                    log.warning("texts at rest wait", error=type(error).__name__)

    async def _write(self, stale: list[RunLog]) -> None:
        # A state change under way is folded before it is committed: its run waits for the next round.
        runs = [run for run in stale if run.state.texts and not run.is_committing]
        if not runs:
            return
        rows = [(run.run_id, run.epoch, run.message_id, run.state.text, run.state.last_seq) for run in runs]
        async with self._pool.connection() as connection:
            await event_log.snapshot(connection, rows)
        for run, row in zip(runs, rows, strict=True):
            run.snapshot_seq = max(run.snapshot_seq, row[4])
