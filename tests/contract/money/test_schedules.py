"""No schedule of the whole path, from a user's message to the ledger, overspends, books twice or forgets."""

import time
from collections.abc import Iterator

import pytest

from tests.contract.money.parts import PART, run_parts
from tests.contract.money.schedule import run_schedules
from tests.contract.money.world import World, running_world
from tests.fakes.provider import FakeProvider
from tests.support import databases
from tests.support.servers import RunningPostgres

SCHEDULES = 120  # under a minute
PARTS = 100  # of 100 schedules each
PARTS_TOLD = 5  # progress is told after so many
LONG_SECONDS = 7200  # more than a busy machine needs for all parts


@pytest.fixture
def world(template: RunningPostgres, nats_url: str, provider: FakeProvider) -> Iterator[World]:
    """Services that stay up for all schedules."""
    with databases.fresh_database(template.url()) as database, running_world(database, nats_url, provider) as found:
        yield found


@pytest.mark.timeout(300)
def test_no_schedule_breaks_the_books(world: World) -> None:
    run_schedules(world, SCHEDULES)


@pytest.mark.long
@pytest.mark.timeout(LONG_SECONDS)
def test_ten_thousand_schedules_break_nothing(
    template: RunningPostgres, nats_url: str, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    first = int(pytestconfig.getoption("hypothesis_seed") or 0) * PARTS
    started = time.monotonic()
    for done, _ in enumerate(run_parts(template.url(), nats_url, range(first, first + PARTS)), 1):
        if done % PARTS_TOLD == 0:
            with capsys.disabled():
                print(f"{done * PART} schedules after {time.monotonic() - started:.0f} s", flush=True)
