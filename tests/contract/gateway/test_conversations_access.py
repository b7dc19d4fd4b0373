"""Who may do what: every operation of the route table, walked with the wrong caller."""

from typing import Any

import pytest

from deploy.local.projects import user_token
from services.gateway.app import OPERATIONS
from services.gateway.routes.operations import Operation
from tests.contract.gateway.calls import CONVERSATIONS, NOBODYS, ONE, path, refusal
from tests.support.cluster import Cluster
from tests.support.http import Client

# Every operation that needs a caller, with a body it takes. A new one must be put here.
OF_A_CONVERSATION: dict[tuple[str, str], Any] = {
    ("GET", ONE): None,
    ("PATCH", ONE): {"title": "Theirs"},
    ("DELETE", ONE): None,
    ("GET", ONE + "/messages"): None,
    ("POST", ONE + "/messages"): {"content": "Hello"},
    ("GET", ONE + "/traces"): None,
    ("GET", ONE + "/stream"): None,
    ("POST", ONE + "/cancel"): {},
}
OF_NOBODY: dict[tuple[str, str], Any] = {
    ("GET", CONVERSATIONS): None,
    ("POST", CONVERSATIONS): {},
    ("POST", "/v1/stream-tickets"): None,
}
OF_USERS: dict[tuple[str, str], Any] = {("GET", "/v1/usage"): None}
ADMIN = "/v1/admin"
PRICE = {"model": "stolen", "input_usd": "1", "output_usd": "1"}
QUOTA = {"period": "day", "limit_usd": "1"}
OF_ADMINS: dict[tuple[str, str], Any] = {
    ("GET", ADMIN + "/prices"): None,
    ("PUT", ADMIN + "/prices"): PRICE,
    ("GET", ADMIN + "/quotas"): None,
    ("PUT", ADMIN + "/quotas"): QUOTA,
    ("DELETE", ADMIN + "/quotas"): None,
    ("GET", ADMIN + "/quotas/{user_id}"): None,
    ("PUT", ADMIN + "/quotas/{user_id}"): QUOTA,
    ("DELETE", ADMIN + "/quotas/{user_id}"): None,
    ("GET", ADMIN + "/caps"): None,
    ("PUT", ADMIN + "/caps/{period}"): {"limit_usd": "1"},
    ("DELETE", ADMIN + "/caps/{period}"): None,
    ("GET", ADMIN + "/terms"): None,
    ("PATCH", ADMIN + "/terms"): {"credits_per_usd": 1},
    ("GET", ADMIN + "/usage"): None,
    ("GET", ADMIN + "/ledger"): None,
    ("GET", ADMIN + "/provider-keys"): None,
    ("PUT", ADMIN + "/provider-keys/{provider}"): {"api_key": "a-key-of-somebody"},
    ("DELETE", ADMIN + "/provider-keys/{provider}"): None,
    ("GET", ADMIN + "/identity"): None,
    ("PUT", ADMIN + "/identity"): {"jwks_url": "https://mallory.example/jwks.json"},
    ("DELETE", ADMIN + "/identity"): None,
    ("GET", ADMIN + "/webhooks"): None,
    ("POST", ADMIN + "/webhooks"): {"url": "https://mallory.example/", "events": ["run.finished"]},
    ("PATCH", ADMIN + "/webhooks/{webhook_id}"): {"enabled": False},
    ("DELETE", ADMIN + "/webhooks/{webhook_id}"): None,
    ("POST", ADMIN + "/webhooks/{webhook_id}/secret"): None,
    ("POST", ADMIN + "/webhooks/{webhook_id}/test"): None,
    ("GET", ADMIN + "/webhooks/{webhook_id}/deliveries"): None,
    ("POST", ADMIN + "/webhook-deliveries/{delivery_id}/redeliver"): None,
}
WALK = OF_A_CONVERSATION | OF_NOBODY | OF_USERS | OF_ADMINS


