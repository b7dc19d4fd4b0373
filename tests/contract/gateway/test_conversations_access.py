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
WALK = OF_A_CONVERSATION | OF_NOBODY


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
            found = await refusal(nobody.call(method, route.format(conversation_id=NOBODYS), body))
            assert (found.status, found.body["code"]) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize("who", ["bob", "alice of another project", "service of another project"])
@pytest.mark.parametrize(("method", "route"), OF_A_CONVERSATION)
async def test_others_see_nothing(
    alice: Client, cluster: Cluster, others: dict[str, dict[str, str]], who: str, method: str, route: str
) -> None:
    conversation = await alice.create_conversation(title="Mine")
    before = await alice.call("GET", path(conversation))
    async with Client(cluster.http, others[who]) as other:
        url = route.format(conversation_id=conversation)
        found = await refusal(other.call(method, url, OF_A_CONVERSATION[method, route]))
        assert (found.status, found.body["code"]) == (404, "THREAD_NOT_FOUND")
    assert await alice.call("GET", path(conversation)) == before
    assert await alice.messages(conversation) == []


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
