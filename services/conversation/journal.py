"""The only committer of run events (durability.md 1 to 6).

One lane per process: while a batch commits, the next one gathers, so latency is about
one commit and the cost of an event falls as load grows. A run has at most one commit
in flight; a state change takes the run's pending events into its own transaction, so
deltas and state cannot overtake each other. What is committed goes to `publish`;
nothing else is ever shown.

(The first event of a run is written by the statement that makes the run, see
store/starts.py: there is no owner before it.)
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

import psycopg
import psycopg_pool
from prometheus_client import Counter, Histogram

from kit.db import OwnConnection, is_away
from kit.tasks import spawn_essential, stop_task
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.conversation import limits
from services.conversation.domain import endings, gathering
from services.conversation.domain.events import KIND_NUMBERS, kind_of, number
from services.conversation.domain.fold import RunState
from services.conversation.domain.pending import Pending
from services.conversation.store import log as event_log
from services.conversation.store.log import Appended, EventRow, Statement
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import RunEventBatch

COMMIT_SECONDS = Histogram("threadloom_journal_commit_seconds", "Time of one commit of the journal.", ["kind"])
BATCH_EVENTS = Histogram("threadloom_journal_batch_events", "Events in one batch.", buckets=(1, 2, 4, 8, 16, 64, 256))
LOST_RUNS = Counter("threadloom_runs_lost_total", "Runs that turned out to have another owner.")

Found = TypeVar("Found")

Publish = Callable[["RunLog", RunEventBatch], None]
# Given the state the commit leads to, the statements that go with it.
MakeStatements = Callable[[RunState], Iterable[Statement]]


class RunLostError(Exception):
    """The run has another owner, or was deleted. Nothing of this commit was stored."""


@dataclass(eq=False)
class RunLog:
    """The journal's side of one owned run.

    `on_lost` and `on_cancel` are called at most a few times and must not block.
    """

    run_id: UUID
    thread_id: UUID
    project_id: UUID
    message_id: UUID
    epoch: int
    state: RunState
    on_lost: Callable[[], None]
    on_cancel: Callable[[], None]
    credits_per_usd: int = 0  # of its newest hold
    pending: Pending = field(default_factory=Pending)
    has_shown: bool = False  # its first visible event was appended
    is_urgent: bool = False  # something pending must not wait for company
    is_busy: bool = False  # its row was locked a moment ago
    is_lost: bool = False
    snapshot_seq: int = 0
    is_committing: bool = False
    committed: asyncio.Event = field(default_factory=asyncio.Event)
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    names: tuple[str, str, str] = field(init=False)  # of run, thread and message, as every batch has them

    def __post_init__(self) -> None:
        self.names = str(self.run_id), str(self.thread_id), str(self.message_id)


@dataclass
class _Entry:
    """A run's part of a batch."""

    run: RunLog
    events: list[RunEvent]
    rows: list[EventRow]


