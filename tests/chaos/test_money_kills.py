"""kill -9 between each two of hold, call and settle: the client gets its answer, and every call is paid for once."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack

import pytest

from deploy.local.secret_file import ProjectKeys
from services.conversation.limits import HOLD_WAIT_SECONDS
from tests.chaos.conftest import UNHURRIED
from tests.chaos.figures import FIGURES
from tests.chaos.payments import BOOKING, BOOKING_COMMIT, FORGETTING, TOGETHER, Fate, Payment, expected
from tests.chaos.points import Point
from tests.chaos.record import check_answer
from tests.chaos.stack import REPLICAS, Stack
from tests.fakes.provider import FakeProvider
from tests.support.cluster import Cluster

VICTIMS = ("billing", "conversation", pytest.param("billing and conversation", marks=pytest.mark.long))
# From the kill to the client's terminal frame.
END_SECONDS = 15.0
LONG_ROUNDS = 20
ROUND_SECONDS = 60
ROUNDS = [1, pytest.param(LONG_ROUNDS, marks=[pytest.mark.long, pytest.mark.timeout(LONG_ROUNDS * ROUND_SECONDS)])]
# Where billing's write is held, whoever is killed.
AT_BILLING = "billing"

Projects = Mapping[str, ProjectKeys]


@pytest.fixture(scope="module")
def paying_stack() -> Iterator[Stack]:
    """Two replicas with two gateways, one billing and servers of their own; all start again when they end."""
    with (
        FakeProvider() as provider,
        Cluster(
            provider_url=provider.base_url,
            gateways=2,
            private_postgres=True,
            private_nats=True,
            supervised=True,
            environ=UNHURRIED,
        ) as cluster,
    ):
        yield Stack(cluster, provider)


@pytest.fixture(scope="module")
def projects(paying_stack: Stack) -> Projects:
    """A project for each point, by the point's name."""
    points = [point for points in TOGETHER for point in points]
    return {point.name: paying_stack.cluster.create_project(f"point-{at}") for at, point in enumerate(points)}


@pytest.fixture
async def paying(paying_stack: Stack) -> AsyncIterator[Stack]:
    """See `paying_stack`; the books are checked after each test."""
    yield paying_stack
    await paying_stack.check_books()


