"""The real service in this process: real Postgres and NATS, a fake model, three callers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from uuid import UUID

import psycopg
import psycopg_pool
import pytest
import pytest_asyncio
import uvloop
from psycopg import sql as pg

from kit.callers import SYSTEM, Caller, Role
from kit.ids import new_id
from services.conversation import limits, server
from services.conversation.webhooks import Deliverer
from tests.contract.conversation.books import Books, open_books
from tests.contract.conversation.harness import CREDENTIAL, PROVIDER_KEY, RING_1, Launcher, Service, Sql, connected
from tests.fakes.provider import FakeProvider
from tests.fakes.receiver import Receiver, running_receiver
from tests.support import databases
from tests.support.databases import Database
from tests.support.servers import RunningPostgres

END_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
TABLES = (
    "SELECT table_schema, table_name FROM information_schema.tables"
    " WHERE table_schema IN ('conversation', 'billing') AND table_name <> 'schema_version'"
)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of production."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def kept_database(template: RunningPostgres) -> Iterator[Database]:
    """One database for this folder: a clone for every test would be half of its time."""
    with databases.fresh_database(template.url()) as found:
        yield found


@pytest.fixture
def database(kept_database: Database) -> Database:
    """The folder's database, emptied. A test that changes its schema changes it back."""
    with psycopg.connect(kept_database.admin_url) as connection:
        connection.execute(END_OTHERS)
        for schema, table in connection.execute(TABLES).fetchall():
            connection.execute(pg.SQL("DELETE FROM {}").format(pg.Identifier(schema, table)))
    return kept_database


@pytest_asyncio.fixture
async def engine_pool(database: Database) -> AsyncIterator[psycopg_pool.AsyncConnectionPool]:
    """The engine role's connections, for what a test calls itself."""
    async with psycopg_pool.AsyncConnectionPool(
        database.engine_url, min_size=1, kwargs={"autocommit": True}, open=False
    ) as pool:
        yield pool


@pytest_asyncio.fixture
async def sql(database: Database) -> AsyncIterator[Sql]:
    """The database as its superuser sees it."""
    async for found in connected(database.admin_url):
        yield found


@pytest_asyncio.fixture
async def callers(sql: Sql) -> dict[str, Caller]:
    """Alice, bob and the service role of one project; carol and the service role of another; our own services."""
    project, other = new_id(), new_id()
    await _insert_project(sql, project, "acme")
    await _insert_project(sql, other, "other")
    return {
        "alice": Caller(Role.USER, project, "alice"),
        "bob": Caller(Role.USER, project, "bob"),
        "role": Caller(Role.SERVICE, project),
        "alice elsewhere": Caller(Role.USER, other, "alice"),
        "role elsewhere": Caller(Role.SERVICE, other),
        "system": SYSTEM,
    }


@pytest_asyncio.fixture
async def books(database: Database) -> AsyncIterator[Books]:
    """The billing service, which knows what the models of these tests cost."""
    async with open_books(database) as found:
        yield found


@pytest_asyncio.fixture
async def launch(
    database: Database, nats_url: str, provider: FakeProvider, callers: dict[str, Caller], books: Books
) -> AsyncIterator[Launcher]:
    """Starts services; all are stopped at the end, and the books are looked over."""
    environ = {
        "BILLING_ADDRESSES": books.address,
        "THREADLOOM_GRPC_LISTEN": "127.0.0.1:0",
        "CONVERSATION_DATABASE_URL": database.request_url,
        "CONVERSATION_ENGINE_DATABASE_URL": database.engine_url,
        "NATS_URL": nats_url,
        "THREADLOOM_SERVICE_CREDENTIAL": CREDENTIAL,
        "OPENAI_BASE_URL": provider.base_url,
        "OPENAI_API_KEY": PROVIDER_KEY,
        "THREADLOOM_SECRET_KEYS": RING_1,
        "THREADLOOM_MODEL": "fake-model",
        "THREADLOOM_DRAIN_SECONDS": "0.05",
    }
    launcher = Launcher(environ, callers, books)
    yield launcher
    await books.listen()
    await launcher.close()
    await books.check()


@pytest_asyncio.fixture
async def service(launch: Launcher) -> Service:
    """One service with the usual settings."""
    return await launch()


@pytest.fixture
def quick_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of half a second, so that a takeover is not waited for."""
    monkeypatch.setattr(limits, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(limits, "RENEWAL_SECONDS", 0.05)


async def _insert_project(sql: Sql, id: UUID, slug: str) -> None:
    await sql.rows("INSERT INTO conversation.projects (id, slug, jwt_secret) VALUES (%s, %s, 's')", id, slug)


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with running_receiver() as found:
        yield found


@pytest.fixture
def quick_webhooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of the schedule a thousandth of what they are; tries of half a second."""
    pauses = tuple(min(pause / 1000, 0.3) for pause in limits.WEBHOOK_PAUSES)
    monkeypatch.setattr(server, "Deliverer", lambda pool, out, ring: Deliverer(pool, out, ring, pauses))
    monkeypatch.setattr(limits, "WEBHOOK_SECONDS", 0.5)
    monkeypatch.setattr(limits, "WEBHOOK_POLL_SECONDS", 0.05)
    monkeypatch.setattr(limits, "WEBHOOK_REST_SECONDS", 0.001)
    monkeypatch.setattr(limits, "WEBHOOK_REST_MAX_SECONDS", 0.06)