class Journal:
    """Commits what the runs of this process have pending. `dsn` and `pool` are of the engine role."""

    def __init__(self, dsn: str, pool: psycopg_pool.AsyncConnectionPool, publish: Publish) -> None:
        self._lane_connection = OwnConnection(dsn, limits.ANSWER_SECONDS)
        self._pool, self._publish = pool, publish
        self._runs: dict[UUID, RunLog] = {}
        self._dirty: dict[UUID, RunLog] = {}
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()  # cuts a gather pause short
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ runs

    def open(self, run: RunLog) -> None:
        """Takes a run on."""
        self._runs[run.run_id] = run

    def close(self, run: RunLog) -> None:
        """Lets a run go; what is pending is dropped."""
        run.pending.clear()
        run.drained.set()
        if self._dirty.get(run.run_id) is run:
            del self._dirty[run.run_id]
        if self._runs.get(run.run_id) is run:
            del self._runs[run.run_id]

    def owned(self, run_id: UUID) -> RunLog | None:
        """The run, when this process owns it."""
        return self._runs.get(run_id)

    @property
    def owned_runs(self) -> list[RunLog]:
        """Every run this process owns."""
        return list(self._runs.values())

    def lose(self, run: RunLog) -> None:
        """The run is somebody else's by now: stops it here."""
        if not run.is_lost:
            run.is_lost = True
            LOST_RUNS.inc()
            log.warning("run lost", run_id=str(run.run_id), epoch=run.epoch)
            self.close(run)
            run.on_lost()

    # ------------------------------------------------------------------ appending

    def append(self, run: RunLog, event: RunEvent, hold_seconds: float = 0.0) -> None:
        """Puts an event behind what is pending; it is shown once committed.

        `hold_seconds` lets it wait that long for company.
        """
        if run.is_lost:
            return
        run.pending.add(event)
        run.is_urgent = True
        self._dirty[run.run_id] = run
        if hold_seconds:
            asyncio.get_running_loop().call_later(hold_seconds, self._hurry_up)
        else:
            self._hurry_up()

    def append_text(self, run: RunLog, text: str, size: int, *, step: int = 0, trace: str = "") -> None:
        """Puts text of a step, or of a thinking trace, behind what is pending. `size`: its bytes in UTF-8."""
        if run.is_lost:
            return
        run.pending.add_text(text, size, step=step, trace=trace)
        if not run.has_shown:
            run.has_shown = run.is_urgent = True
        self._dirty[run.run_id] = run
        if run.is_urgent or gathering.is_full(len(self._dirty), run.pending.bytes):
            self._hurry.set()
        self._wake.set()

    def _hurry_up(self) -> None:
        self._hurry.set()
        self._wake.set()

    async def make_room(self, run: RunLog) -> None:
        """Lets the lane catch up with a fast writer; waits while too much is pending."""
        if run.pending.bytes > limits.YIELD_PENDING_BYTES:
            await asyncio.sleep(0)
        while run.pending.bytes > limits.STOP_PENDING_BYTES and not run.is_lost:
            run.drained.clear()
            await run.drained.wait()

    async def change_state(
        self, run: RunLog, events: Sequence[RunEvent] = (), statements: MakeStatements = lambda _: ()
    ) -> list[tuple[Any, ...]]:
        """Commits the run's pending events, then `events`, and the statements, as one transaction.

        Returns the rows the statements returned: none, when the answer to the commit was lost once.
        Waits for Postgres as long as it takes. Raises RunLostError when the run is not ours any
        more; then nothing was stored.
        """
        while run.is_committing:
            run.committed.clear()
            await run.committed.wait()
        if run.is_lost:
            raise RunLostError
        run.is_committing = True
        try:
            taken = [*self._take(run), *events]
            number(taken, run.state.last_seq + 1)
            self._fold(run, taken)
            rows, made = _rows(run, taken), list(statements(run.state))
            with COMMIT_SECONDS.labels("state").time():
                returned = await self._insist(
                    run, lambda connection: event_log.change_state(connection, run.run_id, run.epoch, rows, made)
                )
            self._show(run, taken)
            return returned
        finally:
            self._done(run)

    async def _insist(self, run: RunLog, work: Callable[[psycopg.AsyncConnection], Awaitable[Found]]) -> Found:
        """Does the work on a pooled connection, again while Postgres is away."""
        pause = limits.RECONNECT_PAUSE_SECONDS
        while True:
            try:
                async with asyncio.timeout(limits.ANSWER_SECONDS), self._pool.connection() as connection:
                    return await work(connection)
            except Exception as error:
                if not is_away(error):
                    self._refused(run, error)
                    raise RunLostError from error
                log.warning("commit waits for the database", run_id=str(run.run_id), error=type(error).__name__)
            if run.is_lost:
                raise RunLostError
            await asyncio.sleep(pause)
            pause = min(pause * 2, limits.RECONNECT_PAUSE_MAX_SECONDS)

    def _refused(self, run: RunLog, error: Exception) -> None:
        """The run is not ours any more; or a row cannot be stored, and then it is not ours to repair:

        whoever claims the run makes that part again, and the third one ends it.
        """
        sqlstate = error.sqlstate if isinstance(error, psycopg.Error) else None
        if sqlstate != event_log.STALE_EPOCH:
            UNEXPECTED_ERRORS.labels("journal").inc()
            log.error("commit refused", run_id=str(run.run_id), error=type(error).__name__, sqlstate=sqlstate)
        self.lose(run)

    # ------------------------------------------------------------------ the lane

    def start(self) -> None:
        """Starts the lane."""
        self._task = spawn_essential(self._lane(), "lane")

    async def stop(self) -> None:
        """Stops it. What is pending stays pending: another owner makes it again."""
        await stop_task(self._task)
        await self._lane_connection.close()

    async def _lane(self) -> None:
        while True:
            await self._wake.wait()
            await self._pause()
            self._wake.clear()
            batch = self._gather()
            if not batch:
                continue
            try:
                with COMMIT_SECONDS.labels("append").time():
                    await self._commit(batch)
            except Exception as error:
                # A consumer loop: whatever went wrong, the lane must go on for the other runs.
                UNEXPECTED_ERRORS.labels("journal").inc()
                log.error("batch failed", exc_info=error)
                for entry in batch:
                    self.lose(entry.run)
            finally:
                for entry in batch:
                    self._done(entry.run)
            if self._dirty:
                self._wake.set()

    async def _pause(self) -> None:
        """Lets a batch gather under load. No run counts as committing meanwhile: a state change goes ahead."""
        seconds = gathering.pause_seconds(len(self._runs))
        if seconds and not self._hurry.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()
        self._hurry.clear()

    def _gather(self) -> list[_Entry]:
        """Takes what is pending, up to a batch. Runs with a commit in flight wait for the next one."""
        batch: list[_Entry] = []
        size = 0
        for run in list(self._dirty.values()):
            if len(batch) >= limits.BATCH_RUNS or size >= limits.BATCH_BYTES:
                break
            if run.is_committing or run.is_busy:
                continue  # whoever commits it, or the end of its pause, wakes the lane
            run.is_committing = True
            before = run.pending.bytes
            batch.append(_Entry(run, self._take(run, limits.BATCH_BYTES), []))
            size += before - run.pending.bytes
        return batch

    def _take(self, run: RunLog, max_bytes: int | None = None) -> list[RunEvent]:
        """Takes what the run has pending, or about so many bytes of it; the rest stays for the next commit."""
        taken = run.pending.take(max_bytes)
        run.is_urgent = run.is_urgent and bool(run.pending)
        self._dirty.pop(run.run_id, None)
        run.drained.set()
        return taken

    def _done(self, run: RunLog) -> None:
        run.is_committing = False
        run.committed.set()
        if run.pending:
            self._mark_dirty(run)

    async def _commit(self, batch: list[_Entry]) -> None:
        """Appends until Postgres has answered; then shows, keeps or loses run by run."""
        for entry in batch:
            number(entry.events, entry.run.state.last_seq + 1)
            entry.rows = _rows(entry.run, entry.events)
        BATCH_EVENTS.observe(sum(len(entry.rows) for entry in batch))
        answers = await self._append(batch)
        for entry in batch:
            self._settle(entry, answers.get(entry.run.run_id))

    async def _append(self, batch: list[_Entry]) -> dict[UUID, Appended]:
        pause = limits.RECONNECT_PAUSE_SECONDS
        while True:
            rows = [row for entry in batch for row in entry.rows]
            try:
                return await self._lane_connection.use(lambda connection: event_log.append(connection, rows))  # noqa: B023
            except Exception as error:
                if not is_away(error):
                    return await self._append_singly(batch, error)
                log.warning("the lane waits for the database", error=type(error).__name__)
            await asyncio.sleep(pause)
            pause = min(pause * 2, limits.RECONNECT_PAUSE_MAX_SECONDS)

    async def _append_singly(self, batch: list[_Entry], error: Exception) -> dict[UUID, Appended]:
        """One bad row must not fail its neighbours: run by run, and only the guilty run is stopped."""
        if len(batch) == 1:
            self._refused(batch[0].run, error)
            return {}
        answers: dict[UUID, Appended] = {}
        for entry in batch:
            answers |= await self._append([entry])
        return answers

    def _settle(self, entry: _Entry, answer: Appended | None) -> None:
        run = entry.run
        if run.is_lost:
            return
        if answer is None:
            self._put_back(run, entry.events)
        elif answer.epoch != run.epoch:
            self.lose(run)
        else:
            self._take_in(run, entry.events)
            if answer.is_cancelled:
                run.on_cancel()

    def _take_in(self, run: RunLog, events: list[RunEvent]) -> None:
        with suppress(RunLostError):
            self._fold(run, events)
        self._show(run, events)

    def _fold(self, run: RunLog, events: list[RunEvent]) -> None:
        try:
            for event in events:
                endings.complete(run.state, event, run.credits_per_usd)
                run.state.apply(event)
        except Exception as error:
            # A bug of ours: this process gives the run up, before its state and its log part.
            UNEXPECTED_ERRORS.labels("log order").inc()
            log.error("event cannot be folded", run_id=str(run.run_id), exc_info=error)
            self.lose(run)
            raise RunLostError from error

    def _put_back(self, run: RunLog, events: list[RunEvent]) -> None:
        """The run's row was locked: the events wait for a later batch, cut as they are."""
        run.pending.put_back(events)
        run.is_busy = True
        run.is_urgent = True  # it has waited enough
        asyncio.get_running_loop().call_later(limits.BUSY_PAUSE_SECONDS, self._end_pause, run)

    def _end_pause(self, run: RunLog) -> None:
        run.is_busy = False
        self._mark_dirty(run)

    def _mark_dirty(self, run: RunLog) -> None:
        if run.pending and not run.is_lost and self._runs.get(run.run_id) is run:
            self._dirty[run.run_id] = run
            if run.is_urgent or gathering.is_full(len(self._dirty), run.pending.bytes):
                self._hurry.set()
            self._wake.set()

    def _show(self, run: RunLog, events: list[RunEvent]) -> None:
        if events:
            self._publish(run, batch_of(run, events))


def batch_of(run: RunLog, events: Sequence[RunEvent]) -> RunEventBatch:
    """Events of a run as followers get them."""
    run_id, thread_id, message_id = run.names
    return RunEventBatch(
        run_id=run_id, thread_id=thread_id, message_id=message_id, events=events, last_seq=events[-1].seq
    )


def _rows(run: RunLog, events: list[RunEvent]) -> list[EventRow]:
    return [
        EventRow(run.run_id, run.epoch, event.seq, KIND_NUMBERS.get(kind_of(event), 0), event.SerializeToString())
        for event in events
    ]
