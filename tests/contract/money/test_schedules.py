"""No schedule of the whole path, from a user's message to the ledger, overspends, books twice or forgets."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.contract.money import faults
from tests.contract.money.faults import Fault
from tests.contract.money.parts import PART, run_parts
from tests.contract.money.schedule import run_schedules
from tests.contract.money.world import World, running_world
from tests.fakes.provider import FakeProvider
from tests.support import databases
from tests.support.servers import RunningPostgres

SCHEDULES = 120  # under a minute
WAIT_SECONDS = 10.0
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


def test_a_hold_that_arrives_after_its_call_was_refused_is_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "OVERTAKEN_SECONDS", 2.0)
    world.do(overtaken_by_a_refusal(world))


async def overtaken_by_a_refusal(world: World) -> None:
    """The first try of a hold is under way when its connection breaks; the second is refused; then there is money."""
    tenant = await world.tenant()
    await world.books.cap(tenant.project, 0)
    world.faults.add(str(tenant.project), "PlaceHold", Fault.OVERTAKEN, 1)
    alice = tenant.people[0]["alice"]
    reading = alice.run(await alice.thread(), "hello", max_output_tokens=10)

    async def is_under_way() -> bool:
        return bool(world.faults.under_way)

    assert await world.until(is_under_way, WAIT_SECONDS)
    world.way.cut()
    world.way.mend()
    await asyncio.wait_for(asyncio.shield(reading.task), WAIT_SECONDS)
    assert reading.events[-1].run_failed.error.code == "AI_BUDGET_EXCEEDED"
    await world.books.cap(tenant.project, 10**9)
    await asyncio.wait_for(asyncio.gather(*world.faults.under_way), WAIT_SECONDS)
    assert await world.sql.rows("SELECT status FROM billing.holds") == [("released",)]


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
