"""A gateway before two real replicas of the conversation service, and the people who use it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from tests.fakes.provider import FakeProvider
from tests.support import databases
from tests.support.cluster import Cluster
from tests.support.http import Client
from tests.support.servers import RunningNats, RunningPostgres


@pytest.fixture(scope="module")
def cluster(template: RunningPostgres, nats_server: RunningNats, session_provider: FakeProvider) -> Iterator[Cluster]:
    """Two replicas of the conversation service behind one gateway."""
    with (
        databases.fresh_database(template.url()) as database,
        Cluster(provider_url=session_provider.base_url, database=database, nats_url=nats_server.url) as running,
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
