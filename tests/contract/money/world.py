"""Two conversation services, billing, and what lies between them, kept up for many schedules.

The event loop runs only while `World.do` waits for something: a schedule's rules are plain
functions, as Hypothesis wants them.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from uuid import UUID

import psycopg_pool
import pytest
import structlog
import uvloop
from prometheus_client import REGISTRY

from kit.callers import SYSTEM, Caller, Role
from kit.ids import new_id
from services.billing.upkeep import Upkeep
from services.conversation import limits
from tests.contract.conversation.books import Books, open_books
from tests.contract.conversation.harness import CREDENTIAL, PROVIDER_KEY, Launcher, Person, Service
from tests.contract.money.faults import Faults
from tests.fakes.calls import Call
from tests.fakes.provider import FakeProvider
from tests.support.databases import Database
from tests.support.slow_proxy import SlowProxy

# A schedule waits for nothing that could come sooner.
QUICK = {
    "LEASE_SECONDS": 2.0,
    "RENEWAL_SECONDS": 0.05,  # also how soon a run without an owner is claimed
    "HOLD_WAIT_SECONDS": 0.6,
    "BILLING_SECONDS": 0.3,
    "BILLING_PAUSE_SECONDS": 0.02,
    "OUTBOX_POLL_SECONDS": 0.05,
    "OUTBOX_LEASE_SECONDS": 1.5,
    "OUTBOX_SEND_SECONDS": 1.2,
    "OUTBOX_PAUSE_SECONDS": 0.02,
    "OUTBOX_DOUBLINGS": 2,
}
RETRY_DELAY_SECONDS = 0.05  # something can befall a run meanwhile
# One service gives up silent providers, the other waits: both ends of a call that hangs are met.
IDLE_SECONDS = ("0.2", "30")
PATIENT = 1
USERS = ("alice", "bob")
POLL_SECONDS = 0.01
LOG_LEVEL = logging.ERROR  # what goes wrong here is on purpose, but for what nobody expects

unexpected: list[str] = []  # what was logged with its traceback
# Nothing of a schedule may touch these: errors nobody expected, settles that differ, costs that differ.
ALARMS: dict[str, set[str]] = {
    "threadloom_unexpected_errors_total": set(),
    "threadloom_billing_alarms_total": {"above hold"},  # but for a provider that ignores its limit
    "threadloom_outbox_refused_total": set(),
}
# Of everything a schedule leaves. Leases, projects and prices stay.
EMPTIED = (
    *("conversation.outbox", "conversation.api_calls", "conversation.run_events", "conversation.trace_events"),
    *("conversation.idempotency_keys", "conversation.ai_runs", "conversation.ai_messages", "conversation.ai_threads"),
    *("billing.cost_ledger", "billing.holds", "billing.accounts", "billing.rate_windows", "billing.quotas"),
    "billing.spend_caps",
)

Found = TypeVar("Found")


@dataclass
class Tenant:
    """A project of one schedule's own, and its users at either service."""

    project: UUID
    people: list[dict[str, Person]]


class World:
    """What runs. `services` are two on one database; `way` is their way to billing."""

    def __init__(
        self,
        services: list[Service],
        books: Books,
        provider: FakeProvider,
        way: SlowProxy,
        faults: Faults,
        upkeep: Upkeep,
    ) -> None:
        self.services, self.books, self.provider = services, books, provider
        self.way, self.faults, self.upkeep = way, faults, upkeep
        self.sql = books.sql
        self.loop = asyncio.get_running_loop()

    def do(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Lets everything go on until the work is done."""
        return self.loop.run_until_complete(work)

    async def tenant(self) -> Tenant:
        """A new project."""
        project = new_id()
        insert = "INSERT INTO conversation.projects (id, slug, jwt_secret) VALUES (%s, %s, 's')"
        await self.sql.rows(insert, project, project.hex)
        people = [
            {user: Person(service.channel, Caller(Role.USER, project, user)) for user in USERS}
            for service in self.services
        ]
        return Tenant(project, people)

    async def until(self, holds: Callable[[], Awaitable[object]], seconds: float) -> bool:
        """Whether it holds within so many seconds."""
        deadline = time.monotonic() + seconds
        while not await holds():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    def calls(self) -> dict[str, Call]:
        """What the provider was asked since the last `empty`, by the id of the call."""
        found = {call.client_request_id or "": call for call in self.provider.calls}
        assert len(found) == len(self.provider.calls), "an api call was made twice"
        return found

    async def empty(self) -> None:
        """Forgets the schedules so far: checks read all there is."""
        for table in EMPTIED:
            await self.sql.rows(f"DELETE FROM {table}")
        self.provider.reset()
        self.faults.forget()


def _keep(_: object, __: str, event: MutableMapping[str, Any]) -> NoReturn:
    error = event.get("exc_info")
    if isinstance(error, BaseException):
        unexpected.append("".join(traceback.format_exception(error)))
    raise structlog.DropEvent


def alarms() -> dict[str, float]:
    """How often something happened that never may."""
    return {
        f"{sample.name} {sample.labels}": sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name in ALARMS and not ALARMS[sample.name] & set(sample.labels.values()) and sample.value
    }


@asynccontextmanager
async def open_world(database: Database, nats_url: str, provider: FakeProvider, faults: Faults) -> AsyncIterator[World]:
    """Starts it; everything is stopped at the end."""
    async with AsyncExitStack() as stack:
        books = await stack.enter_async_context(open_books(database))
        way = stack.enter_context(SlowProxy(int(books.address.rpartition(":")[2])))
        environ = {
            "BILLING_ADDRESSES": f"127.0.0.1:{way.port}",
            "THREADLOOM_GRPC_LISTEN": "127.0.0.1:0",
            "CONVERSATION_DATABASE_URL": database.request_url,
            "CONVERSATION_ENGINE_DATABASE_URL": database.engine_url,
            "NATS_URL": nats_url,
            "THREADLOOM_SERVICE_CREDENTIAL": CREDENTIAL,
            "OPENAI_BASE_URL": provider.base_url,
            "OPENAI_API_KEY": PROVIDER_KEY,
            "THREADLOOM_MODEL": "fake-model",
            "THREADLOOM_DRAIN_SECONDS": "0.05",
        }
        nobody = dict.fromkeys(("alice", "bob", "role", "system"), SYSTEM)
        launcher = Launcher(environ, nobody, books)
        stack.push_async_callback(launcher.close)
        services = [await launcher(THREADLOOM_MODEL_IDLE_SECONDS=idle) for idle in IDLE_SECONDS]
        pool = await stack.enter_async_context(
            psycopg_pool.AsyncConnectionPool(
                database.billing_engine_url, min_size=1, max_size=1, kwargs={"autocommit": True}, open=False
            )
        )
        yield World(services, books, provider, way, faults, Upkeep(pool))


@contextmanager
def running_world(database: Database, nats_url: str, provider: FakeProvider) -> Iterator[World]:
    """A world for code that is not asynchronous."""
    kept = structlog.get_config()
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        structlog.configure(processors=[_keep], wrapper_class=structlog.make_filtering_bound_logger(LOG_LEVEL))
        for name, value in QUICK.items():
            patch.setattr(limits, name, value)
        patch.setattr("services.conversation.domain.retries.RETRY_DELAY_SECONDS", RETRY_DELAY_SECONDS)
        faults = Faults()
        patch.setattr("services.billing.server.BillingServicer", faults.servicer())
        opened = open_world(database, nats_url, provider, faults)
        world = runner.run(opened.__aenter__())
        try:
            yield world
        finally:
            runner.run(opened.__aexit__(None, None, None))
            structlog.configure(**kept)
