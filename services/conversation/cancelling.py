"""Asking a run to stop, wherever it is owned, and runs that wait to leave the queue."""

import asyncio
import time
from uuid import UUID

import psycopg_pool
from sqlalchemy.ext.asyncio import AsyncEngine

from kit.callers import Caller
from kit.db import transaction, translated
from kit.errors import not_found
from services.conversation.domain import endings, events
from services.conversation.domain.fold import RunState
from services.conversation.following import Hub
from services.conversation.ownership import Ownership
from services.conversation.runner import Runner
from services.conversation.store import deliveries, queue, runs
from services.conversation.store.queue import Withdrawal
from services.conversation.store.runs import RunRow
from services.conversation.webhooks import Deliverer

# How long a cancel waits for the run to end, so that a new run may start at once.
CANCEL_SECONDS = 3.0
CANCEL_POLL_SECONDS = 0.05


class Cancelling:
    """Ends runs on request."""

    def __init__(
        self,
        engine: AsyncEngine,
        pool: psycopg_pool.AsyncConnectionPool,
        hub: Hub,
        runner: Runner,
        ownership: Ownership,
        deliverer: Deliverer,
    ) -> None:
        self._engine, self._pool, self._hub = engine, pool, hub
        self._runner, self._ownership, self._deliverer = runner, ownership, deliverer

    async def cancel(self, who: Caller, row: RunRow) -> RunRow:
        """Cancels a run the caller may see, and waits within bounds for its end; the run as it is then."""
        if row.status == "queued":
            await self.withdraw([row])
            row = await self._read(who, row.id)
        if row.status == "running":
            await self._request(who, row.id)
            row = await self._await_end(who, row)
        return row

    async def interrupt(self, who: Caller, run_id: UUID) -> None:
        """Asks a run to stop without waiting for it. One that has ended is left alone."""
        await self._request(who, run_id)
        row = await self._read(who, run_id)
        if row.status == "running" and not self._runner.ask_to_cancel(run_id):
            await self._nudge(row)

    async def withdraw(self, rows: list[RunRow]) -> None:
        """Takes runs of one thread out of its queue; one whose turn has come meanwhile is left alone."""
        told = [_withdrawal(row) for row in rows]
        with translated():
            async with self._pool.connection() as connection:
                await queue.withdraw(connection, told)
        self._deliverer.wake()
        for row in rows:
            self._hub.nudge(row.project_id, row.thread_id, row.id, 2)

    async def clear_queue(self, who: Caller, thread: UUID) -> None:
        """Takes every waiting run of a thread the caller may see out of its queue."""
        with translated():
            async with self._pool.connection() as connection:
                waiting = await queue.queued_runs(connection, thread)
        if waiting:
            await self.withdraw([await self._read(who, run) for run in waiting])

    async def _request(self, who: Caller, run_id: UUID) -> None:
        async with transaction(self._engine, who) as tx:
            await runs.request_cancel(tx, run_id)

    async def _read(self, who: Caller, run_id: UUID) -> RunRow:
        async with transaction(self._engine, who) as tx:
            row = await runs.get_run(tx, run_id)
        if row is None:
            raise not_found("run")
        return row

    async def _await_end(self, who: Caller, row: RunRow) -> RunRow:
        deadline = time.monotonic() + CANCEL_SECONDS
        while row.status == "running" and time.monotonic() < deadline:
            if not await self._runner.cancel(row.id, CANCEL_SECONDS):
                if await self._nudge(row):
                    continue
                await asyncio.sleep(CANCEL_POLL_SECONDS)
            row = await self._read(who, row.id)
        return row

    async def _nudge(self, row: RunRow) -> bool:
        """Tells the owner to look; takes the run over to end it when nobody alive owns it, and says so."""
        if row.worker_id is not None:
            self._ownership.wake_owner(row.worker_id, row.id)
        claimed = await self._ownership.seize(row.id, only_unowned=True)
        if claimed is not None:
            self._runner.take_over(claimed)
        return claimed is not None


def _withdrawal(row: RunRow) -> Withdrawal:
    """Nobody owns a run that waits: its whole log is written when it is cancelled."""
    log = [
        events.run_started(str(row.user_message_id), row.model),
        endings.finish(endings.CANCELLED, row.model, 0.0),
    ]
    events.number(log, 1)
    state = RunState()
    for event in log:
        state.apply(event)
    statements = deliveries.tell_run_ended(
        run=row.id,
        thread=row.thread_id,
        message=row.reply_message_id,
        user=row.user_id,
        model=row.model,
        status="cancelled",
        state=state,
    )
    started, finished = (event.SerializeToString() for event in log)
    return Withdrawal(row.id, started, finished, list(statements))
