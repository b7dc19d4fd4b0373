"""Following a run: the log from a seq on, then live (durability.md 15, 16).

A follower subscribes first, replays from Postgres, drops by seq, reads a gap from
Postgres, and hears every 2 s how far the log really is. Events come from the journal
when the run is owned here, over NATS when it is not; either may lose some.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

import psycopg
import psycopg_pool
from prometheus_client import Gauge

from kit.bus import Bus, Interest
from kit.db import translated
from kit.errors import ServiceError, not_found
from kit.tasks import spawn_essential, stop_task
from kit.telemetry import log
from services.conversation import limits
from services.conversation.domain.events import is_terminal
from services.conversation.journal import RunLog, batch_of
from services.conversation.store import log as event_log
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import RunEventBatch

FOLLOWERS = Gauge("threadloom_followers", "Streams that follow a run in this process.")


def thread_subject(project_id: UUID, thread_id: UUID) -> str:
    """Where a thread's events are published. UUIDs only: a slug with a dot would change the subject."""
    return f"threadloom.{project_id}.thread.{thread_id}"


def cursor_expired(thread_id: UUID) -> ServiceError:
    """CURSOR_EXPIRED naming where the text can still be read."""
    return ServiceError(
        "CURSOR_EXPIRED",
        "The events at this cursor are no longer kept; read the messages.",
        {"messages_url": f"/v1/conversations/{thread_id}/messages"},
    )


@dataclass(frozen=True)
class Followed:
    """The run a follower wants."""

    run_id: UUID
    project_id: UUID
    thread_id: UUID
    message_id: UUID
    ends_without: bool = False  # it is cancelled once no user's client follows it


class Feed:
    """What reaches one follower live. Bounded: one that is too far behind reads from Postgres instead."""

    def __init__(self) -> None:
        self._waiting: deque[RunEventBatch] = deque()
        self._arrived = asyncio.Event()
        self.is_gone = False

    def put(self, batch: RunEventBatch) -> None:
        """Hands a batch over; beyond the bound only how far the log is."""
        if len(self._waiting) >= limits.FEED_BATCHES:
            self._waiting.clear()
            batch = RunEventBatch(last_seq=batch.last_seq)
        self._waiting.append(batch)
        self._arrived.set()

    def end(self) -> None:
        """The run does not exist any more."""
        self.is_gone = True
        self._arrived.set()

    async def next(self) -> RunEventBatch | None:
        """The next batch, or None when the run is gone."""
        while not self._waiting:
            if self.is_gone:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()


