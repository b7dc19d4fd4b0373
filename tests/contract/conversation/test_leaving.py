"""Runs that are cancelled once no user's client follows them, on whichever replica (durability.md 20)."""

import asyncio
import time

import pytest
from google.protobuf.duration_pb2 import Duration

from kit.errors import ServiceError
from services.conversation import limits
from tests.contract.conversation.harness import Launcher, Person, Reading, Service, Sql, eventually
from tests.contract.conversation.orphans import an_orphan, insert
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1.run_pb2 import IfRunning

SECONDS = 1.0  # the shortest a run may name
AFTER = Duration(seconds=1)
# From the last follower's leaving: never earlier; later by the slack, a look of the owner's, and a busy machine.
LATEST = SECONDS + limits.WATCH_SLACK_SECONDS + 2 * limits.RENEWAL_SECONDS + 1.0
HELD = "[fake chunks=3 gate=g gate_at=1]"


async def held(person: Person, thread: str, after: Duration | None = AFTER) -> Reading:
    """A run that waits in mid-answer."""
    return await person.run(thread, HELD, cancel_after_disconnect=after).until(lambda reading: reading.text)


async def ended_after(person: Person, run: str, since: float, within: float = LATEST) -> float:
    """Seconds until the run was cancelled."""

    async def look() -> bool:
        return (await person.get_run(run)).HasField("finish_time")

    await eventually(look, within + 1)
    passed = time.monotonic() - since
    assert (await person.follow(run).end()).events[-1].run_finished.finish_reason == "cancelled"
    return passed


async def test_a_run_nobody_follows_any_more_is_cancelled_after_its_time(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    alice = service.alice
    run = await held(alice, await alice.thread())
    await run.leave()
    left = time.monotonic()
    assert SECONDS <= await ended_after(alice, run.run_id, left) <= LATEST
    assert provider.calls[0].client_closed is not None
    assert await sql.value("SELECT count(*) FROM conversation.run_watch") == 0


async def test_a_run_that_is_followed_goes_on(service: Service, sql: Sql, provider: FakeProvider) -> None:
    alice = service.alice
    run = await held(alice, await alice.thread())
    # As if the lease had nearly run out: whoever follows extends it.
    await sql.rows("UPDATE conversation.run_watch SET until = now() + interval '1.5 s'")
    await asyncio.sleep(3)  # time must pass here: what is proven is that nothing happens in it
    assert not run.is_over
    provider.open_gate("g")
    assert (await run.end()).events[-1].run_finished.finish_reason == "stop"


async def test_a_follower_on_another_replica_keeps_a_run_alive(launch: Launcher, provider: FakeProvider) -> None:
    one, other = await launch(), await launch()
    run = await held(one.alice, await one.alice.thread())
    second = await other.alice.follow(run.run_id).until(lambda reading: reading.text)
    await run.leave()
    await asyncio.sleep(LATEST)  # as above
    assert not second.is_over
    await second.leave()
    left = time.monotonic()
    assert SECONDS <= await ended_after(one.alice, run.run_id, left) <= LATEST
    assert provider.calls[0].client_closed is not None


async def test_one_that_comes_and_goes_keeps_a_run_alive(service: Service) -> None:
    alice = service.alice
    run = await held(alice, await alice.thread())
    await run.leave()
    for _ in range(10):
        follower = await alice.follow(run.run_id).until(lambda reading: reading.text)
        await asyncio.sleep(0.4)
        await follower.leave()
    left = time.monotonic()
    assert SECONDS <= await ended_after(alice, run.run_id, left) <= LATEST


async def test_a_project_s_own_service_does_not_keep_a_run_alive(service: Service) -> None:
    run = await held(service.alice, await service.alice.thread())
    watcher = await service.role.follow(run.run_id).until(lambda reading: reading.text)
    await run.leave()
    left = time.monotonic()
    assert SECONDS <= await ended_after(service.alice, run.run_id, left) <= LATEST
    await watcher.end()


async def test_a_run_without_the_option_goes_on_alone(service: Service, provider: FakeProvider, sql: Sql) -> None:
    alice = service.alice
    run = await held(alice, await alice.thread(), None)
    await run.leave()
    assert await sql.value("SELECT count(*) FROM conversation.run_watch") == 0
    provider.open_gate("g")
    assert (await alice.follow(run.run_id).end()).events[-1].run_finished.finish_reason == "stop"


async def test_a_run_whose_owner_and_clients_are_gone_is_not_made_again(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    alice = service.alice
    orphan = an_orphan(await alice.thread(), is_left=True)
    run = await alice.follow(await insert(service, sql, orphan)).end()
    assert run.events[-1].run_finished.finish_reason == "cancelled"
    assert provider.calls == []


async def test_after_an_outage_followers_are_given_time_to_say_that_they_are_there(
    service: Service, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's renewals failed for long, so did everybody's extensions: that nobody said anything means nothing."""
    monkeypatch.setattr(limits, "WATCH_STEADY_SECONDS", 60.0)
    alice = service.alice
    run = await held(alice, await alice.thread())
    await run.leave()
    await sql.rows("UPDATE conversation.run_watch SET until = now() - interval '1 hour'")
    await asyncio.sleep(3 * limits.RENEWAL_SECONDS)  # as above
    assert not (await alice.get_run(run.run_id)).HasField("finish_time")
    monkeypatch.setattr(limits, "WATCH_STEADY_SECONDS", 0.0)
    await ended_after(alice, run.run_id, time.monotonic())


async def test_after_an_outage_a_run_whose_turn_comes_is_not_taken_for_left(
    service: Service, provider: FakeProvider, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn may come in the first moment after the outage, before its followers were able to say anything."""
    monkeypatch.setattr(limits, "WATCH_STEADY_SECONDS", 60.0)
    monkeypatch.setattr(limits, "WATCH_SECONDS", 60.0)
    alice = service.alice
    thread = await alice.thread()
    active = await held(alice, thread, None)
    waiting = alice.run(thread, "hello", if_running=IfRunning.IF_RUNNING_ENQUEUE, cancel_after_disconnect=AFTER)

    async def is_watched() -> bool:
        return bool(await sql.value("SELECT count(*) FROM conversation.run_watch"))

    reading = asyncio.create_task(waiting.end())
    await eventually(is_watched, 5)
    await asyncio.sleep(0.5)  # what its follower's coming made the process say is said
    await sql.rows("UPDATE conversation.run_watch SET until = now() - interval '1 hour'")
    provider.open_gate("g")
    await active.end()
    assert (await reading).events[-1].run_finished.finish_reason == "stop"


@pytest.mark.parametrize(
    ("after", "is_taken"),
    [
        (Duration(nanos=999_000_000), False),
        (Duration(seconds=1), True),
        (Duration(seconds=1, nanos=1_000_000), True),
        (Duration(seconds=1, nanos=1), False),
        (Duration(seconds=3600), True),
        (Duration(seconds=3600, nanos=1_000_000), False),
        (Duration(seconds=-5), False),
    ],
)
async def test_the_time_is_between_a_second_and_an_hour(service: Service, after: Duration, is_taken: bool) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, "hello", cancel_after_disconnect=after)
    if is_taken:
        await run.end()
    else:
        with pytest.raises(ServiceError) as refused:
            await run.end()
        assert refused.value.metadata["field"] == "on_disconnect"
