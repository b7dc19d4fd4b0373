"""Two stacks of real processes for all chaos tests, and a summary of what was measured."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.chaos.figures import FIGURES, SEED
from tests.chaos.stack import Stack
from tests.fakes.provider import FakeProvider
from tests.support import databases, servers
from tests.support.cluster import Cluster
from tests.support.servers import RunningPostgres

# Long enough for a short answer, too short for a long one; see test_shutdowns.py.
DRAIN_SECONDS = 2.0


# The tests' users begin more runs a minute than a user of ours may.
UNHURRIED = {"billing": {"BILLING_RUNS_PER_MINUTE": "1000000"}}
# And the receivers of their webhooks are on this machine.
ENVIRON = {**UNHURRIED, "conversation": {"THREADLOOM_ALLOWED_HOSTS": "127.0.0.1"}}


@pytest.fixture
async def supervised(supervised_stack: Stack) -> AsyncIterator[Stack]:
    """See `supervised_stack`; the books are checked after each test."""
    yield supervised_stack
    await supervised_stack.check_books()


@pytest.fixture
async def stack(two_of_each: Stack) -> AsyncIterator[Stack]:
    """See `two_of_each`; the books are checked after each test."""
    yield two_of_each
    await two_of_each.check_books()


@pytest.fixture(scope="session")
def supervised_stack() -> Iterator[Stack]:
    """Processes of its own for everything, started again when they end, as make run does."""
    with (
        FakeProvider() as provider,
        Cluster(
            provider_url=provider.base_url,
            gateways=1,
            private_postgres=True,
            private_nats=True,
            supervised=True,
            environ=UNHURRIED,
        ) as cluster,
    ):
        yield Stack(cluster, provider)


@pytest.fixture(scope="session")
def two_of_each(template: RunningPostgres) -> Iterator[Stack]:
    """Two replicas of each service over a NATS of its own; what a test ends stays away until it restarts it."""
    with (
        FakeProvider() as provider,
        databases.fresh_database(template.url()) as database,
        servers.running_nats() as nats,
        Cluster(
            provider_url=provider.base_url,
            database=database,
            nats_url=nats.url,
            gateways=2,
            conversation_drain_seconds=DRAIN_SECONDS,
            environ=ENVIRON,
        ) as cluster,
    ):
        yield Stack(cluster, provider, nats)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells what the chaos tests measured."""
    if FIGURES:
        terminalreporter.section(f"chaos, seed {SEED}")
    for name, figures in FIGURES.items():
        terminalreporter.write_line(f"{name}: {figures.in_words()}")
