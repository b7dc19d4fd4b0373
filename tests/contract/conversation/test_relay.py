"""The relay of the real service: on whose behalf, how many, and what becomes of follows (durability.md 33)."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest
import structlog
from grpc import aio
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from kit.callers import CREDENTIAL_KEY, Caller
from kit.channels import CHANNEL_OPTIONS
from services.conversation import limits
from tests.contract.conversation.harness import Launcher, Service, Sql, Stream, eventually, project_id, text_of
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1 import relay_service_pb2 as api
from threadloom.conversation.v1.conversation_service_pb2 import FollowRequest, RunRequest
from threadloom.conversation.v1.message_pb2 import ContentPart
from threadloom.conversation.v1.relay_service_pb2_grpc import RelayServiceStub
from threadloom.conversation.v1.run_event_pb2 import RunEvent

WAIT_SECONDS = 10.0
HELD = "[fake chunks=3 gate=g gate_at=1]"
Named = api.RelayCaller


def follows() -> tuple[float, float]:
    """Follows told over relays, and followers of runs, in this process."""
    relayed, followers = map(REGISTRY.get_sample_value, ("threadloom_relayed_follows", "threadloom_followers"))
    return relayed or 0.0, followers or 0.0


async def until_followed(relayed: int, seconds: float = WAIT_SECONDS) -> None:
    """Waits until so many follows are told, each of a run."""

    async def look() -> bool:
        return follows() == (relayed, relayed)

    await eventually(look, seconds)


def named(caller: Caller, request_id: str = "") -> Named:
    project = str(caller.project) if caller.project else ""
    return Named(role=caller.role.value, project_id=project, user_id=caller.user, request_id=request_id)


class Line(Stream):
    """One relay, as a gateway speaks it. `items` are by follow id."""

    def __init__(self, channel: aio.Channel, metadata: Any) -> None:
        super().__init__(RelayServiceStub(channel).Relay(metadata=metadata))
        self.items: dict[int, list[api.RelayItem]] = defaultdict(list)
        self._newest = 0

    async def ask(self, **asked: Any) -> int:
        """Sends a start or a follow; its id."""
        self._newest += 1
        await self.send(api.RelayRequest(follow_id=self._newest, **asked))
        return self._newest

    async def send(self, ask: api.RelayRequest) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await self._call.write(ask)

    async def follow(self, who: Named, run: str = "", after: int = 0, thread: str = "") -> int:
        asked = FollowRequest(run_id=run, after_seq=after, thread_id=thread)
        return await self.ask(follow=api.RelayFollow(caller=who, follow=asked))

    async def start(self, who: Named, thread: str, text: str, key: str = "") -> int:
        run = RunRequest(thread_id=thread, parts=[ContentPart(text=text)], request_id=key)
        return await self.ask(start=api.RelayStart(caller=who, run=run))

    async def unfollow(self, id: int) -> None:
        await self.send(api.RelayRequest(follow_id=id, unfollow=api.RelayUnfollow()))

    async def told(self, id: int) -> api.RelayItem:
        """The first item of a follow."""
        await self.until(lambda line: line.items[id])
        return self.items[id][0]

    async def refusal(self, id: int) -> api.RelayRefusal:
        """What a follow was refused with, of which nothing was told."""
        item = await self.told(id)
        assert item.HasField("refusal"), item
        assert len(self.items[id]) == 1
        return item.refusal

    async def events(self, id: int) -> list[RunEvent]:
        """All events of a follow, once it ended."""
        await self.until(lambda line: line.items[id] and not line.items[id][-1].HasField("batch"))
        *batches, last = self.items[id]
        assert last.HasField("end"), last
        return [event for item in batches for event in item.batch.events]

    async def run_id(self, id: int) -> str:
        """The run of a follow."""
        item = await self.told(id)
        assert item.HasField("batch"), item
        return item.batch.run_id

    def _take(self, response: api.RelayResponse) -> None:
        for item in response.items:
            self.items[item.follow_id].append(item)


def line_to(service: Service) -> Line:
    return Line(service.channel, service.system.metadata)


# ---------------------------------------------------------------------- what is told


async def test_runs_of_two_users_are_started_and_followed_over_one_stream(
    service: Service, provider: FakeProvider
) -> None:
    line, started = line_to(service), {}
    for person in (service.alice, service.bob) * 10:
        thread = await person.thread()
        id = await line.start(named(person.caller), thread, "[fake chunks=8 delay=5]")
        started[id] = (person, thread)
    for id, (person, thread) in started.items():
        events = await line.events(id)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert text_of(events) == (await person.reply(thread)).text
    assert len(provider.calls) == len(started)
    await line.leave()
    await until_followed(0)


async def test_a_follow_goes_on_behind_its_seq_to_the_end(service: Service) -> None:
    alice = service.alice
    whole = await alice.run(await alice.thread(), "[fake chunks=8 delay=10]").end()
    line, end = line_to(service), len(whole.events)
    ids = [await line.follow(named(alice.caller), whole.run_id, after) for after in range(end)]
    for after, id in enumerate(ids):
        assert await line.events(id) == whole.events[after:]
    await line.leave()


async def test_a_start_whose_answer_is_lost_starts_one_run(launch: Launcher, sql: Sql) -> None:
    services = [await launch(), await launch()]
    thread, who = await services[0].alice.thread(), named(services[0].alice.caller)
    for attempt in range(4):  # it goes away before, while and after the run is made
        line = line_to(services[attempt % 2])
        id = await line.start(who, thread, "hello [fake chunks=40 delay=20]", key="key-1")
        if attempt:
            await asyncio.wait({asyncio.create_task(line.told(id))}, timeout=0.01 * attempt)
        await line.leave()
    line = line_to(services[0])
    id = await line.start(who, thread, "hello [fake chunks=40 delay=20]", key="key-1")
    events = await line.events(id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert await sql.value("SELECT count(*) FROM conversation.ai_runs") == 1
    await line.leave()


# ---------------------------------------------------------------------- on whose behalf


async def test_only_a_service_of_ours_speaks_it(service: Service) -> None:
    for person in (service.alice, service.role):
        line = Line(service.channel, person.metadata)
        error = await line.ended()
        assert error is not None
        assert error.reason == "FORBIDDEN"
    bare = tuple(pair for pair in service.system.metadata if pair[0] != CREDENTIAL_KEY)
    error = await Line(service.channel, bare).ended()
    assert error is not None
    assert error.reason == "UNAUTHENTICATED"


async def test_others_see_nothing_of_alices_run_and_change_nothing(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, HELD).until(lambda reading: reading.text)
    # Its text at rest is written a moment later; then nothing changes but by somebody's ask.
    await eventually(lambda: sql.value("SELECT text <> '' FROM conversation.ai_messages WHERE role = 'assistant'"))
    before, line = await sql.contents(), line_to(service)
    for who in ("bob", "alice elsewhere", "role elsewhere"):
        other = named(service.people[who].caller)
        for asked, reason in (
            (line.follow(other, run.run_id), "NOT_FOUND"),
            (line.follow(other, thread=thread), "THREAD_NOT_FOUND"),
            (line.start(other, thread, "hello"), "THREAD_NOT_FOUND"),
        ):
            assert (await line.refusal(await asked)).reason == reason, who
    assert await sql.contents() == before
    own = await line.follow(named(service.role.caller), run.run_id)
    assert await line.run_id(own) == run.run_id
    await line.leave()
    provider.open_gate("g")
    await run.end()


async def test_a_caller_that_is_not_wholly_named_is_refused(service: Service, sql: Sql) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello").end()
    project = str(project_id(service.alice.caller))
    nobodies = {
        "no role": Named(project_id=project, user_id="alice"),
        "an unknown role": Named(role="root", project_id=project, user_id="alice"),
        "no user": Named(role="user", project_id=project),
        "a blank user": Named(role="user", project_id=project, user_id=" \t"),
        "an unprintable user": Named(role="user", project_id=project, user_id="al\u200bice"),
        "a long user": Named(role="user", project_id=project, user_id="a" * 256),
        "no project": Named(role="user", user_id="alice"),
        "an empty project": Named(role="service"),
        "a slug for a project": Named(role="service", project_id="acme"),
    }
    before, line = await sql.contents(), line_to(service)
    for kind, who in nobodies.items():
        for asked in (line.follow(who, run.run_id), line.start(who, thread, "hello")):
            assert (await line.refusal(await asked)).reason == "INVALID_OPTIONS", kind
    for who in (Named(role="system"), Named(role="system", project_id=project, user_id="alice")):
        for asked in (line.follow(who, run.run_id), line.start(who, thread, "hello")):
            assert (await line.refusal(await asked)).reason == "FORBIDDEN"
    assert await sql.contents() == before
    good = await line.follow(named(service.alice.caller), run.run_id)
    assert await line.events(good) == run.events  # the stream went on
    await line.leave()


async def test_follows_at_once_never_see_each_others_caller(service: Service) -> None:
    people = [service.people[name] for name in ("alice", "bob", "alice elsewhere")]
    runs = {person: (await person.run(await person.thread(), "hello").end()).run_id for person in people}
    line, asked = line_to(service), []
    for _ in range(20):
        for who in people:
            asked += [(await line.follow(named(who.caller), runs[whose]), who is whose) for whose in people]
    for id, is_own in asked:
        if is_own:
            assert await line.events(id)
        else:
            assert (await line.refusal(id)).reason == "NOT_FOUND"
    await line.leave()


async def test_each_follow_is_logged_with_its_own_request_id(service: Service) -> None:
    alice = service.alice
    run = await alice.run(await alice.thread(), "hello").end()
    line = line_to(service)
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        ids = [await line.follow(named(alice.caller, f"request-{n}"), run.run_id) for n in range(20)]
        nameless = await line.follow(named(alice.caller), run.run_id)
        for id in (*ids, nameless):
            await line.events(id)
        found = [entry["request_id"] for entry in logs if entry.get("method") == "Relay/follow"]
    (made,) = set(found) - {f"request-{n}" for n in range(20)}
    assert (len(found), len(set(found)), len(made)) == (21, 21, 36)
    await line.leave()


# ---------------------------------------------------------------------- misuse and bounds


async def test_follow_ids_that_do_not_rise_end_the_stream(service: Service, provider: FakeProvider) -> None:
    alice = service.alice
    run = await alice.run(await alice.thread(), HELD).until(lambda reading: reading.text)
    await run.leave()
    line, who = line_to(service), named(alice.caller)
    await line.run_id(await line.follow(who, run.run_id))
    await line.send(
        api.RelayRequest(follow_id=1, follow=api.RelayFollow(caller=who, follow=FollowRequest(run_id=run.run_id)))
    )
    error = await line.ended()
    assert error is not None
    assert (error.reason, error.metadata) == ("INVALID_OPTIONS", {"field": "follow_id"})
    await until_followed(0)
    provider.open_gate("g")


async def test_an_ask_of_nothing_and_an_unfollow_of_nobody_leave_the_stream_as_it_is(service: Service) -> None:
    alice = service.alice
    run = await alice.run(await alice.thread(), "hello").end()
    line = line_to(service)
    assert (await line.refusal(await line.ask())).metadata == {"field": "ask"}
    await line.unfollow(1)
    await line.unfollow(99)
    assert await line.events(await line.follow(named(alice.caller), run.run_id)) == run.events
    await line.leave()


async def test_a_relay_follows_as_many_runs_as_it_may_and_no_more(
    service: Service, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RELAY_FOLLOWS", 3)
    alice = service.alice
    run = await alice.run(await alice.thread(), HELD).until(lambda reading: reading.text)
    await run.leave()
    line, who = line_to(service), named(alice.caller)
    first = await line.follow(who, run.run_id)
    for id in (first, await line.follow(who, run.run_id), await line.follow(who, run.run_id)):
        assert await line.run_id(id) == run.run_id
    refusal = await line.refusal(await line.follow(who, run.run_id))
    assert refusal.reason == "UNAVAILABLE"
    assert refusal.HasField("retry_after")
    await line.unfollow(first)
    await until_followed(2)
    assert await line.run_id(await line.follow(who, run.run_id)) == run.run_id
    await line.leave()
    provider.open_gate("g")


# ---------------------------------------------------------------------- the end of follows


async def test_an_unfollow_ends_its_follow_within_a_second_and_no_other(
    service: Service, provider: FakeProvider
) -> None:
    alice = service.alice
    run = await alice.run(await alice.thread(), HELD).until(lambda reading: reading.text)
    await run.leave()
    line, who = line_to(service), named(alice.caller)
    left, kept = await line.follow(who, run.run_id), await line.follow(who, run.run_id)
    for id in (left, kept):
        await line.run_id(id)
    await line.unfollow(left)
    await until_followed(1, seconds=1.0)
    provider.open_gate("g")
    assert text_of(await line.events(kept)) == (await alice.reply(run.batches[0].thread_id)).text
    assert not any(event.HasField("run_finished") for item in line.items[left] for event in item.batch.events)
    await line.leave()


async def test_a_gateway_that_dies_ends_all_its_follows_and_no_run(service: Service, provider: FakeProvider) -> None:
    alice = service.alice
    run = await alice.run(await alice.thread(), HELD).until(lambda reading: reading.text)
    await run.leave()
    channel = aio.insecure_channel(service.address, options=CHANNEL_OPTIONS)
    line = Line(channel, service.system.metadata)
    for id in [await line.follow(named(alice.caller), run.run_id) for _ in range(50)]:
        await line.run_id(id)
    await until_followed(50)
    await channel.close()
    await asyncio.wait({line.task})
    await until_followed(0)
    provider.open_gate("g")
    assert (await alice.follow(run.run_id).end()).events[-1].run_finished.finish_reason == "stop"
