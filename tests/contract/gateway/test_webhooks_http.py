"""Webhooks over HTTP before real services: managed by a project's admins, told over real HTTP, seen by nobody else."""

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from kit.outbound import URL_CHARS
from services.conversation import limits
from tests.contract.conversation.harness import eventually
from tests.contract.gateway.calls import NOBODYS, check_shape, pages, refusal
from tests.fakes.receiver import Receiver, running_receiver
from tests.support.cluster import Cluster
from tests.support.http import Client

WEBHOOKS = "/v1/admin/webhooks"
AGAIN = "/v1/admin/webhook-deliveries/{}/redeliver"
BOTH = ["run.finished", "run.failed"]


@pytest.fixture(scope="module")
def environ() -> dict[str, dict[str, str]]:
    """Receivers of this machine may be called."""
    return {"conversation": {"THREADLOOM_ALLOWED_HOSTS": "127.0.0.1"}}


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with running_receiver() as found:
        yield found


async def create(client: Client, url: str, events: list[str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = await client.call("POST", WEBHOOKS, {"url": url, "events": events or BOTH})
    return found


async def delivered(client: Client, webhook: str) -> list[Any]:
    """The webhook's deliveries once the newest has arrived."""

    async def look() -> list[Any] | None:
        found: list[Any] = (await client.call("GET", f"{WEBHOOKS}/{webhook}/deliveries"))["data"]
        return found if found and found[0]["state"] == "delivered" else None

    return await eventually(look) or []


async def test_a_webhook_is_made_listed_changed_and_removed(
    admin: Client, people: dict[str, Client], receiver: Receiver
) -> None:
    assert await admin.call("GET", WEBHOOKS) == {"data": []}
    made = await create(admin, receiver.url + "/a", ["run.failed"])
    hook, path = made["webhook"], f"{WEBHOOKS}/{made['webhook']['id']}"
    assert (hook["url"], hook["events"], hook["enabled"], hook["disabled_reason"]) == (
        receiver.url + "/a", ["run.failed"], True, None,
    )  # fmt: skip
    assert made["secret"].startswith("whsec_")
    assert await admin.call("GET", WEBHOOKS) == {"data": [hook]}
    assert await people["other"].call("GET", WEBHOOKS) == {"data": []}
    for change in ({"url": receiver.url + "/b"}, {"events": BOTH}, {"enabled": False}, {}):
        hook = {**hook, **change}
        changed = await admin.call("PATCH", path, change)
        hook["updated_at"] = changed["updated_at"]
        assert changed == hook
    assert await admin.call("GET", WEBHOOKS) == {"data": [hook]}
    for _ in range(2):
        assert await admin.call("DELETE", path) is None
    assert await admin.call("GET", WEBHOOKS) == {"data": []}
    assert (await refusal(admin.call("PATCH", path, {"enabled": True}))).status == 404


async def test_a_test_event_arrives_is_listed_and_is_sent_again(admin: Client, receiver: Receiver) -> None:
    made = await create(admin, receiver.url + "/a")
    path = f"{WEBHOOKS}/{made['webhook']['id']}"
    sent = await admin.call("POST", path + "/test")
    assert (sent["type"], sent["run_id"], sent["state"]) == ("ping", None, "pending")
    (row,) = await delivered(admin, made["webhook"]["id"])
    assert (row["id"], row["attempts"], row["last_status"], row["last_error"], row["next_attempt_at"]) == (
        sent["id"], 1, 204, None, None,
    )  # fmt: skip
    again = await admin.call("POST", AGAIN.format(row["id"]))
    assert (again["id"], again["state"], again["attempts"]) == (row["id"], "pending", 0)
    await delivered(admin, made["webhook"]["id"])
    assert [got.id for got in receiver.got] == [row["id"]] * 2
    assert all(got.is_signed(made["secret"]) for got in receiver.got)


async def test_a_rotated_secret_signs_from_then_on(admin: Client, receiver: Receiver) -> None:
    made = await create(admin, receiver.url)
    path = f"{WEBHOOKS}/{made['webhook']['id']}"
    new = (await admin.call("POST", path + "/secret"))["secret"]
    assert new != made["secret"]
    await admin.call("POST", path + "/test")
    await delivered(admin, made["webhook"]["id"])
    assert (receiver.got[0].is_signed(new), receiver.got[0].is_signed(made["secret"])) == (True, False)


async def test_a_run_over_http_is_told_and_deliveries_come_in_pages(
    people: dict[str, Client], receiver: Receiver
) -> None:
    admin, alice = people["service"], people["alice"]
    hook = (await create(admin, receiver.url))["webhook"]["id"]
    conversation = await alice.create_conversation()
    body = {"content": "hello [fake chunks=2]", "background": True}
    run = (await alice.call("POST", f"/v1/conversations/{conversation}/messages", body))["run_id"]

    (row,) = await delivered(admin, hook)
    assert (row["type"], row["run_id"]) == ("run.finished", run)
    data = json.loads(receiver.got[0].body)["data"]
    assert (data["run_id"], data["conversation_id"], data["user_id"]) == (run, conversation, "alice")
    messages = await alice.messages(conversation)
    assert data["message_id"] in {message["id"] for message in messages}
    for _ in range(4):
        await admin.call("POST", f"{WEBHOOKS}/{hook}/test")
    whole = (await admin.call("GET", f"{WEBHOOKS}/{hook}/deliveries"))["data"]
    assert [one["type"] for one in whole] == ["ping"] * 4 + ["run.finished"]
    found = await pages(admin, f"{WEBHOOKS}/{hook}/deliveries?", 2)
    assert [one["id"] for one in found] == [one["id"] for one in whole]
    bad = await refusal(admin.call("GET", f"{WEBHOOKS}/{hook}/deliveries?cursor=nonsense"))
    assert (bad.status, bad.body["field"]) == (400, "cursor")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"url": "https://10.0.0.1/"}, "url"),
        ({"url": "https://169.254.169.254/latest/meta-data"}, "url"),
        ({"url": "http://example.com/"}, "url"),
        ({"url": "ftp://example.com/"}, "url"),
        ({"url": ""}, "url"),
        ({"url": "https://a:b@example.com/"}, "url"),
        ({"url": 7}, "url"),
        ({"events": []}, "events"),
        ({"events": ["ping"]}, "events"),
        ({"events": "run.failed"}, "events"),
        ({"secret": "whsec_mine"}, "secret"),
    ],
)
async def test_bad_input_is_refused_and_changes_nothing(
    people: dict[str, Client], receiver: Receiver, change: dict[str, Any], field: str
) -> None:
    admin = people["service"]
    made = await create(admin, receiver.url)
    for call in (
        admin.call("POST", WEBHOOKS, {"url": receiver.url, "events": BOTH, **change}),
        admin.call("PATCH", f"{WEBHOOKS}/{made['webhook']['id']}", change),
    ):
        bad = await refusal(call)
        assert (bad.status, bad.body["code"]) == (400, "INVALID_OPTIONS"), bad
        assert str(bad.body["field"]).startswith(field), bad
    assert await admin.call("GET", WEBHOOKS) == {"data": [made["webhook"]]}


