"""Fixtures every test may use: real servers once a session, a fresh database a test, the fake model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support import databases, servers
from tests.support.databases import Database
from tests.support.servers import RunningNats, RunningPostgres

if TYPE_CHECKING:
    from tests.fakes.provider import FakeProvider


@pytest.fixture(scope="session")
def postgres() -> Iterator[RunningPostgres]:
    """One cluster for the session. Tests that stop it start their own: `servers.running_postgres()`."""
    with servers.running_postgres() as running:
        yield running


@pytest.fixture(scope="session")
def template(postgres: RunningPostgres) -> RunningPostgres:
    """The session's cluster with the migrated template database in it."""
    databases.make_template(postgres.url())
    return postgres


@pytest.fixture
def database(template: RunningPostgres) -> Iterator[Database]:
    """A fresh migrated database."""
    with databases.fresh_database(template.url()) as found:
        yield found


@pytest.fixture(scope="session")
def nats_server() -> Iterator[RunningNats]:
    """One NATS for the session. Tests that stop it start their own: `servers.running_nats()`."""
    with servers.running_nats() as running:
        yield running


@pytest.fixture
def nats_url(nats_server: RunningNats) -> str:
    """Its address with the credentials."""
    return nats_server.url


@pytest.fixture(scope="session")
def session_provider() -> Iterator["FakeProvider"]:
    """The fake model server of the session; use `provider`."""
    from tests.fakes.provider import FakeProvider

    with FakeProvider() as fake:
        yield fake


@pytest.fixture
def provider(session_provider: "FakeProvider") -> "FakeProvider":
    """The fake model server, forgetting what the test before did."""
    session_provider.reset()
    return session_provider
