"""The real service in this process on a real Postgres; three callers of one project and two of another."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import psycopg
import psycopg_pool
import pytest
import pytest_asyncio
import uvloop
from psycopg import sql as pg

from kit.callers import SYSTEM, Caller, Role
from kit.ids import new_id
from kit.settings import load
from services.billing.schema import Base
from services.billing.server import serve
from services.billing.settings import Settings
from services.billing.upkeep import Upkeep
from tests.contract.billing.harness import (
    CREDENTIAL,
    CREDITS_PER_USD,
    MODEL,
    RATES,
    WAIT_SECONDS,
    Service,
    open_service,
)
from tests.support import databases
from tests.support.databases import Database
from tests.support.servers import RunningPostgres
from threadloom.billing.v1.billing_service_pb2 import SetPriceRequest


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of production."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def books(template: RunningPostgres) -> Iterator[Database]:
    """One database for the session: emptying its tables is cheaper than cloning it for every test."""
    with databases.fresh_database(template.url()) as found:
        yield found


@pytest.fixture
def url(books: Database) -> str:
    """It, emptied, as its superuser."""
    with psycopg.connect(books.admin_url) as connection:
        for table in Base.metadata.tables.values():
            connection.execute(pg.SQL("DELETE FROM billing.{}").format(pg.Identifier(table.name)))
    return books.admin_url


@pytest.fixture
def request_url(books: Database, url: str) -> str:
    return books.billing_request_url


@pytest.fixture
def engine_url(books: Database, url: str) -> str:
    return books.billing_engine_url


@pytest.fixture
def callers() -> dict[str, Caller]:
    project, other = new_id(), new_id()
    return {
        "alice": Caller(Role.USER, project, "alice"),
        "bob": Caller(Role.USER, project, "bob"),
        "role": Caller(Role.SERVICE, project),
        "alice elsewhere": Caller(Role.USER, other, "alice"),
        "role elsewhere": Caller(Role.SERVICE, other),
        "system": SYSTEM,
    }


@pytest.fixture
def runs_per_minute() -> int:
    """Enough to be out of the way."""
    return 100_000


@pytest_asyncio.fixture
async def service(
    url: str, request_url: str, engine_url: str, callers: dict[str, Caller], runs_per_minute: int
) -> AsyncIterator[Service]:
    """The service, with a price for one model."""
    environ = {
        "THREADLOOM_GRPC_LISTEN": "127.0.0.1:0",
        "BILLING_DATABASE_URL": request_url,
        "BILLING_ENGINE_DATABASE_URL": engine_url,
        "THREADLOOM_SERVICE_CREDENTIAL": CREDENTIAL,
        "BILLING_RUNS_PER_MINUTE": str(runs_per_minute),
        "BILLING_CREDITS_PER_USD": str(CREDITS_PER_USD),
    }
    stopped, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(load(Settings, environ), stopped, ready))
    await asyncio.wait({task, ready}, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    pool = psycopg_pool.AsyncConnectionPool(engine_url, min_size=1, max_size=1, kwargs={"autocommit": True}, open=False)
    async with pool, await psycopg.AsyncConnection.connect(url, autocommit=True) as sql:
        found = open_service(await ready, callers, Upkeep(pool), sql)
        await found.system.call(found.system.billing.SetPrice, SetPriceRequest(model=MODEL, rates=RATES))
        yield found
        assert await found.upkeep.reconcile() == []  # after every test the books agree
        await found.channel.close()
        stopped.set()
        await asyncio.wait_for(task, WAIT_SECONDS)
