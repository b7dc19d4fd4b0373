"""Ends of every kind tell webhooks, and what is kept of deliveries and secrets goes when its time has come."""

import json
from typing import Any

import psycopg_pool
import pytest
import pytest_asyncio

from kit.sealing import KeyRing, key_ring
from services.conversation import limits
from services.conversation.sweeper import Sweeper
from tests.contract.conversation.harness import RING_1, RING_2, Launcher, Service, Sql, eventually, project_id
from tests.contract.conversation.hooks import Admin, ask, count
from tests.contract.conversation.orphans import an_orphan, insert
from tests.contract.conversation.waiting import enqueue, held
from tests.fakes.provider import FakeProvider
from tests.fakes.receiver import Receiver
from threadloom.conversation.v1 import conversation_service_pb2 as conversation
from threadloom.conversation.v1 import webhook_service_pb2 as api

pytestmark = pytest.mark.usefixtures("quick_webhooks")

ALLOWED = {"THREADLOOM_ALLOWED_HOSTS": "127.0.0.1"}
DAY = 24 * 3600.0
AGE = "UPDATE conversation.webhook_deliveries SET created_at = clock_timestamp() - make_interval(secs => %s)"


@pytest_asyncio.fixture
async def service(launch: Launcher) -> Service:
    return await launch(**ALLOWED)


async def told(receiver: Receiver, number: int) -> dict[str, dict[str, Any]]:
    """What was told, by run, once so many events came."""
    await eventually(lambda: count(receiver, number))
    events = [json.loads(got.body) for got in receiver.got]
    assert len(events) == number
    return {event["data"]["run_id"]: {"type": event["type"], **event["data"]} for event in events}


async def test_a_run_that_is_cancelled_is_told_as_finished(service: Service, receiver: Receiver) -> None:
    await Admin(service).create(receiver.url)
    run = await held(service.alice, await service.alice.thread())
    await service.alice.cancel(run.run_id)
    found = (await told(receiver, 1))[run.run_id]
    assert (found["type"], found["status"], found["finish_reason"]) == ("run.finished", "cancelled", "cancelled")
    assert found["usage"]["output_tokens"] > 0


async def test_a_run_that_fails_at_the_provider_is_told_with_its_error(service: Service, receiver: Receiver) -> None:
    await Admin(service).create(receiver.url)
    reading = await service.alice.run(await service.alice.thread(), "[fake error=400]").end()
    found = (await told(receiver, 1))[reading.run_id]
    assert (found["type"], found["status"]) == ("run.failed", "failed")
    assert found["error"]["code"].startswith("AI_PROVIDER")


async def test_runs_cancelled_before_their_turn_are_told(
    service: Service, receiver: Receiver, provider: FakeProvider
) -> None:
    await Admin(service).create(receiver.url)
    alice = service.alice
    thread = await alice.thread()
    first = await held(alice, thread)
    second, third = [await enqueue(alice, thread, text) for text in ("second", "third [fake chunks=2]")]
    await alice.cancel(second.run_id)
    found = (await told(receiver, 1))[second.run_id]
    assert (found["type"], found["status"], found["cost_usd"]) == ("run.finished", "cancelled", "0.000000000")
    assert found["usage"]["input_tokens"] == 0
    await alice.call(alice.conversation.CancelRun, conversation.CancelRunRequest(thread_id=thread, include_queued=True))
    statuses = {run: one["status"] for run, one in (await told(receiver, 3)).items()}
    assert statuses == dict.fromkeys([first.run_id, second.run_id, third.run_id], "cancelled")


async def test_a_conversation_that_is_deleted_tells_of_the_runs_it_cancelled_and_of_no_other(
    service: Service, receiver: Receiver
) -> None:
    alice = service.alice
    thread = await alice.thread()
    await alice.run(thread, "hello").end()
    await Admin(service).create(receiver.url)
    first = await held(alice, thread)
    second = await enqueue(alice, thread, "second")
    await alice.delete(thread)
    statuses = {run: one["status"] for run, one in (await told(receiver, 2)).items()}
    assert statuses == dict.fromkeys([first.run_id, second.run_id], "cancelled")


async def test_a_run_that_another_process_takes_over_is_told_once(
    service: Service, receiver: Receiver, sql: Sql
) -> None:
    await Admin(service).create(receiver.url)
    orphan = an_orphan(await service.alice.thread())
    await insert(service, sql, orphan)
    found = await told(receiver, 1)
    assert found[str(orphan.run)]["status"] == "succeeded"
    assert await sql.value("SELECT count(*) FROM conversation.webhook_deliveries") == 1