async def test_limits_hold_on_both_sides(people: dict[str, Client], receiver: Receiver) -> None:
    admin = people["service"]
    stem = receiver.url + "/"
    longest = stem + "a" * (URL_CHARS - len(stem))
    made = [await create(admin, longest) for _ in range(limits.WEBHOOKS)]
    assert made[0]["webhook"]["url"] == longest
    bad = await refusal(admin.call("PATCH", f"{WEBHOOKS}/{made[0]['webhook']['id']}", {"url": longest + "a"}))
    assert (bad.status, bad.body["field"]) == (400, "url")
    full = await refusal(create(admin, receiver.url))
    assert (full.status, f"at most {limits.WEBHOOKS}" in full.body["message"]) == (400, True)
    await admin.call("DELETE", f"{WEBHOOKS}/{made[1]['webhook']['id']}")
    await create(admin, receiver.url)


async def test_only_admins_of_the_project_reach_its_webhooks(people: dict[str, Client], receiver: Receiver) -> None:
    admin = people["service"]
    made = await create(admin, receiver.url)
    hook = made["webhook"]["id"]
    await admin.call("POST", f"{WEBHOOKS}/{hook}/test")
    (row,) = await delivered(admin, hook)
    routes: list[tuple[str, str, Any]] = [
        ("GET", WEBHOOKS, None),
        ("POST", WEBHOOKS, {"url": receiver.url, "events": BOTH}),
        ("PATCH", f"{WEBHOOKS}/{hook}", {"enabled": False}),
        ("DELETE", f"{WEBHOOKS}/{hook}", None),
        ("POST", f"{WEBHOOKS}/{hook}/secret", None),
        ("POST", f"{WEBHOOKS}/{hook}/test", None),
        ("GET", f"{WEBHOOKS}/{hook}/deliveries", None),
        ("POST", AGAIN.format(row["id"]), None),
    ]
    for method, path, body in routes:
        for who in ("alice", "supabase user"):
            bad = await refusal(people[who].call(method, path, body))
            assert (bad.status, bad.body["code"]) == (403, "FORBIDDEN"), (who, method, path)
        if hook not in path and row["id"] not in path:
            continue
        for one in (path, path.replace(hook, NOBODYS).replace(row["id"], NOBODYS)):  # as if there were none
            if method == "DELETE":
                assert await people["other"].call(method, one) is None
            else:
                bad = await refusal(people["other"].call(method, one, body))
                assert (bad.status, bad.body["code"]) == (404, "NOT_FOUND"), (method, one)
    assert await admin.call("GET", WEBHOOKS) == {"data": [made["webhook"]]}
    assert [one["id"] for one in await delivered(admin, hook)] == [row["id"]]
    assert len(receiver.got) == 1


