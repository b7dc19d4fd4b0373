"""Follows one run through whichever replica can tell of it.

A Follower gives the run's events in order, each once, and hides the death,
silence and forgetfulness of replicas (durability.md 16). It knows no HTTP.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from kit.callers import Caller
from kit.errors import ServiceError, unavailable
from services.gateway.clients import ConversationStubs
from services.gateway.limits import RETRY_FIRST_SECONDS, RETRY_LAST_SECONDS, Patience
from services.gateway.relays import Follow, FollowLost, Relays
from services.gateway.wire.frames import is_terminal
from threadloom.conversation.v1.conversation_service_pb2 import FollowRequest, RunRequest
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import RunEventBatch

FAILOVERS = Counter("threadloom_gateway_failovers_total", "Times a stream went on at another replica.", ["why"])

# Answers of the service after which asking again, or elsewhere, can help.
PASSING = frozenset(("UNAVAILABLE", "INTERNAL"))


class Unreachable(Exception):
    """No replica has said anything about the run for too long."""


@dataclass(frozen=True)
class Target:
    """What to follow, and for whom.

    `run` starts a run (it must carry a request_id, so that asking twice starts one);
    without it `run_id` is followed, or the thread's active run when that is empty.
    """

    caller: Caller
    request_id: str
    thread_id: str
    run: RunRequest | None = None
    run_id: str = ""
    after_seq: int = 0


class Follower:
    """Reads one run to its terminal event. Not for use by two tasks."""

    def __init__(self, relays: Relays, target: Target, patience: Patience) -> None:
        self.run_id = target.run_id
        self.message_id = ""
        self.is_done = False
        self.on_stall: Callable[[], object] = lambda: None
        self._relays, self._target, self._patience = relays, target, patience
        self._last_seq = target.after_seq
        self._promised_seq = 0  # what the previous heartbeat said is committed
        self.has_answered = False  # whether a replica has told anything yet
        self._refusals = 0
        self._attempts = 0  # since the last progress
        self._stubs: ConversationStubs | None = None
        self._follow: Follow | None = None
        self._loop = asyncio.get_running_loop()
        self._progress_at = self._idle_since = self._loop.time()
        self._reading_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def next(self) -> Sequence[RunEvent]:
        """The next fresh events; none when only time has passed (a heartbeat, a replica left).

        Raises ServiceError when the service refuses, Unreachable when no replica
        answers within the patience. Returns at the latest when a silence is over.
        """
        if self._follow is None:
            await self._pause()
            self._follow = self._open()
        else:
            # What the reader took for itself is no silence of the replicas.
            self._progress_at += self._loop.time() - self._idle_since
        try:
            batch = await self._read(self._follow)
        except ServiceError as refusal:
            return self._refused(refusal)
        except FollowLost as lost:
            # A reader that was too slow is no fault of the replica's.
            return self._leave(lost.why, is_suspect=lost.why != "slow")
        if batch is None:
            return self._leave("ended")  # a clean end without a terminal event: a replica that shuts down
        return self._accept(batch)

    def close(self) -> None:
        """Ends the follow, if one is open. The run goes on."""
        if self._timer is not None:
            self._timer.cancel()
        if self._follow is not None:
            self._follow.cancel()
            self._follow = None

    async def _pause(self) -> None:
        """Waits before asking again: not at first, then longer each time."""
        self._attempts += 1
        if self._attempts > 2:
            await asyncio.sleep(min(RETRY_FIRST_SECONDS * 2 ** (self._attempts - 3), RETRY_LAST_SECONDS))

    def _open(self) -> Follow:
        """Asks a replica, not the one just left when there is another."""
        candidates = [stubs for stubs in self._relays.conversation.in_order() if stubs is not self._stubs]
        self._stubs = candidates[0] if candidates else self._stubs
        assert self._stubs is not None
        target, relay = self._target, self._relays.to(self._stubs)
        if target.run is not None and not self.run_id:
            return relay.start(target.caller, target.request_id, target.run)
        asked = FollowRequest(thread_id=target.thread_id, run_id=self.run_id, after_seq=self._last_seq)
        return relay.follow(target.caller, target.request_id, asked)

    async def _read(self, follow: Follow) -> RunEventBatch | None:
        """The next batch, None at the end of the follow."""
        self._reading_since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._silence, self._watch)
        try:
            return await follow.read()
        finally:
            self._idle_since = self._loop.time()
            self._reading_since = None

    @property
    def _silence(self) -> float:
        is_start = self._target.run is not None and not self.run_id
        return self._patience.start_silence if is_start else self._patience.silence

    def _watch(self) -> None:
        """Ends a silent follow, or tells of a reader that no longer reads.

        One lazy timer a stream: it comes again when the time could be up, so a
        message costs no timer.
        """
        now, silence = self._loop.time(), self._silence
        since = now if self._reading_since is None else self._reading_since
        if now - since >= silence and self._follow is not None:
            self._follow.cancel("silent")
            since = now
        elif self._reading_since is None and now - self._idle_since >= self._patience.reader_stall:
            self.on_stall()
        self._timer = self._loop.call_at(since + silence, self._watch)

    def _accept(self, batch: RunEventBatch) -> Sequence[RunEvent]:
        self.has_answered = True
        if not self.message_id:  # a heartbeat may leave it out
            self.run_id, self.message_id = batch.run_id, batch.message_id
        events = batch.events
        if not events:
            return self._heartbeat(batch.last_seq)
        first, last = events[0].seq, events[-1].seq
        if first == self._last_seq + 1 and last - first + 1 == len(events):
            return self._take(events)
        return self._sort_out(events)

    def _sort_out(self, events: Sequence[RunEvent]) -> Sequence[RunEvent]:
        """Drops what is known; before a gap it stops, and the missing part is asked for again.

        The terminal event is never dropped: a reader whose cursor is at or behind the end waits for it.
        """
        fresh, expected = [], self._last_seq + 1
        for event in events:
            if event.seq > expected:
                self._leave("gap", is_suspect=False)
                break
            if event.seq == expected or is_terminal(event):
                fresh.append(event)
                expected = event.seq + 1
        return self._take(fresh) if fresh else ()

    def _take(self, events: Sequence[RunEvent]) -> Sequence[RunEvent]:
        self._progress()
        self._last_seq = events[-1].seq
        self.is_done = is_terminal(events[-1])
        return events

    def _heartbeat(self, committed_seq: int) -> Sequence[RunEvent]:
        """Two heartbeats in a row that know of events we did not get mean that they were lost on the way."""
        if self._last_seq < self._promised_seq:
            self._promised_seq = 0
            return self._leave("behind")
        self._promised_seq = committed_seq
        self._progress()
        return ()

    def _progress(self) -> None:
        self._progress_at = self._idle_since  # when the batch came
        self._attempts = self._refusals = 0

    def _refused(self, refusal: ServiceError) -> Sequence[RunEvent]:
        """Raises what cannot be helped by asking elsewhere; else leaves the replica."""
        if refusal.reason not in PASSING:
            raise refusal
        self._refusals += 1
        # Before anything was heard every replica is asked once; a reader in mid-stream has more patience.
        if not self.has_answered and (self._refusals >= len(self._relays.conversation) or refusal.reason == "INTERNAL"):
            raise refusal
        return self._leave("refused", is_suspect=False)

    def _leave(self, why: str, is_suspect: bool = True) -> Sequence[RunEvent]:
        """Drops the follow; the next one goes elsewhere. Raises Unreachable when patience is over."""
        FAILOVERS.labels(why).inc()
        if self._follow is not None:
            self._follow.cancel()
            self._follow = None
        if is_suspect and self._stubs is not None:
            self._stubs.replica.suspect()
        if self._loop.time() - self._progress_at >= self._patience.unreachable:
            raise Unreachable
        return ()


def unreachable() -> ServiceError:
    """UNAVAILABLE, for a reader that has not got anything yet."""
    return unavailable("No part of the service that could answer is reachable. Try again in a moment.")
