"""A cluster with its provider and its record, and how a test finds the process it means."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import UUID

import psutil

from deploy.local.secret_file import ProjectKeys
from services.conversation.limits import OUTBOX_LEASE_SECONDS
from tests.chaos.books import check_books
from tests.chaos.record import Record, RunFacts
from tests.fakes.calls import Call
from tests.fakes.provider import FakeProvider
from tests.support.books import WAITING
from tests.support.cluster import Cluster
from tests.support.http import Client
from tests.support.servers import RunningNats

T = TypeVar("T")

REPLICAS = (1, 2)
POLL_SECONDS = 0.02
# A row whose sender was killed is due again after its lease; then others have to see it, and billing to book it.
OUTBOX_SECONDS = OUTBOX_LEASE_SECONDS + 5.0


@dataclass
class Stack:
    """What a chaos test works on. `nats` when the cluster has none of its own; `record_url` when it is proxied."""

    cluster: Cluster
    provider: FakeProvider
    nats: RunningNats | None = None
    record_url: str = ""
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        self.record = Record(self.record_url or self.cluster.database.admin_url)

    def client(
        self, *gateways: int, user: str = "alice", project: ProjectKeys | None = None
    ) -> AbstractAsyncContextManager[Client]:
        """A client of some gateways (by number), or of all; of the project `default` unless another is named."""
        addresses = [self.cluster.http[number - 1] for number in gateways] or self.cluster.http
        return Client(addresses, self.cluster.headers(user, project))

    async def whole(self) -> None:
        """Waits until all is there and ready, after whatever a test before did and left."""
        cluster = self.cluster
        for service, addresses in (
            ("billing", cluster.billing),
            ("conversation", cluster.grpc),
            ("gateway", cluster.http),
        ):
            for index in range(1, len(addresses) + 1):
                if not cluster.has_ended(service, index):
                    cluster.resume(service, index)
                elif not cluster.is_supervised:
                    cluster.restart(service, index)
        await cluster.ready()

    async def told(self, seconds: float = OUTBOX_SECONDS) -> None:
        """Waits until billing has received all that was ever to be told. Raises TimeoutError."""
        await until(lambda: self.record.rows(WAITING) == [(0,)], seconds)

    async def check_books(self) -> None:
        """At the end of a test: all is at rest, and every call is paid for once, as it was made."""
        await self.whole()
        await self.told()
        self.record.check_at_rest()
        check_books(self.record, self.provider.calls)

    async def run_of(self, conversation: str) -> RunFacts:
        """The conversation's run, as soon as it is recorded."""
        return await until(lambda: self.record.run(conversation))

    async def owner_of(self, conversation: str) -> int:
        """The number of the replica that owns the conversation's run."""
        run = await self.run_of(conversation)
        assert run.worker_id is not None
        return next(number for number in REPLICAS if str(run.worker_id) in self.cluster.log("conversation", number))

    def calls_of(self, run: UUID) -> list[Call]:
        """What the provider was asked for a run, oldest first."""
        ids = {str(id) for (id,) in self.record.rows("SELECT id FROM conversation.api_calls WHERE run_id = %s", run)}
        return [call for call in self.provider.calls if call.client_request_id in ids]

    def replica_behind(self, backend: int) -> int:
        """The number of the conversation replica a backend of Postgres works for."""
        ((port,),) = self.record.rows("SELECT client_port FROM pg_stat_activity WHERE pid = %s", backend)
        return next(number for number in REPLICAS if port in self._ports(number))

    def _ports(self, replica: int) -> set[int]:
        connections = psutil.Process(self.cluster.pid("conversation", replica)).net_connections("tcp4")
        return {connection.laddr.port for connection in connections}


async def until(find: Callable[[], T | None], seconds: float = 10.0) -> T:
    """What `find` gives once it gives something. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while True:
        found = await asyncio.to_thread(find)
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {seconds} s")
        await asyncio.sleep(POLL_SECONDS)


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of a work that must end in time. Raises TimeoutError."""
    async with asyncio.timeout(max(seconds, 0.01)):
        return await work
