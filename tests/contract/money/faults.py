"""A billing service whose answers get lost: what a schedule makes of the way between two services."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any

from grpc import aio

from kit.errors import unavailable
from services.billing.servicer import BillingServicer
from threadloom.billing.v1 import billing_service_pb2 as api

Context = aio.ServicerContext[object, object]


class Fault(StrEnum):
    """What happens to one request."""

    REFUSED = "refused"  # not carried out, and the caller is told
    LOST = "lost"  # carried out, and the caller is told it was not
    SILENT = "silent"  # carried out, and the caller hears nothing until its deadline
    OVERTAKEN = "overtaken"  # carried out after the call's release, if there is one soon, whoever still waits


# Longer than a run without an owner waits for its heir, who releases what was not sent.
OVERTAKEN_SECONDS = 0.25
METHODS = ("PlaceHold", "Settle", "Release")


class Faults:
    """The faults to come, by project and method: one project's never meet another's requests."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str, str], deque[Fault]] = defaultdict(deque)
        self._released: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.under_way: set[asyncio.Task[Any]] = set()  # requests that go on without their caller

    def add(self, project: str, method: str, fault: Fault, times: int) -> None:
        """The next `times` requests meet it, after those that others were told to meet."""
        self._queues[project, method].extend([fault] * times)

    def clear(self, project: str) -> None:
        """Everything is well again."""
        for method in METHODS:
            self._queues.pop((project, method), None)

    def forget(self) -> None:
        """Which calls were released; nothing of them is under way any more."""
        self._released.clear()

    def servicer(self) -> type[BillingServicer]:
        """The service with these faults."""
        faults = self

        class Forgetful(BillingServicer):
            async def PlaceHold(self, request: api.PlaceHoldRequest, context: Context) -> api.PlaceHoldResponse:
                found: api.PlaceHoldResponse = await faults.meet("PlaceHold", super().PlaceHold, request, context)
                return found

            async def Settle(self, request: api.SettleRequest, context: Context) -> api.SettleResponse:
                found: api.SettleResponse = await faults.meet("Settle", super().Settle, request, context)
                return found

            async def Release(self, request: api.ReleaseRequest, context: Context) -> api.ReleaseResponse:
                found: api.ReleaseResponse = await faults.meet("Release", super().Release, request, context)
                return found

        return Forgetful

    async def meet(self, name: str, method: Callable[..., Awaitable[Any]], request: Any, context: Context) -> Any:
        """The method's answer, if it is not lost."""
        queue = self._queues.get((request.project_id, name))
        fault = queue.popleft() if queue else None
        if fault is Fault.REFUSED:
            raise unavailable("away")
        if fault is Fault.OVERTAKEN:
            # A caller that leaves does not stop it.
            task = asyncio.create_task(self._overtaken(method(request, context), request.api_call_id))
            self.under_way.add(task)
            task.add_done_callback(self._arrived)
            return await asyncio.shield(task)
        found = await method(request, context)
        if name == "Release":
            self._released[request.api_call_id].set()
        if fault is Fault.LOST:
            raise unavailable("the answer was lost")
        if fault is Fault.SILENT:
            await asyncio.Event().wait()  # the caller's deadline ends this
        return found

    async def _overtaken(self, work: Awaitable[Any], call: str) -> Any:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._released[call].wait(), OVERTAKEN_SECONDS)
        return await work

    def _arrived(self, task: asyncio.Task[Any]) -> None:
        self.under_way.discard(task)
        if not task.cancelled():
            task.exception()  # its caller got it, or has left