# ---------------------------------------------------------------- sweeping


def sweeper(pool: psycopg_pool.AsyncConnectionPool, ring: KeyRing) -> Sweeper:
    return Sweeper(pool, kept_seconds=3600, kept_bytes=1e9, ring=ring)


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("delivered", limits.WEBHOOK_DELIVERED_KEPT_SECONDS),
        ("failed", limits.WEBHOOK_KEPT_SECONDS),
        ("pending", limits.WEBHOOK_KEPT_SECONDS),
    ],
)
async def test_a_delivery_is_kept_as_long_as_told(
    service: Service,
    receiver: Receiver,
    sql: Sql,
    engine_pool: psycopg_pool.AsyncConnectionPool,
    state: str,
    kept: float,
) -> None:
    admin = Admin(service)
    hook, _ = await admin.create(receiver.url)
    await ask(service)
    await admin.until(hook, api.DELIVERY_STATE_DELIVERED)
    await admin.call(admin.stub.UpdateWebhook, api.UpdateWebhookRequest(webhook_id=hook, enabled=False))
    await sql.rows("UPDATE conversation.webhook_deliveries SET state = %s", state)
    for age, left in ((kept - 60.0, 1), (kept + 60.0, 0)):
        await sql.rows(AGE, age)
        await sweeper(engine_pool, KeyRing({})).sweep()
        assert await sql.value("SELECT count(*) FROM conversation.webhook_deliveries") == left, age


async def test_a_round_removes_so_many_and_the_oldest_first(
    service: Service,
    receiver: Receiver,
    sql: Sql,
    engine_pool: psycopg_pool.AsyncConnectionPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SWEEP_DELIVERIES", 2)
    hook, _ = await Admin(service).create(receiver.url)
    await sql.rows(
        "INSERT INTO conversation.webhook_deliveries (id, webhook_id, project_id, type, payload, state, attempts,"
        " created_at) SELECT gen_random_uuid(), %s, %s, 'ping', '{}', 'delivered', n,"
        " clock_timestamp() - make_interval(days => 10 + n) FROM generate_series(1, 3) n",
        hook,
        project_id(service.role.caller),
    )
    left = "SELECT attempts FROM conversation.webhook_deliveries"
    await sweeper(engine_pool, KeyRing({})).sweep()
    assert await sql.rows(left) == [(1,)]
    await sweeper(engine_pool, KeyRing({})).sweep()
    assert await sql.rows(left) == []


async def test_what_waits_for_a_webhook_that_is_gone_is_removed(
    service: Service, receiver: Receiver, sql: Sql, engine_pool: psycopg_pool.AsyncConnectionPool
) -> None:
    """What a run leaves that ends while a webhook is being removed."""
    admin = Admin(service)
    hook, _ = await admin.create(receiver.url)
    await ask(service)
    await admin.until(hook, api.DELIVERY_STATE_DELIVERED)
    await sql.rows("UPDATE conversation.webhook_deliveries SET webhook_id = gen_random_uuid(), state = 'pending'")
    await sweeper(engine_pool, KeyRing({})).sweep()
    assert await sql.value("SELECT count(*) FROM conversation.webhook_deliveries") == 0


async def test_secrets_are_sealed_again_under_a_new_key_and_still_sign(
    launch: Launcher, receiver: Receiver, sql: Sql, engine_pool: psycopg_pool.AsyncConnectionPool
) -> None:
    old = await launch(**ALLOWED, THREADLOOM_SECRET_KEYS=RING_1)
    hook, secret = await Admin(old).create(receiver.url)
    before = await sql.rows("SELECT key_id, sealed FROM conversation.webhooks")
    assert before[0][0] == "k1"
    await sweeper(engine_pool, key_ring(RING_1)).sweep()
    assert await sql.rows("SELECT key_id, sealed FROM conversation.webhooks") == before
    await sweeper(engine_pool, key_ring(f"{RING_2},{RING_1}")).sweep()
    ((key, sealed),) = await sql.rows("SELECT key_id, sealed FROM conversation.webhooks")
    assert key == "k2"
    assert sealed != before[0][1]
    await old.stop()
    new = await launch(**ALLOWED, THREADLOOM_SECRET_KEYS=RING_2)
    admin = Admin(new)
    await admin.call(admin.stub.SendTestWebhook, api.SendTestWebhookRequest(webhook_id=hook))
    await eventually(lambda: count(receiver, 1))
    assert receiver.got[0].is_signed(secret)
