"""A gateway before two real replicas of the conversation service, and the people who use it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from uuid import uuid4

import pytest

from deploy.local.secret_file import ProjectKeys
from tests.contract.gateway.calls import admin_token
from tests.fakes.provider import FakeProvider
from tests.support import databases
from tests.support.cluster import Cluster
from tests.support.http import Client
from tests.support.servers import RunningNats, RunningPostgres


@pytest.fixture(scope="module")
def environ() -> dict[str, dict[str, str]]:
    """Environment variables a module adds, by service."""
    return {}


@pytest.fixture(scope="module")
def cluster(
    template: RunningPostgres,
    nats_server: RunningNats,
    session_provider: FakeProvider,
    environ: dict[str, dict[str, str]],
) -> Iterator[Cluster]:
    """Two replicas of the conversation service behind one gateway."""
    with (
        databases.fresh_database(template.url()) as database,
        Cluster(
            provider_url=session_provider.base_url,
            database=database,
            nats_url=nats_server.url,
            environ=environ,
        ) as running,
    ):
        yield running


@pytest.fixture
async def users(cluster: Cluster, provider: FakeProvider) -> AsyncIterator[dict[str, Client]]:
    """alice and bob, and the project's service role."""
    headers = {name: cluster.headers(name) for name in ("alice", "bob")}
    headers["service"] = {"apikey": cluster.project.service_key}
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(Client(cluster.http, given)) for name, given in headers.items()}


@pytest.fixture
def alice(users: dict[str, Client]) -> Client:
    return users["alice"]


@pytest.fixture
def project(cluster: Cluster) -> ProjectKeys:
    """A project of the test's own, so that no other test's money is in it."""
    return cluster.create_project(f"p-{uuid4().hex[:12]}")


@pytest.fixture
async def people(cluster: Cluster, project: ProjectKeys) -> AsyncIterator[dict[str, Client]]:
    """The project's service role, an admin, two users; and the service role of another project."""
    headers = {
        "service": {"apikey": project.service_key},
        "admin": admin_token(project),
        "supabase user": admin_token(project, "authenticated"),
        "alice": cluster.headers("alice", project),
        "other": {"apikey": cluster.create_project(f"o-{uuid4().hex[:12]}").service_key},
    }
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(Client(cluster.http, given)) for name, given in headers.items()}


@pytest.fixture(params=["service", "admin"])
def admin(people: dict[str, Client], request: pytest.FixtureRequest) -> Client:
    """Either kind of admin."""
    return people[request.param]
