"""The runs of this process: taking them on, cancelling them, letting them go.

The imperative shell around `domain`. A run's task depends on no connection; it ends
when its run does, or stops without a word when the run is somebody else's.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from uuid import UUID

import structlog
from prometheus_client import Gauge

from kit.telemetry import UNEXPECTED_ERRORS, log
from services.conversation import limits
from services.conversation.answers import Answer, Answering
from services.conversation.domain.fold import RunState
from services.conversation.journal import RunLog, RunLostError, batch_of
from services.conversation.owned_run import OwnedRun, Stop
from services.conversation.store.owning import ClaimedRun
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import RunEventBatch, RunOptions

ACTIVE_RUNS = Gauge("threadloom_active_runs", "Runs this process owns.")


class Runner:
    """Owns one task a run."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        self._runs: dict[UUID, OwnedRun] = {}
        self.is_draining = False

    def begin(self, row: ClaimedRun, first: RunEvent, call_id: UUID) -> RunEventBatch:
        """Takes on a run that was just made; its first event and its first attempt are recorded already.

        Returns the first event as followers get it.
        """
        state = RunState()
        state.apply(first)
        run = self._own(row, state)
        batch = batch_of(run.log, [first])
        self._answering.publish(run.log, batch)
        self._spawn(run, lambda answer: answer.make(call_id))
        return batch

    def take_over(self, claimed: ClaimedRun) -> None:
        """Takes on a run of an owner that is gone."""
        run = self._own(claimed, RunState())
        if claimed.is_cancelled:
            run.ask_to_stop(Stop.CANCELLED)
        self._spawn(run, lambda answer: answer.resume(claimed.takeovers))

    async def cancel(self, run_id: UUID, timeout: float) -> bool:
        """Cancels a run owned here and waits for its end; False when it is not owned here."""
        run, task = self._runs.get(run_id), self._tasks.get(run_id)
        if run is None or task is None:
            return False
        run.ask_to_stop(Stop.CANCELLED)
        await asyncio.wait({task}, timeout=timeout)
        return True

    def ask_to_cancel(self, run_id: UUID) -> bool:
        """Cancels a run without waiting for its end; False when it is not owned here."""
        run = self._runs.get(run_id)
        if run is not None:
            run.ask_to_stop(Stop.CANCELLED)
        return run is not None

    async def drain(self, drain_seconds: float) -> None:
        """Lets owned runs finish; what is left then is handed over (durability.md 30)."""
        self.is_draining = True
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=drain_seconds)
        for run in list(self._runs.values()):
            run.ask_to_stop(Stop.HAND_OVER)
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=limits.LEASE_SECONDS)

    def _own(self, row: ClaimedRun, state: RunState) -> OwnedRun:
        run: OwnedRun
        run_log = RunLog(
            run_id=row.id,
            thread_id=row.thread_id,
            project_id=row.project_id,
            message_id=row.reply_message_id,
            epoch=row.epoch,
            state=state,
            on_lost=lambda: run.ask_to_stop(Stop.LOST),
            on_cancel=lambda: run.ask_to_stop(Stop.CANCELLED),
        )
        run = OwnedRun(
            log=run_log,
            user_id=row.user_id,
            user_message_id=row.user_message_id,
            model=row.model,
            options=RunOptions.FromString(row.options),
            system_prompt=row.system_prompt,
            started=time.monotonic() - row.age_seconds,
            turn_seconds=self._answering.turn.turn_seconds,
        )
        return run

    def _spawn(self, run: OwnedRun, work: "Work") -> None:
        self._answering.journal.open(run.log)
        self._runs[run.id] = run
        ACTIVE_RUNS.set(len(self._runs))
        self._tasks[run.id] = asyncio.create_task(self._outermost(run, work))

    async def _outermost(self, run: OwnedRun, work: "Work") -> None:
        structlog.contextvars.bind_contextvars(run_id=str(run.id))
        answer = Answer(self._answering, run)
        try:
            await work(answer)
        except RunLostError:
            log.warning("run goes on elsewhere")
        except Exception as error:
            # The runner's outermost frame: whatever happened, the run gets an end.
            UNEXPECTED_ERRORS.labels("runner").inc()
            log.error("run failed unexpectedly", exc_info=error)
            await answer.fail_unexpectedly()
        finally:
            self._answering.journal.close(run.log)
            if self._runs.get(run.id) is run:
                del self._runs[run.id], self._tasks[run.id]
            ACTIVE_RUNS.set(len(self._runs))


Work = Callable[[Answer], Coroutine[None, None, None]]
