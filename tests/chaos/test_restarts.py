"""Postgres and NATS restart in mid-stream, behind proxies that slow them: streams end right, none hangs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from deploy.local.nats import Nats
from services.conversation import limits
from tests.chaos.direct import direct
from tests.chaos.figures import FIGURES
from tests.chaos.record import check_answer
from tests.chaos.stack import REPLICAS, Stack, until
from tests.fakes.provider import FakeProvider
from tests.support import databases, servers
from tests.support.cluster import Cluster
from tests.support.databases import Database
from tests.support.http import Answer
from tests.support.servers import RunningNats, RunningPostgres
from tests.support.slow_proxy import SlowProxy

# To either server and back, each way.
DELAY_SECONDS = 0.05
# An answer of about ten seconds, and when something restarts in it.
SCRIPT = "[fake chunks=500 delay=20]"
RESTARTS_AT = (1.0, 3.5, 6.0)
END_SECONDS = 30.0
LONG_ROUNDS = 3

Servers = tuple[Stack, RunningPostgres, RunningNats]


@pytest.fixture
async def slow(slow_servers: Servers) -> AsyncIterator[Servers]:
    """See `slow_servers`; the books are checked after each test."""
    yield slow_servers
    await slow_servers[0].check_books()


@pytest.fixture(scope="module")
def slow_servers() -> Iterator[Servers]:
    """Two replicas of each service that reach Postgres and NATS through slow proxies only."""
    with (
        FakeProvider() as provider,
        servers.running_postgres() as postgres,
        servers.running_nats() as nats,
        SlowProxy(postgres.server.port) as to_postgres,
        SlowProxy(nats.server.port) as to_nats,
    ):
        databases.make_template(postgres.url())
        with databases.fresh_database(postgres.url()) as database:
            proxied = Database(database.name, databases.at_port(database.admin_url, to_postgres.port))
            nats_url = Nats(to_nats.port, nats.server.password).url
            with Cluster(provider_url=provider.base_url, database=proxied, nats_url=nats_url, gateways=2) as cluster:
                to_postgres.delay(DELAY_SECONDS)
                to_nats.delay(DELAY_SECONDS)
                yield Stack(cluster, provider, nats, record_url=database.admin_url), postgres, nats


def crash(postgres: RunningPostgres, _nats: RunningNats) -> None:
    postgres.kill()
    postgres.start()


def restart(postgres: RunningPostgres, _nats: RunningNats) -> None:
    postgres.stop()
    postgres.start()


def restart_nats(_postgres: RunningPostgres, nats: RunningNats) -> None:
    nats.kill()
    nats.start()


def all_of_it(postgres: RunningPostgres, nats: RunningNats) -> None:
    nats.kill()
    crash(postgres, nats)
    nats.start()


HARMS: dict[str, Callable[[RunningPostgres, RunningNats], None]] = {
    "Postgres crashes": crash,
    "Postgres restarts": restart,
    "NATS crashes": restart_nats,
    "both crash": all_of_it,
}
LONG = [pytest.mark.long, pytest.mark.timeout(LONG_ROUNDS * 60)]


@pytest.mark.parametrize(
    ("harm", "rounds"), [("both crash", 1), *(pytest.param(harm, LONG_ROUNDS, marks=LONG) for harm in HARMS)]
)
async def test_streams_end_right_while_servers_restart(slow: Servers, harm: str, rounds: int) -> None:
    for _ in range(rounds):
        await stream_while(slow, harm)


async def stream_while(slow: Servers, harm: str) -> None:
    stack, postgres, nats = slow
    answers = [Answer(), Answer()]
    async with stack.client() as client:
        conversation = await client.insist(client.create_conversation)
        begun = time.monotonic()
        posting = asyncio.create_task(client.read_to_end(conversation, SCRIPT, seconds=END_SECONDS, answer=answers[0]))
        await until(lambda: answers[0].text)
        # A second reader, at any replica, that comes in with the first one's cursor.
        answers[1].frames, answers[1].text = list(answers[0].frames), answers[0].text
        reading = asyncio.create_task(client.read_to_end(conversation, SCRIPT, seconds=END_SECONDS, answer=answers[1]))
        for at in RESTARTS_AT:
            await asyncio.sleep(max(begun + at - time.monotonic(), 0.0))
            # Not in a thread, although the readers wait meanwhile: children end with the thread that started them.
            HARMS[harm](postgres, nats)
        await asyncio.gather(posting, reading)
        seconds = time.monotonic() - begun
        for answer in answers:
            run = await check_answer(stack.record, client, conversation, answer)
    stack.record.check_at_rest()
    stack.record.check_ledger(stack.provider.calls)
    FIGURES[f"{harm} {len(RESTARTS_AT)} times in one answer, slow"].add(
        seconds,
        superseded=answers[0].withdrawals,
        takeovers=run.takeovers,
        broken_transfers=sum(answer.connections - 1 for answer in answers),
    )


async def test_a_follower_elsewhere_gets_the_exact_text_without_nats(stack: Stack) -> None:
    assert stack.nats is not None
    await stack.whole()
    stack.nats.kill()
    try:
        async with stack.client() as client:
            conversation, answer = await client.create_conversation(), Answer()
            reading = asyncio.create_task(client.read_to_end(conversation, "[fake chunks=150 delay=20]", answer=answer))
            owner = await stack.owner_of(conversation)
            run = await stack.run_of(conversation)
            other = next(number for number in REPLICAS if number != owner)
            async with direct(stack, other) as replica:
                events = await replica.follow(run.id)
            await reading
            await check_answer(stack.record, client, conversation, answer)
    finally:
        stack.nats.start()
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert "".join(event.text_delta.text for event in events) == answer.text


@pytest.mark.long
async def test_a_watched_run_outlives_an_outage_longer_than_its_watch(slow: Servers) -> None:
    """Nobody could say that it is followed; the owner gives everybody the time to say it again (durability.md 20)."""
    stack, postgres, _ = slow
    await stack.whole()
    answer = Answer()
    async with stack.client() as client:
        conversation = await client.create_conversation()

        async def read() -> None:
            option = {"cancel_after_s": 1}
            async with client.post(conversation, "[fake chunks=1500 delay=20]", on_disconnect=option) as frames:
                async for frame in frames:
                    answer.add(frame)

        reading = asyncio.create_task(read())
        await until(lambda: answer.text)
        postgres.stop()
        await asyncio.sleep(1.0 + limits.WATCH_LEASE_SECONDS + 1.0)  # all that was said has run out
        postgres.start()
        await asyncio.wait({reading}, timeout=2 * END_SECONDS)
        assert reading.done(), "the answer hangs"
        await reading
    assert answer.end is not None
    assert (answer.end.event, answer.end.data["finish_reason"]) == ("done", "stop")
