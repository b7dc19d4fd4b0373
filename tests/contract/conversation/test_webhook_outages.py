"""Receivers that are away, hang or are slow, and processes that stop while they deliver."""

import json
import time
from uuid import UUID

import pytest
import pytest_asyncio

from services.conversation import limits, server
from services.conversation.webhooks import Deliverer
from tests.contract.conversation.harness import Launcher, Service, Sql, eventually
from tests.contract.conversation.hooks import Admin, ask, count
from tests.fakes.receiver import Receiver
from threadloom.conversation.v1 import webhook_service_pb2 as api

pytestmark = pytest.mark.usefixtures("quick_webhooks")

ALLOWED = {"THREADLOOM_ALLOWED_HOSTS": "127.0.0.1"}
RUNS = 4
# A second event of each run there is: it must not pass the first.
LATER = """
INSERT INTO conversation.webhook_deliveries (id, webhook_id, project_id, run_id, type, payload)
SELECT gen_random_uuid(), webhook_id, project_id, run_id, 'run.failed',
    json_build_object('data', json_build_object('run_id', run_id), 'later', true)::text
FROM conversation.webhook_deliveries
"""
# What waits for a webhook that did not exist when its runs ended.
BACKLOG = """
INSERT INTO conversation.webhook_deliveries (id, webhook_id, project_id, run_id, type, payload)
SELECT gen_random_uuid(), w.id, w.project_id, gen_random_uuid(), 'run.finished', '{}'
FROM conversation.webhooks w, generate_series(1, %s) WHERE w.id = ANY(%s)
"""


@pytest_asyncio.fixture
async def service(launch: Launcher) -> Service:
    return await launch(**ALLOWED)


async def test_a_receiver_that_was_down_for_an_hour_hears_of_every_run_in_order(
    launch: Launcher, receiver: Receiver, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule as it is, an hour in two seconds: five tries fail in it, the sixth arrives."""
    scale = 2.0 / 3600
    pauses = tuple(pause * scale for pause in limits.WEBHOOK_PAUSES)
    monkeypatch.setattr(server, "Deliverer", lambda pool, out, ring: Deliverer(pool, out, ring, pauses))
    monkeypatch.setattr(limits, "WEBHOOK_REST_MAX_SECONDS", 60.0 * scale)
    service = await launch(**ALLOWED)
    admin = Admin(service)
    hook, secret = await admin.create(receiver.url + "/a")
    await receiver.leave()
    away_from = time.monotonic()
    runs = [await ask(service) for _ in range(RUNS)]
    await sql.rows(LATER)

    async def tried() -> bool:
        rows = [one for one in await admin.deliveries(hook) if one.type == "run.finished"]
        hour_is_over = time.monotonic() - away_from >= 3600 * scale
        return hour_is_over and all(one.attempts >= 4 for one in rows)

    await eventually(tried)
    assert not receiver.got
    failed = await admin.deliveries(hook)
    assert all(one.attempts == 0 for one in failed if one.type == "run.failed")
    assert {one.last_error for one in failed if one.attempts} == {"The host did not accept the connection."}
    await receiver.come()
    await eventually(lambda: count(receiver, 2 * RUNS), 30.0)
    assert all(got.is_signed(secret) for got in receiver.got)
    assert len({got.id for got in receiver.got}) == 2 * RUNS
    for run in runs:
        told = [json.loads(got.body) for got in receiver.got]
        assert ["later" in one for one in told if one["data"]["run_id"] == run] == [False, True]


async def test_a_receiver_that_is_dead_is_tried_one_at_a_time_whatever_waits(
    service: Service, receiver: Receiver, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WEBHOOK_SECONDS", 0.1)
    receiver.answers["/dead"] = [500, 500, "hang"]
    admin = Admin(service)
    hook, _ = await admin.create(receiver.url + "/dead")
    for tries in (1, 2):
        await ask(service)
        await eventually(lambda tries=tries: count(receiver, tries))  # type: ignore[misc]
    receiver.most_open.clear()
    await sql.rows(BACKLOG, 50, [UUID(hook)])
    await eventually(lambda: count(receiver, 12))
    assert receiver.most_open["/dead"] == 1


async def test_a_receiver_that_is_well_has_no_more_tries_at_once_than_allowed(
    service: Service, receiver: Receiver, sql: Sql
) -> None:
    receiver.answers["/slow"] = ["slow"]
    admin = Admin(service)
    hook, _ = await admin.create(receiver.url + "/slow")
    await sql.rows(BACKLOG, 20, [UUID(hook)])
    await eventually(lambda: count(receiver, 20, "/slow"))
    assert receiver.most_open["/slow"] == limits.WEBHOOK_PARALLEL


async def test_a_project_whose_receivers_all_hang_leaves_the_others_theirs(
    service: Service, receiver: Receiver, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WEBHOOK_SECONDS", 5.0)
    monkeypatch.setattr(limits, "WEBHOOK_TRIES_OPEN", 12)
    receiver.answers["/hang"] = ["hang"]
    hooks = [UUID((await Admin(service).create(receiver.url + "/hang"))[0]) for _ in range(5)]
    elsewhere = Admin(service, service.people["role elsewhere"])
    other, _ = await elsewhere.create(receiver.url + "/well")
    await sql.rows(BACKLOG, 10, hooks)
    await eventually(lambda: _open(receiver, "/hang", limits.WEBHOOK_PROJECT_TRIES))
    began = time.monotonic()
    await sql.rows(BACKLOG, 20, [UUID(other)])
    await eventually(lambda: count(receiver, 20, "/well"))
    assert time.monotonic() - began < 4.0  # before any of those that hang has ended
    assert receiver.most_open["/hang"] == limits.WEBHOOK_PROJECT_TRIES


async def test_a_run_that_ends_here_is_told_without_waiting_for_the_next_look(
    service: Service, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = Admin(service)
    hook, _ = await admin.create(receiver.url)
    monkeypatch.setattr(limits, "WEBHOOK_POLL_SECONDS", 60.0)
    await admin.call(admin.stub.SendTestWebhook, api.SendTestWebhookRequest(webhook_id=hook))
    row = await admin.until(hook, api.DELIVERY_STATE_DELIVERED)  # by now the deliverer's pause is the long one
    await ask(service)
    await eventually(lambda: count(receiver, 2))
    await admin.call(admin.stub.RedeliverWebhookDelivery, api.RedeliverWebhookDeliveryRequest(delivery_id=row.id))
    await eventually(lambda: count(receiver, 3))


async def test_a_process_that_stops_waits_briefly_for_a_receiver_and_gives_the_rest_back(
    launch: Launcher, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WEBHOOK_SECONDS", 10.0)
    receiver.answers["/a"] = ["hang", 204]
    service = await launch(**ALLOWED)
    hook, _ = await Admin(service).create(receiver.url + "/a")
    await ask(service)
    await eventually(lambda: count(receiver, 1))
    began = time.monotonic()
    await service.stop()
    assert time.monotonic() - began < limits.WEBHOOK_DRAIN_SECONDS + 3.0
    again = await launch(**ALLOWED)
    await eventually(lambda: count(receiver, 2), limits.WEBHOOK_LEASE_SECONDS / 3)
    row = await Admin(again).until(hook, api.DELIVERY_STATE_DELIVERED)
    assert {got.id for got in receiver.got} == {row.id}
    assert row.attempts == 1


async def _open(receiver: Receiver, path: str, least: int) -> bool:
    return receiver.open[path] >= least
