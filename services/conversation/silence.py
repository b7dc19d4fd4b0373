"""How long somebody may say nothing."""

import asyncio
from types import TracebackType
from typing import Self


class Silence:
    """An async context that raises TimeoutError inside once nothing was heard for `seconds`.

    One timer for all that is heard: moving a deadline with each piece of a stream costs
    more than looking at the clock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._timeout.__aenter__()
        self.heard()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def heard(self) -> None:
        """There was something; or it was asked for, after a pause."""
        self._last = self._loop.time()

    def pause(self) -> None:
        """Nobody listens until `heard`."""
        self._last = float("inf")

    def _look(self) -> None:
        left = self._last + self._seconds - self._loop.time()
        if left <= 0:
            self._timeout.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(min(left, self._seconds), self._look)
