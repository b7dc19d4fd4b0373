"""The outbox: all it holds arrives, soon and whoever was away meanwhile."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from uuid import UUID

import psycopg_pool
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from kit.errors import ServiceError, internal, unavailable
from kit.ids import new_id
from kit.pricing import upper_bound
from kit.rates import from_message
from services.conversation import limits
from services.conversation.billing import Billing, Payer
from services.conversation.domain.usage import Hold
from services.conversation.outbox import Outbox
from tests.contract.conversation.books import Books
from tests.contract.conversation.harness import Launcher, Service, Sql, eventually, project_id
from tests.fakes.provider import FakeProvider
from tests.support.billing import INPUT_NANO, OUTPUT_NANO, RATES, input_bound
from tests.support.books import WAITING
from tests.support.databases import Database

TOPIC = "t"
OPEN_HOLDS = "SELECT count(*) FROM billing.holds WHERE status = 'open'"
BACK_SECONDS = 2.5  # a poll and its sends


class Receiver:
    """What the rows are sent to. `fails` are raised for the payloads they are of; `error` for all."""

    def __init__(self) -> None:
        self.received: Counter[bytes] = Counter()
        self.tried: Counter[bytes] = Counter()
        self.fails: dict[bytes, Exception] = {}
        self.error: Exception | None = None
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def __call__(self, payload: bytes) -> None:
        """Receives one, unless it is to fail."""
        self.tried[payload] += 1
        await self.is_open.wait()
        error = self.error or self.fails.get(payload)
        if error is not None:
            raise error
        self.received[payload] += 1


@pytest.fixture
def receiver() -> Receiver:
    """One that receives everything."""
    return Receiver()


@pytest_asyncio.fixture
async def outbox(database: Database, receiver: Receiver) -> AsyncIterator[Outbox]:
    """One that is not started."""
    async with psycopg_pool.AsyncConnectionPool(
        database.engine_url, min_size=1, max_size=4, kwargs={"autocommit": True}, open=False
    ) as pool:
        found = Outbox(pool, {TOPIC: receiver})
        yield found
        await found.stop()


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """No outbox sends anything by itself."""
    monkeypatch.setattr(limits, "OUTBOX_POLL_SECONDS", 60)
    monkeypatch.setattr(Outbox, "wake", lambda self: None)


async def write(sql: Sql, count: int, *, project: UUID | None = None, seconds_old: float = 0) -> list[bytes]:
    """Rows to be sent; their payloads."""
    payloads = [str(number).encode() for number in range(count)]
    await sql.rows(
        "INSERT INTO conversation.outbox (id, topic, project_id, payload, created_at)"
        " SELECT gen_random_uuid(), %s, %s, payload, now() - make_interval(secs => %s)"
        " FROM unnest(%s::bytea[]) payload",
        *(TOPIC, project or new_id(), seconds_old, payloads),
    )
    return payloads


async def is_empty(sql: Sql) -> bool:
    """Whether nothing waits."""
    return bool(await sql.value(WAITING) == 0)


def gauge(name: str) -> float:
    """A gauge of the outbox, now."""
    found = REGISTRY.get_sample_value(f"threadloom_outbox_{name}")
    assert found is not None
    return found


# ---------------------------------------------------------------- rounds


async def test_more_rows_than_a_round_takes_are_all_sent_once(outbox: Outbox, receiver: Receiver, sql: Sql) -> None:
    payloads = await write(sql, 3 * limits.OUTBOX_ROWS + 1)
    outbox.start()
    await eventually(lambda: is_empty(sql), 0.9)  # no poll lies between the rounds
    assert receiver.received == Counter(payloads)


async def test_a_round_takes_no_more_rows_than_it_may(outbox: Outbox, receiver: Receiver, sql: Sql) -> None:
    await write(sql, limits.OUTBOX_ROWS + 1)
    taken = [(await outbox.send_due()).taken for _ in range(3)]
    assert taken == [limits.OUTBOX_ROWS, 1, 0]


@pytest.mark.parametrize("error", [RuntimeError("odd"), internal()])
async def test_a_row_that_cannot_be_sent_does_not_keep_the_others(
    outbox: Outbox, receiver: Receiver, sql: Sql, error: Exception
) -> None:
    payloads = await write(sql, 2 * limits.OUTBOX_ROWS)
    receiver.fails[payloads[0]] = error
    outbox.start()
    await eventually(lambda: _has(receiver, payloads[1:]))

    async def only_the_refused_is_left() -> bool:
        return await sql.rows("SELECT payload, attempts >= 1 FROM conversation.outbox") == [(payloads[0], True)]

    await eventually(only_the_refused_is_left)
    receiver.fails.clear()
    await eventually(lambda: is_empty(sql))


async def _has(receiver: Receiver, payloads: list[bytes]) -> bool:
    return receiver.received == Counter(payloads)


async def test_only_what_is_refused_is_tried_ever_more_seldom(outbox: Outbox, receiver: Receiver, sql: Sql) -> None:
    await write(sql, 1)
    due_in = "SELECT extract(epoch FROM due_at - clock_timestamp())::float8, attempts FROM conversation.outbox"
    hurry = "UPDATE conversation.outbox SET due_at = clock_timestamp()"
    for error, seconds, attempts in [
        *[(unavailable("away"), limits.OUTBOX_POLL_SECONDS, 0)] * 9,
        *[(internal(), limits.OUTBOX_PAUSE_SECONDS * 2**number, number + 1) for number in range(3)],
        (unavailable("away"), limits.OUTBOX_POLL_SECONDS, 3),
    ]:
        receiver.error = error
        await outbox.send_due()
        ((left, counted),) = await sql.rows(due_in)
        assert seconds - 0.4 < left <= seconds
        assert counted == attempts
        await sql.rows(hurry)


async def test_while_nobody_receives_one_round_a_poll_is_tried(
    outbox: Outbox, receiver: Receiver, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OUTBOX_POLL_SECONDS", 0.2)
    await write(sql, 10 * limits.OUTBOX_ROWS)
    receiver.error = unavailable("away")
    began = time.monotonic()
    outbox.start()

    async def has_tried_four_rounds() -> bool:
        outbox.wake()  # whatever is committed meanwhile
        return receiver.tried.total() >= 4 * limits.OUTBOX_ROWS

    await eventually(has_tried_four_rounds)
    assert time.monotonic() - began >= 3 * 0.2
    receiver.error = None
    await eventually(lambda: is_empty(sql), BACK_SECONDS)


async def test_a_send_ends_before_its_lease_does(
    outbox: Outbox, receiver: Receiver, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits.OUTBOX_SEND_SECONDS < limits.OUTBOX_LEASE_SECONDS
    monkeypatch.setattr(limits, "OUTBOX_SEND_SECONDS", 0.1)
    await write(sql, 1)
    receiver.is_open.clear()
    async with asyncio.timeout(2.0):
        done = await outbox.send_due()
    assert (done.taken, done.away) == (1, 1)
    assert await sql.value("SELECT attempts FROM conversation.outbox") == 0


async def test_a_database_that_does_not_answer_is_not_waited_for(
    outbox: Outbox, receiver: Receiver, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ANSWER_SECONDS", 0.1)
    await write(sql, 1)
    await sql.rows("BEGIN")
    await sql.rows("LOCK TABLE conversation.outbox")
    for use in (outbox.send_due, outbox.look):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(use(), 5.0)
        assert time.monotonic() - began < 2.0
    assert not await asyncio.wait_for(outbox.deliver(new_id()), 2.0)
    outbox.start()
    await asyncio.sleep(0.3)  # both loops meet it too, and must live on
    await sql.rows("COMMIT")
    await eventually(lambda: is_empty(sql))


# ---------------------------------------------------------------- gauges


async def test_the_gauges_are_true_while_nothing_can_be_sent(
    outbox: Outbox, receiver: Receiver, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OUTBOX_LOOK_SECONDS", 0.05)
    receiver.is_open.clear()  # the loop is busy with its first round from here on
    await write(sql, 3, seconds_old=100)
    outbox.start()

    async def shows(rows: int, least: float, most: float) -> bool:
        return gauge("waiting") == rows and least <= gauge("oldest_seconds") <= most

    await eventually(lambda: shows(3, 100, 110))
    await write(sql, 2, seconds_old=200)
    await eventually(lambda: shows(5, 200, 210))
    receiver.error = unavailable("away")
    receiver.is_open.set()
    await write(sql, 1, seconds_old=300)
    await eventually(lambda: shows(6, 300, 310))
    receiver.error = None
    await eventually(lambda: shows(0, 0, 0))


# ---------------------------------------------------------------- the end of a process


async def test_a_clean_stop_leaves_nothing_to_tell(launch: Launcher, books: Books, sql: Sql, asleep: None) -> None:
    service = await launch()
    threads = [await service.alice.thread() for _ in range(20)]
    await asyncio.gather(*(service.alice.run(thread, "hello").end() for thread in threads))
    assert await sql.value(OPEN_HOLDS) == await sql.value(WAITING) == 20
    await service.stop()
    assert await sql.value(OPEN_HOLDS) == await sql.value(WAITING) == 0
    assert len(await books.ledger()) == 20


async def test_a_stop_waits_a_while_for_a_receiver_that_is_away(outbox: Outbox, receiver: Receiver, sql: Sql) -> None:
    await write(sql, 2 * limits.OUTBOX_ROWS)
    receiver.error = unavailable("away")
    outbox.start()
    await eventually(lambda: _is_tried(receiver))
    stopping = asyncio.create_task(outbox.drain(5.0))
    await asyncio.sleep(0.1)
    receiver.error = None
    await stopping
    assert await is_empty(sql)


async def test_a_stop_does_not_wait_for_ever(outbox: Outbox, receiver: Receiver, sql: Sql) -> None:
    await write(sql, 1)
    receiver.is_open.clear()
    outbox.start()
    await eventually(lambda: _is_tried(receiver))
    async with asyncio.timeout(2.0):
        await outbox.drain(0.2)
        await outbox.stop()
    assert not await is_empty(sql)


async def test_a_stop_does_not_wait_for_what_is_refused(outbox: Outbox, receiver: Receiver, sql: Sql) -> None:
    await write(sql, 1)
    receiver.error = internal()
    outbox.start()
    await eventually(lambda: _is_tried(receiver))
    async with asyncio.timeout(2.0):
        await outbox.drain(30.0)


async def _is_tried(receiver: Receiver) -> bool:
    return receiver.tried.total() > 0


# ---------------------------------------------------------------- billing


async def test_all_is_booked_soon_after_an_outage(launch: Launcher, books: Books, sql: Sql) -> None:
    service = await launch()
    thread = await service.alice.thread()
    await service.alice.run(thread, "[fake gate=g gate_at=2]").until(lambda reading: reading.text)
    async with books.away():
        await service.alice.cancel((await sql.rows("SELECT id::text FROM conversation.ai_runs"))[0][0])
        await eventually(lambda: _waits(sql))
        await asyncio.sleep(4.0)  # long enough for pauses that double to pass what is waited for below
    await eventually(lambda: is_empty(sql), BACK_SECONDS)
    assert len(await books.ledger()) == 1


async def _waits(sql: Sql) -> bool:
    return not await is_empty(sql)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[UUID]:
    """The calls billing was asked to hold money for, once for each time."""
    found: list[UUID] = []
    place_hold = Billing.place_hold

    async def counted(self: Billing, call_id: UUID, payer: Payer, **tokens: int) -> Hold:
        found.append(call_id)
        return await place_hold(self, call_id, payer, **tokens)

    monkeypatch.setattr(Billing, "place_hold", counted)
    return found


def one_hold() -> int:
    """A quota for one call at a time: "hello" in an empty thread, with 300 tokens of answer."""
    return upper_bound(from_message(RATES), input_bound("hello"), 300)


@pytest.mark.parametrize("limit", ["quota", "cap"])
async def test_what_an_ended_turn_still_holds_pays_for_the_next(
    service: Service, books: Books, asleep: None, asked: list[UUID], limit: str
) -> None:
    project = project_id(service.alice.caller)
    money = one_hold() + 200 * OUTPUT_NANO + 10 * INPUT_NANO  # and what the first answer costs
    await (books.quota(project, "alice", money) if limit == "quota" else books.cap(project, money))
    for _ in range(2):
        thread = await service.alice.thread()
        run = await service.alice.run(thread, "hello", max_output_tokens=300, min_output_tokens=300).end()
        assert run.kinds[-1] == "run_finished"
    assert len(asked) == 3
    await books.sql.rows("UPDATE conversation.outbox SET due_at = now()")


async def test_a_quota_that_is_used_up_is_refused_once_nothing_waits(
    service: Service, books: Books, sql: Sql, provider: FakeProvider, asleep: None, asked: list[UUID]
) -> None:
    await books.quota(project_id(service.alice.caller), "alice", one_hold())
    codes, times = [], []
    for _ in range(3):
        thread = await service.alice.thread()
        run = await service.alice.run(thread, "hello", max_output_tokens=300, min_output_tokens=300).end()
        codes.append(run.events[-1].run_failed.error.code)
        times.append(len(asked))
        asked.clear()
    assert codes == ["", "QUOTA_EXCEEDED", "QUOTA_EXCEEDED"]
    assert times == [1, 2, 1]  # asked again only after something was delivered
    assert len(provider.calls) == 1
    assert await is_empty(sql)


async def test_a_project_s_rows_are_delivered_whenever_they_are_due(
    outbox: Outbox, receiver: Receiver, sql: Sql
) -> None:
    project = new_id()
    await write(sql, 3, project=project)
    await write(sql, 2)
    await sql.rows("UPDATE conversation.outbox SET due_at = clock_timestamp() + interval '1 hour'")
    assert not await outbox.deliver(new_id())
    with outbox.watch(project) as watch, outbox.watch(new_id()) as other:
        assert await outbox.deliver(project)
    assert (watch.has_received, other.has_received) == (True, False)
    assert receiver.received.total() == 3
    assert not await outbox.deliver(project)
    assert await sql.value(WAITING) == 2


async def test_what_is_not_received_is_not_delivered(outbox: Outbox, receiver: Receiver, sql: Sql) -> None:
    project = new_id()
    await write(sql, limits.OUTBOX_ROWS, project=project)
    for error in (unavailable("away"), ServiceError("INVALID_REQUEST", "no")):
        receiver.error = error
        assert not await outbox.deliver(project)
    receiver.error = None
    await write(sql, 1, project=project)
    receiver.tried.clear()
    assert await outbox.deliver(project)
    assert receiver.tried.total() == limits.OUTBOX_ROWS  # no more, whatever there is
    assert receiver.tried[b"0"] == 2  # the new row, which was never refused, came first, and an old one