@pytest.mark.parametrize("points", TOGETHER, ids=lambda points: ", ".join(map(str, points)))
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_every_call_is_paid_for_once_whoever_is_killed(
    paying: Stack, projects: Projects, victim: str, points: tuple[Point, ...], rounds: int
) -> None:
    for number in range(rounds):
        # In turn a held write is lost with its sender, or it happens and only the answer is lost.
        await kill_at(paying, projects, victim, points, REPLICAS[number // 2 % 2], is_swapped=number % 2 == 1)


async def kill_at(
    stack: Stack, projects: Projects, victim: str, points: tuple[Point, ...], owner: int, *, is_swapped: bool
) -> None:
    cluster, victims = stack.cluster, victim.split(" and ")
    await cluster.ready()
    cluster.settle()
    async with AsyncExitStack() as opened:
        # All triggers first: making one waits for the transactions that others hold.
        payments = [await Payment.prepare(stack, point, projects[point.name], opened) for point in points]
        for payment in payments:
            await payment.start(owner)
            opened.callback(payment.reading.cancel)
        await asyncio.gather(*(payment.reached() for payment in payments))
        if points == (FORGETTING,):
            owner = payments[0].place.replica()  # any process sends what waits
        killed = time.monotonic()
        for service in victims:
            cluster.kill(service, owner if service == "conversation" else 1)
        arrivals = {payment.point: arrives(payment.point, victims, is_swapped) for payment in payments}
        for payment in payments:
            payment.place.open_gate()
            payment.place.let_go(arrivals[payment.point])
        away = 0.0  # billing
        for service in victims:
            await cluster.ready(service)
            if service == "billing":
                away = time.monotonic() - killed
        await asyncio.wait(
            [payment.reading for payment in payments], timeout=max(0.0, killed + END_SECONDS - time.monotonic())
        )
        open_still = {payment.point.name: payment.reading for payment in payments if not payment.reading.done()}
        assert open_still == {}
        answered = [await end(payment, away) for payment in payments]
        await stack.check_books()
        booked = time.monotonic() - killed
        for payment, is_answered in zip(payments, answered, strict=True):
            if is_answered:
                check_fates(payment, victim, arrivals[payment.point], killed)
        FIGURES[f"money, {victim} killed at {len(points)} points: all booked"].add(booked)


def arrives(point: Point, victims: list[str], is_swapped: bool) -> bool:
    """Whether a held write still happens. One of a process that lives does: nobody took it away."""
    if victims == ["billing"] and point.schema != AT_BILLING:
        return True
    return point.at_commit != is_swapped


async def end(payment: Payment, away: float) -> bool:
    """Whether the client got its answer; else billing was away too long, it was told so, and its message is kept."""
    payment.reading.result()
    answer, client = payment.answer, payment.client
    assert answer.end is not None
    assert answer.connections == 1, "the client noticed"
    if answer.end.event == "error" and away > HOLD_WAIT_SECONDS:
        assert answer.end.data["code"] == "UNAVAILABLE", answer.end
        (question,) = await client.messages(payment.conversation)
        assert question["role"] == "user"
        again = await client.ask(payment.conversation, "[fake chunks=2]")
        assert again.end is not None
        assert again.end.event == "done"
        FIGURES["money, billing was away too long"].add(away)
        return False
    await check_answer(payment.stack.record, client, payment.conversation, answer)
    return True


def check_fates(payment: Payment, victim: str, arrives: bool, killed: float) -> None:
    run = payment.stack.record.run(payment.conversation)
    assert run is not None
    *before, last = payment.fates(run)
    is_owner_killed = "conversation" in victim
    assert last is Fate.ANSWERED
    assert before in expected(payment.point, is_owner_killed=is_owner_killed, arrives=arrives), payment.point
    assert run.takeovers == len(before)
    is_done_before = payment.point in (BOOKING, BOOKING_COMMIT, FORGETTING)
    FIGURES[f"money, {victim} killed {payment.point}"].add(
        0.0 if is_done_before else payment.ended - killed,
        calls_again=len(before),
        unsent=before.count(Fate.UNSENT),
        unseen_and_booked=before.count(Fate.UNSEEN),
        broken=before.count(Fate.BROKEN),
    )


@pytest.mark.parametrize("point", [BOOKING, BOOKING_COMMIT], ids=str)
@pytest.mark.parametrize("victim", ["postgres", "nats"])
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_a_settle_outlives_the_servers_under_it(
    paying: Stack, projects: Projects, victim: str, point: Point, rounds: int
) -> None:
    for number in range(rounds):
        await kill_server_at(paying, projects, victim, point, arrives=number % 2 == 1)


async def kill_server_at(stack: Stack, projects: Projects, victim: str, point: Point, *, arrives: bool) -> None:
    cluster = stack.cluster
    await cluster.ready()
    cluster.settle()
    async with AsyncExitStack() as opened:
        payment = await Payment.prepare(stack, point, projects[point.name], opened)
        await payment.start(1)
        opened.callback(payment.reading.cancel)
        await payment.reached()
        killed = time.monotonic()
        cluster.kill(victim)
        if victim != "postgres":  # that one took the held write and the hold with it
            payment.place.let_go(arrives)
        await cluster.ready()
        # Its text and its end were committed before.
        await asyncio.wait_for(payment.reading, END_SECONDS)
        run = await check_answer(stack.record, payment.client, payment.conversation, payment.answer)
        await stack.check_books()
        FIGURES[f"money, {victim} killed {point}: booked"].add(time.monotonic() - killed)
        assert payment.fates(run) == [Fate.ANSWERED]
