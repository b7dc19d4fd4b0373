"""Webhooks hear of every run's end at least once, signed, whatever their receivers do meanwhile."""

import asyncio
import json
from dataclasses import replace
from uuid import UUID

import pytest
import pytest_asyncio

from kit.errors import ServiceError
from services.conversation import limits
from tests.contract.conversation.harness import Launcher, Service, Sql, eventually
from tests.contract.conversation.hooks import BOTH, Admin, ask, count
from tests.fakes.provider import FakeProvider
from tests.fakes.receiver import Receiver
from threadloom.conversation.v1 import webhook_service_pb2 as api

pytestmark = pytest.mark.usefixtures("quick_webhooks")


@pytest_asyncio.fixture
async def service(launch: Launcher) -> Service:
    return await launch(THREADLOOM_ALLOWED_HOSTS="127.0.0.1")


async def test_a_finished_run_is_told_once_and_signed(service: Service, receiver: Receiver) -> None:
    admin = Admin(service)
    hook, secret = await admin.create(receiver.url + "/a")
    run = await ask(service)
    row = await admin.until(hook, api.DELIVERY_STATE_DELIVERED)
    (got,) = receiver.got
    assert got.is_signed(secret)
    assert not replace(got, body=got.body + b" ").is_signed(secret)
    assert got.id == row.id
    told = json.loads(got.body)
    assert told["type"] == "run.finished"
    assert told["data"]["run_id"] == run
    assert (told["data"]["user_id"], told["data"]["status"]) == ("alice", "succeeded")
    assert told["data"]["usage"]["output_tokens"] > 0
    assert b"hello" not in got.body


async def test_a_project_without_webhooks_that_want_it_adds_no_row(
    service: Service, receiver: Receiver, sql: Sql
) -> None:
    _hook, _ = await Admin(service).create(receiver.url, ("run.failed",))
    _other, _ = await Admin(service, service.people["role elsewhere"]).create(receiver.url)
    off, _ = await Admin(service).create(receiver.url)
    admin = Admin(service)
    await admin.call(admin.stub.UpdateWebhook, api.UpdateWebhookRequest(webhook_id=off, enabled=False))
    await ask(service)
    assert await sql.value("SELECT count(*) FROM conversation.webhook_deliveries") == 0


@pytest.mark.parametrize("trouble", [500, 404, "hang", "close", "redirect"])
async def test_a_receiver_in_trouble_gets_it_later_under_the_same_id(
    service: Service, receiver: Receiver, trouble: int | str
) -> None:
    receiver.answers["/a"] = [trouble, trouble, 200]
    admin = Admin(service)
    hook, secret = await admin.create(receiver.url + "/a")
    await ask(service)
    row = await admin.until(hook, api.DELIVERY_STATE_DELIVERED)
    assert row.attempts == 3
    assert {got.id for got in receiver.got} == {row.id}
    assert all(got.is_signed(secret) for got in receiver.got)
    assert not receiver.at("/elsewhere")


async def test_after_the_last_try_it_is_failed_listed_and_sent_again_by_hand(
    service: Service, receiver: Receiver
) -> None:
    receiver.answers["/a"] = [503]
    admin = Admin(service)
    hook, _ = await admin.create(receiver.url + "/a")
    await ask(service)
    row = await admin.until(hook, api.DELIVERY_STATE_FAILED)
    assert (row.attempts, row.last_status) == (len(limits.WEBHOOK_PAUSES) + 1, 503)
    receiver.answers["/a"] = [200]
    await admin.call(admin.stub.RedeliverWebhookDelivery, api.RedeliverWebhookDeliveryRequest(delivery_id=row.id))
    assert (await admin.until(hook, api.DELIVERY_STATE_DELIVERED)).id == row.id


async def test_one_that_hangs_delays_no_other(service: Service, receiver: Receiver) -> None:
    receiver.answers["/slow"] = ["hang"]
    admin = Admin(service)
    slow, _ = await admin.create(receiver.url + "/slow")
    _quick, _ = await admin.create(receiver.url + "/quick")
    for _ in range(6):
        await ask(service)
    async with asyncio.timeout(5):
        await eventually(lambda: count(receiver, 6, "/quick"))
    assert all(one.state == api.DELIVERY_STATE_PENDING for one in await admin.deliveries(slow))


async def test_gone_disables_the_webhook(service: Service, receiver: Receiver) -> None:
    receiver.answers["/a"] = [410]
    admin = Admin(service)
    hook, _ = await admin.create(receiver.url + "/a")
    await admin.call(admin.stub.SendTestWebhook, api.SendTestWebhookRequest(webhook_id=hook))
    assert (await admin.until(hook, api.DELIVERY_STATE_FAILED)).attempts == 1
    ((found,)) = (await admin.call(admin.stub.ListWebhooks, api.ListWebhooksRequest())).webhooks
    assert (found.enabled, found.disabled_reason) == (False, "gone")


async def test_a_private_address_is_refused_when_set_and_when_called(
    service: Service, receiver: Receiver, sql: Sql
) -> None:
    admin = Admin(service)
    for url in ("https://10.0.0.1/", "https://[::1]/", "http://example.com/", "https://169.254.169.254/"):
        with pytest.raises(ServiceError) as caught:
            await admin.create(url)
        assert caught.value.reason == "INVALID_OPTIONS"
    hook, _ = await admin.create(receiver.url)
    await sql.rows("UPDATE conversation.webhooks SET url = 'https://10.1.2.3/x'")  # as a name that changed its mind
    await ask(service)

    async def look() -> list[api.WebhookDelivery]:
        return [one for one in await admin.deliveries(hook) if one.attempts]

    (row,) = await eventually(look)
    assert "may not be called" in row.last_error


