"""No schedule of the whole path, from a user's message to the ledger, overspends, books twice or forgets."""

from collections.abc import Iterator

import pytest

from tests.contract.money.schedule import run_schedules
from tests.contract.money.world import World, running_world
from tests.fakes.provider import FakeProvider
from tests.support import databases
from tests.support.servers import RunningPostgres

SCHEDULES = 150  # under a minute


@pytest.fixture
def world(template: RunningPostgres, nats_url: str, provider: FakeProvider) -> Iterator[World]:
    """Services that stay up for all schedules."""
    with databases.fresh_database(template.url()) as database, running_world(database, nats_url, provider) as found:
        yield found


@pytest.mark.timeout(300)
def test_no_schedule_breaks_the_books(world: World) -> None:
    run_schedules(world, SCHEDULES)