async def test_a_secret_is_seen_once_and_in_no_log(
    cluster: Cluster, people: dict[str, Client], receiver: Receiver
) -> None:
    admin = people["service"]
    made = await create(admin, receiver.url)
    path = f"{WEBHOOKS}/{made['webhook']['id']}"
    await admin.call("POST", path + "/test")
    await delivered(admin, made["webhook"]["id"])
    shown = [await admin.call("GET", WEBHOOKS), await admin.call("PATCH", path, {"enabled": True})]
    secret = made["secret"].removeprefix("whsec_")
    assert secret not in json.dumps(shown)
    assert secret not in "".join(cluster.log(*of) for of in (("gateway",), ("conversation", 1), ("conversation", 2)))


async def test_answers_are_as_the_document_says(people: dict[str, Client], receiver: Receiver) -> None:
    admin = people["service"]
    document = await admin.call("GET", "/openapi.json")
    check = partial(check_shape, document)
    body = {"url": receiver.url, "events": BOTH}
    check("NewWebhook", body)
    made = await admin.call("POST", WEBHOOKS, body)
    check("CreatedWebhook", made)
    path = f"{WEBHOOKS}/{made['webhook']['id']}"
    check("Webhooks", await admin.call("GET", WEBHOOKS))
    check("WebhookChange", {"enabled": True})
    check("Webhook", await admin.call("PATCH", path, {"enabled": True}))
    check("WebhookSecret", await admin.call("POST", path + "/secret"))
    sent = await admin.call("POST", path + "/test")
    check("WebhookDelivery", sent)
    check("WebhookDeliveryPage", await admin.call("GET", path + "/deliveries"))
    check("WebhookDelivery", await admin.call("POST", AGAIN.format(sent["id"])))
    check("Problem", (await refusal(people["alice"].call("GET", WEBHOOKS))).body)