class Hub:
    """All followers of this process."""

    def __init__(self, pool: psycopg_pool.AsyncConnectionPool, bus: Bus) -> None:
        self._pool, self._bus = pool, bus
        self._feeds: dict[UUID, set[Feed]] = {}
        self._interests: dict[UUID, Interest] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the follow heartbeat."""
        self._task = spawn_essential(self._heartbeat(), "follow heartbeat")

    async def stop(self) -> None:
        """Stops the follow heartbeat."""
        await stop_task(self._task)

    def publish(self, run: RunLog, batch: RunEventBatch) -> None:
        """Shows what was just committed: to followers here directly, to everybody else over NATS."""
        payload = batch.SerializeToString()
        if len(payload) > limits.PAGE_BYTES:
            for page in _pages((event.ByteSize(), event) for event in batch.events):
                self._deliver(run.run_id, batch_of(run, page))
        else:
            self._deliver(run.run_id, batch)
        if len(payload) > limits.PUBLISH_BYTES:
            batch = RunEventBatch(run_id=batch.run_id, thread_id=batch.thread_id, last_seq=batch.last_seq)
            payload = batch.SerializeToString()
        self._bus.post(thread_subject(run.project_id, run.thread_id), payload)

    def nudge(self, project_id: UUID, thread_id: UUID, run_id: UUID, last_seq: int) -> None:
        """Tells followers everywhere how far a run's log is: they read the rest."""
        batch = RunEventBatch(run_id=str(run_id), thread_id=str(thread_id), last_seq=last_seq)
        self._deliver(run_id, batch)
        self._bus.post(thread_subject(project_id, thread_id), batch.SerializeToString())

    def _deliver(self, run_id: UUID, batch: RunEventBatch) -> None:
        """Hands a batch to the followers of its run."""
        for feed in self._feeds.get(run_id, ()):
            feed.put(batch)

    async def follow(
        self, run: Followed, after: int, first: RunEventBatch | None = None
    ) -> AsyncIterator[RunEventBatch]:
        """Batches of events with a greater seq, to the terminal one; heartbeats are batches without events.

        `first` is what the caller just committed, so that it needs no reading. Raises
        NOT_FOUND when the run is deleted meanwhile.
        """
        with self._watch(run) as feed:
            if first is not None:
                yield first
                after = first.last_seq
            is_behind = first is None
            while True:
                if is_behind:
                    known = after
                    async for batch in self._replay(run, after):
                        yield batch
                        after = batch.last_seq
                        if is_terminal(batch.events[-1]):
                            return
                    if after == known:
                        yield _batch(run, [], after)  # tells the reader at once that it is attached
                live = await feed.next()
                if live is None:
                    raise not_found("run")
                if live.events and live.events[0].seq == after + 1:  # nearly always
                    fresh, is_behind = live, False
                else:
                    fresh = _after(run, live, after)
                    is_behind = live.last_seq > after and (not fresh.events or fresh.events[0].seq != after + 1)
                    if is_behind or (live.events and not fresh.events):
                        continue
                yield fresh
                after = fresh.last_seq
                if fresh.events and is_terminal(fresh.events[-1]):
                    return

    async def _replay(self, run: Followed, after: int) -> AsyncIterator[RunEventBatch]:
        while True:
            with translated():
                async with self._pool.connection() as connection:
                    rows = await event_log.read_events(connection, run.run_id, after, limits.PAGE_EVENTS)
            if rows and rows[0][0] != after + 1:
                raise cursor_expired(run.thread_id)  # trimmed meanwhile: only the terminal event is left
            for page in _pages((len(payload), RunEvent.FromString(payload)) for _, payload in rows):
                yield _batch(run, page)
                after = page[-1].seq
            if len(rows) < limits.PAGE_EVENTS:
                return

    @contextmanager
    def _watch(self, run: Followed) -> Iterator[Feed]:
        feed = Feed()
        self._feeds.setdefault(run.run_id, set()).add(feed)
        if run.run_id not in self._interests:
            subject = thread_subject(run.project_id, run.thread_id)
            self._interests[run.run_id] = self._bus.subscribe(subject, self._receive)
        FOLLOWERS.inc()
        try:
            yield feed
        finally:
            FOLLOWERS.dec()
            feeds = self._feeds[run.run_id]
            feeds.discard(feed)
            if not feeds:
                del self._feeds[run.run_id]
                self._bus.unsubscribe(self._interests.pop(run.run_id))

    def _receive(self, payload: bytes) -> None:
        batch = RunEventBatch.FromString(payload)
        self._deliver(UUID(batch.run_id), batch)

    async def _heartbeat(self) -> None:
        """Every 2 s, one read for all followed runs: a lost last wake-up must not hang a follower for ever."""
        while True:
            await asyncio.sleep(limits.HEARTBEAT_SECONDS)
            runs = list(self._feeds)
            if not runs:
                continue
            try:
                async with self._pool.connection() as connection:
                    newest = await event_log.newest_seqs(connection, runs)
            except (psycopg.Error, psycopg_pool.PoolTimeout) as error:
                # No heartbeat is the message: after 6 s the gateway looks for somebody who can read.
                log.warning("follow heartbeat misses the database", error=type(error).__name__)
                continue
            self._beat(runs, newest)

    def _beat(self, runs: list[UUID], newest: dict[UUID, int]) -> None:
        for run in runs:
            for feed in self._feeds.get(run, ()):
                if run in newest:
                    feed.put(RunEventBatch(run_id=str(run), last_seq=newest[run]))
                else:
                    feed.end()


def _after(run: Followed, batch: RunEventBatch, seq: int) -> RunEventBatch:
    """What of a batch is newer."""
    return _batch(run, [event for event in batch.events if event.seq > seq], seq)


def _batch(run: Followed, events: list[RunEvent], last_seq: int = 0) -> RunEventBatch:
    return RunEventBatch(
        run_id=str(run.run_id),
        thread_id=str(run.thread_id),
        message_id=str(run.message_id),
        events=events,
        last_seq=events[-1].seq if events else last_seq,
    )


def _pages(sized: Iterable[tuple[int, RunEvent]]) -> Iterator[list[RunEvent]]:
    """Events with their sizes in pages that fit a message."""
    page: list[RunEvent] = []
    size = 0
    for bytes_, event in sized:
        if page and size + bytes_ > limits.PAGE_BYTES:
            yield page
            page, size = [], 0
        page.append(event)
        size += bytes_
    if page:
        yield page