def filled(route: str, conversation: str = NOBODYS) -> str:
    """A route with something in each of its places."""
    return route.format(
        conversation_id=conversation,
        user_id="alice",
        period="day",
        provider="openai",
        webhook_id=NOBODYS,
        delivery_id=NOBODYS,
    )


@pytest.fixture(scope="module")
def others(cluster: Cluster) -> dict[str, dict[str, str]]:
    """What those send who must not see alice's things."""
    project = cluster.create_project("other")
    return {
        "bob": cluster.headers("bob"),
        "alice of another project": cluster.headers("alice", project),
        "service of another project": {"apikey": project.service_key},
    }


def test_every_operation_is_walked() -> None:
    assert set(WALK) == {(one.method, one.path) for one in OPERATIONS if isinstance(one, Operation)}


@pytest.mark.parametrize(("method", "route"), WALK)
async def test_nobody_gets_in_without_a_proof(cluster: Cluster, method: str, route: str) -> None:
    anon, body = cluster.project.anon_key, WALK[method, route]
    forged = user_token("not-the-secret-of-the-project-at-all", cluster.project.slug, "alice")
    for headers in ({}, {"apikey": anon}, {"apikey": anon, "Authorization": f"Bearer {forged}"}):
        async with Client(cluster.http, headers) as nobody:
            found = await refusal(nobody.call(method, filled(route), body))
            assert (found.status, found.body["code"]) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize("who", ["bob", "alice of another project", "service of another project"])
@pytest.mark.parametrize(("method", "route"), OF_A_CONVERSATION)
async def test_others_see_nothing(
    alice: Client, cluster: Cluster, others: dict[str, dict[str, str]], who: str, method: str, route: str
) -> None:
    conversation = await alice.create_conversation(title="Mine")
    before = await alice.call("GET", path(conversation))
    async with Client(cluster.http, others[who]) as other:
        url = filled(route, conversation)
        found = await refusal(other.call(method, url, OF_A_CONVERSATION[method, route]))
        assert (found.status, found.body["code"]) == (404, "THREAD_NOT_FOUND")
    assert await alice.call("GET", path(conversation)) == before
    assert await alice.messages(conversation) == []


def test_what_is_under_admin_is_for_admins() -> None:
    for one in OPERATIONS:
        if isinstance(one, Operation):
            assert one.is_for_admins == one.path.startswith(ADMIN + "/") == ((one.method, one.path) in OF_ADMINS)


@pytest.mark.parametrize(("method", "route"), OF_ADMINS)
async def test_a_user_is_no_admin(alice: Client, method: str, route: str) -> None:
    found = await refusal(alice.call(method, filled(route), OF_ADMINS[method, route]))
    assert (found.status, found.body["code"]) == (403, "FORBIDDEN")
    assert "service key" in found.body["message"]


@pytest.mark.parametrize("who", ["bob", "alice of another project"])
async def test_a_run_is_not_found_through_another_conversation(
    alice: Client, cluster: Cluster, others: dict[str, dict[str, str]], who: str
) -> None:
    whole = await alice.ask(await alice.create_conversation(), "Hello")
    run_id = whole.frames[-1].data["run_id"]
    async with Client(cluster.http, others[who]) as other:
        own = await other.create_conversation()
        for call in (
            other.call("GET", path(own, f"/stream?after={run_id}:1.1")),
            other.call("POST", path(own, "/cancel"), {"run_id": run_id}),
        ):
            found = await refusal(call)
            assert (found.status, found.body["code"], found.body["kind"]) == (404, "NOT_FOUND", "run")


async def test_the_service_role_creates_for_a_user(users: dict[str, Client]) -> None:
    made = await users["service"].call("POST", CONVERSATIONS, {"user_id": "alice"})
    assert (await users["alice"].call("GET", path(made["id"])))["user_id"] == "alice"
    assert (await users["service"].call("GET", path(made["id"])))["id"] == made["id"]
    assert (await refusal(users["service"].call("POST", CONVERSATIONS, {}))).body["field"] == "user_id"
    assert (await refusal(users["alice"].call("POST", CONVERSATIONS, {"user_id": "bob"}))).body["field"] == "user_id"