async def test_who_dies_between_sending_and_writing_down_has_it_sent_again(
    service: Service, receiver: Receiver, sql: Sql
) -> None:
    """What such a death leaves behind: a row that was sent, under a lease that ends."""
    admin = Admin(service)
    hook, _ = await admin.create(receiver.url)
    await ask(service)
    row = await admin.until(hook, api.DELIVERY_STATE_DELIVERED)
    await sql.rows(
        "UPDATE conversation.webhook_deliveries SET state = 'pending', attempts = 0,"
        " due_at = clock_timestamp() + interval '0.2 s' WHERE id = %s",
        UUID(row.id),
    )
    await eventually(lambda: count(receiver, 2))
    assert {got.id for got in receiver.got} == {row.id}


async def test_a_later_event_of_a_run_waits_for_an_earlier_one(service: Service, receiver: Receiver, sql: Sql) -> None:
    receiver.answers["/a"] = [500, 500, 500, 200]
    admin = Admin(service)
    _hook, _ = await admin.create(receiver.url + "/a")
    await ask(service)
    await sql.rows(
        "INSERT INTO conversation.webhook_deliveries (id, webhook_id, project_id, run_id, type, payload)"
        " SELECT gen_random_uuid(), webhook_id, project_id, run_id, 'run.failed', '{\"later\": 1}'"
        " FROM conversation.webhook_deliveries"
    )
    await eventually(lambda: count(receiver, 5))
    assert [b"later" in got.body for got in receiver.got] == [False] * 4 + [True]


async def test_a_failed_run_is_told_as_failed(
    service: Service, receiver: Receiver, provider: FakeProvider, sql: Sql
) -> None:
    admin = Admin(service)
    await admin.create(receiver.url)
    reading = service.alice.run(await service.alice.thread(), "hello", model="a-model-without-a-price")
    await reading.end()
    await eventually(lambda: count(receiver, 1))
    told = json.loads(receiver.got[0].body)
    assert told["type"] == "run.failed"
    assert told["data"]["error"]["code"] == "MODEL_NOT_PRICED"
    assert told["data"]["message_id"] is None


async def test_a_secret_can_be_rotated_and_a_project_has_ten_webhooks(service: Service, receiver: Receiver) -> None:
    admin = Admin(service)
    ids = [(await admin.create(receiver.url))[0] for _ in range(limits.WEBHOOKS)]
    with pytest.raises(ServiceError, match="at most 10"):
        await admin.create(receiver.url)
    for id in ids[1:]:
        await admin.call(admin.stub.DeleteWebhook, api.DeleteWebhookRequest(webhook_id=id))
    secret = (
        await admin.call(admin.stub.RotateWebhookSecret, api.RotateWebhookSecretRequest(webhook_id=ids[0]))
    ).secret
    await admin.call(admin.stub.SendTestWebhook, api.SendTestWebhookRequest(webhook_id=ids[0]))
    await eventually(lambda: count(receiver, 1))
    assert receiver.got[0].is_signed(secret)
    assert json.loads(receiver.got[0].body)["type"] == "ping"


async def test_only_its_own_projects_service_role_reaches_a_webhook(
    service: Service, receiver: Receiver, sql: Sql
) -> None:
    admin = Admin(service)
    hook, _ = await admin.create(receiver.url)
    await ask(service)
    row = await admin.until(hook, api.DELIVERY_STATE_DELIVERED)
    before = await sql.contents()
    requests = {
        "UpdateWebhook": api.UpdateWebhookRequest(webhook_id=hook, enabled=False),
        "RotateWebhookSecret": api.RotateWebhookSecretRequest(webhook_id=hook),
        "SendTestWebhook": api.SendTestWebhookRequest(webhook_id=hook),
        "ListWebhookDeliveries": api.ListWebhookDeliveriesRequest(webhook_id=hook),
        "RedeliverWebhookDelivery": api.RedeliverWebhookDeliveryRequest(delivery_id=row.id),
        "DeleteWebhook": api.DeleteWebhookRequest(webhook_id=hook),
        "ListWebhooks": api.ListWebhooksRequest(),
        "CreateWebhook": api.CreateWebhookRequest(id=hook, url=receiver.url, events=BOTH),
    }
    assert set(requests) == {method.name for method in api.DESCRIPTOR.services_by_name["WebhookService"].methods}
    for name, request in requests.items():
        for who in ("alice", "bob", "alice elsewhere", "system"):
            wrong = Admin(service, service.people[who])
            with pytest.raises(ServiceError) as caught:
                await wrong.call(getattr(wrong.stub, name), request)
            assert caught.value.reason == "FORBIDDEN", (name, who)
    elsewhere = Admin(service, service.people["role elsewhere"])
    assert not (await elsewhere.call(elsewhere.stub.ListWebhooks, requests["ListWebhooks"])).webhooks
    await elsewhere.call(elsewhere.stub.DeleteWebhook, requests["DeleteWebhook"])
    for name, request in requests.items():
        if name not in ("ListWebhooks", "DeleteWebhook"):
            with pytest.raises(ServiceError) as caught:
                await elsewhere.call(getattr(elsewhere.stub, name), request)
            assert caught.value.reason == "NOT_FOUND", name
    assert await sql.contents() == before
