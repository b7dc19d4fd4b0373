"""Whether users' clients still follow the runs that are to end without them (durability.md 20).

Every process says once a second for which of these runs it serves a follower, and at
once when the last one has left it. A process that dies just stops saying it. The owner
of a run looks at what was said together with its lease (ownership.py).
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import psycopg
import psycopg_pool

from kit.tasks import spawn_essential, stop_task
from kit.telemetry import log
from services.conversation import limits
from services.conversation.store import watch


class Watching:
    """The runs watched through this process."""

    def __init__(self, pool: psycopg_pool.AsyncConnectionPool) -> None:
        self._pool = pool
        self._watched: Counter[UUID] = Counter()
        self._left: set[UUID] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to say who is there."""
        self._task = spawn_essential(self._say_for_ever(), "watching")

    async def stop(self) -> None:
        """Says it no more."""
        await stop_task(self._task)

    @contextmanager
    def follower(self, run: UUID) -> Iterator[None]:
        """A user's client follows the run, meanwhile."""
        self._watched[run] += 1
        if self._watched[run] == 1:
            self._left.discard(run)
            self._changed.set()
        try:
            yield
        finally:
            self._watched[run] -= 1
            if not self._watched[run]:
                del self._watched[run]
                self._left.add(run)
                self._changed.set()

    async def _say_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(limits.WATCH_SECONDS if self._watched else None):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                async with asyncio.timeout(limits.ANSWER_SECONDS):
                    await self._say()
            except (psycopg.Error, psycopg_pool.PoolTimeout, TimeoutError) as error:
                # The lease is longer than a restart takes; then everybody is given time to say it again.
                log.warning("watched runs not extended", error=type(error).__name__)
                await asyncio.sleep(limits.RECONNECT_PAUSE_SECONDS)
                self._changed.set()

    async def _say(self) -> None:
        here, left = list(self._watched), list(self._left)
        if not here and not left:
            return
        # Emptied first: who comes back and leaves again meanwhile has left later than this says.
        self._left.clear()
        try:
            async with self._pool.connection() as connection:
                if left:
                    await watch.leave(connection, left, limits.WATCH_SLACK_SECONDS)
                if here:
                    await watch.extend(connection, here, limits.WATCH_LEASE_SECONDS)
        except BaseException:
            self._left.update(run for run in left if run not in self._watched)
            raise
