"""Every admin route over HTTP before real services: what is set holds, and only in its own project."""

import csv
import io
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest

from deploy.local.secret_file import ProjectKeys
from tests.contract.gateway.bookings import Bookings
from tests.contract.gateway.calls import check_shape, pages, refusal
from tests.support.cluster import CREDENTIAL, Cluster
from tests.support.http import Client

ADMIN = "/v1/admin"
ZERO = "0.000000000"
SECRET = "sk-a-key-that-must-not-be-seen"


@pytest.fixture
async def bookings(cluster: Cluster, project: ProjectKeys) -> AsyncIterator[Bookings]:
    """Books calls of the project."""
    async with Bookings(cluster.billing[0], CREDENTIAL, project.id) as found:
        yield found


# ---------------------------------------------------------------- prices


async def test_a_price_is_set_and_listed(admin: Client, people: dict[str, Client]) -> None:
    body = {
        "model": "acme/large:1",
        "input_usd": "0.15",
        "output_usd": "0.6",
        "cached_input_usd": "0.075",
        "request_fee_usd": "0.000000001",
        "tiers": [{"above_input_tokens": 200_000, "input_usd": "0.3", "output_usd": "1.2"}],
    }
    kept = await admin.call("PUT", f"{ADMIN}/prices", body)
    assert (kept["input_usd"], kept["cached_input_usd"], kept["cache_write_usd"]) == (
        "0.150000000", "0.075000000", "0.150000000",
    )  # fmt: skip
    assert (kept["scope"], kept["request_fee_usd"], kept["tiers"][0]["output_usd"]) == (
        "project", "0.000000001", "1.200000000",
    )  # fmt: skip
    own = [one for one in await pages(admin, f"{ADMIN}/prices?", 1) if one["scope"] == "project"]
    assert own == [kept]
    again = await admin.call("PUT", f"{ADMIN}/prices", {**body, "output_usd": "0.7", "tiers": []})
    assert (again["output_usd"], again["tiers"]) == ("0.700000000", [])
    theirs = await pages(people["other"], f"{ADMIN}/prices?", 50)
    assert {one["scope"] for one in theirs} == {"every_project"}  # the one the cluster sets for the fake model


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "model"),
        ({"model": "m" * 201}, "model"),
        ({"model": "a\nb"}, "model"),
        ({"tiers": [{"above_input_tokens": 0, "input_usd": "1", "output_usd": "1"}]}, "tiers"),
        ({"tiers": [{"above_input_tokens": 10**9 + 1, "input_usd": "1", "output_usd": "1"}]}, "tiers"),
        ({"tiers": [{"above_input_tokens": 9, "input_usd": "1", "output_usd": "1"}] * 2}, "tiers"),
        ({"tiers": [{"above_input_tokens": n, "input_usd": "1", "output_usd": "1"} for n in range(1, 12)]}, "tiers"),
        ({"input_usd": "100000.000000001"}, "input_usd"),
        ({"request_fee_usd": "1000.000000001"}, "request_fee_usd"),
    ],
)
async def test_a_price_out_of_bounds_is_refused(people: dict[str, Client], change: Any, field: str) -> None:
    body = {"model": "m", "input_usd": "1", "output_usd": "1", **change}
    found = await refusal(people["service"].call("PUT", f"{ADMIN}/prices", body))
    assert (found.status, found.body["code"], found.body["field"]) == (400, "INVALID_OPTIONS", field)


async def test_a_price_at_its_bounds_is_taken(people: dict[str, Client]) -> None:
    most = {"input_usd": "100000", "output_usd": "100000"}
    tiers = [{"above_input_tokens": 10**9 - 9 + n, **most} for n in range(10)]
    body = {"model": "m" * 200, **most, "request_fee_usd": "1000", "tiers": tiers}
    kept = await people["service"].call("PUT", f"{ADMIN}/prices", body)
    assert (len(kept["tiers"]), kept["tiers"][9]["above_input_tokens"]) == (10, 10**9)
    free = await people["service"].call("PUT", f"{ADMIN}/prices", {"model": "x", "input_usd": "0", "output_usd": "0"})
    assert (free["input_usd"], free["request_fee_usd"]) == (ZERO, ZERO)


# ---------------------------------------------------------------- limits and terms


async def test_a_quota_is_set_read_and_removed(admin: Client, people: dict[str, Client], bookings: Bookings) -> None:
    path = f"{ADMIN}/quotas/alice"
    assert (await refusal(admin.call("GET", path))).body["kind"] == "quota"
    quota = {"period": "month", "limit_usd": "5.000000000", "spent_usd": ZERO, "held_usd": ZERO}
    assert await admin.call("PUT", path, {"period": "month", "limit_usd": "5"}) == quota
    cost = await bookings.book("alice", 10, 10)
    held = await bookings.hold("alice", 1, 1)
    used = {**quota, "spent_usd": cost, "held_usd": held}
    assert await admin.call("GET", path) == used
    own = await people["alice"].call("GET", "/v1/usage")
    assert (own["user_id"], own["quota"]) == ("alice", used)
    assert [one["limit_usd"] for one in own["periods"]] == [None, "5.000000000", None]
    assert (await refusal(people["other"].call("GET", path))).body["kind"] == "quota"
    assert await people["other"].call("DELETE", path) is None
    assert await admin.call("GET", path) == used
    for _ in range(2):
        assert await admin.call("DELETE", path) is None
    assert (await refusal(admin.call("GET", path))).status == 404
    assert (await people["alice"].call("GET", "/v1/usage"))["quota"] is None


async def test_a_quota_for_everybody_gives_way_to_ones_own(people: dict[str, Client]) -> None:
    admin, path = people["service"], f"{ADMIN}/quotas"
    assert (await refusal(admin.call("GET", path))).body["kind"] == "quota"
    everybodys = {"period": "day", "limit_usd": "1.000000000", "spent_usd": ZERO, "held_usd": ZERO}
    assert await admin.call("PUT", path, {"period": "day", "limit_usd": "1.00"}) == everybodys
    assert await admin.call("GET", path) == everybodys
    assert (await people["alice"].call("GET", "/v1/usage"))["quota"] == everybodys
    await admin.call("PUT", f"{path}/alice", {"period": "total", "limit_usd": "0"})
    assert (await people["alice"].call("GET", "/v1/usage"))["quota"]["period"] == "total"
    assert (await people["supabase user"].call("GET", "/v1/usage"))["quota"] == everybodys
    assert await admin.call("DELETE", f"{path}/alice") is None
    assert (await people["alice"].call("GET", "/v1/usage"))["quota"] == everybodys
    assert await admin.call("DELETE", path) is None
    assert (await people["alice"].call("GET", "/v1/usage"))["quota"] is None


async def test_a_user_with_a_slash_has_a_quota(people: dict[str, Client]) -> None:
    path = f"{ADMIN}/quotas/https:%2F%2Fissuer%2F7"
    await people["service"].call("PUT", path, {"period": "day", "limit_usd": "0.5"})
    assert (await people["service"].call("GET", path))["limit_usd"] == "0.500000000"
    assert (await refusal(people["service"].call("GET", f"{ADMIN}/quotas/7"))).status == 404
    bad = await refusal(people["service"].call("GET", f"{ADMIN}/quotas/{'x' * 256}"))
    assert (bad.status, bad.body["field"]) == (400, "user_id")


async def test_caps_are_set_listed_and_removed(admin: Client, people: dict[str, Client], bookings: Bookings) -> None:
    assert await admin.call("GET", f"{ADMIN}/caps") == {"data": []}
    cost = await bookings.book("alice", 5, 5)
    for period, limit in (("day", "1"), ("total", "9223372036.854775807")):
        await admin.call("PUT", f"{ADMIN}/caps/{period}", {"limit_usd": limit})
    day = {"period": "day", "limit_usd": "1.000000000", "spent_usd": cost, "held_usd": ZERO}
    total = {**day, "period": "total", "limit_usd": "9223372036.854775807"}
    assert await admin.call("GET", f"{ADMIN}/caps") == {"data": [day, total]}
    assert await people["other"].call("GET", f"{ADMIN}/caps") == {"data": []}
    for _ in range(2):
        assert await admin.call("DELETE", f"{ADMIN}/caps/day") is None
    assert await admin.call("GET", f"{ADMIN}/caps") == {"data": [total]}


async def test_terms_are_changed_one_by_one(admin: Client, people: dict[str, Client]) -> None:
    path = f"{ADMIN}/terms"
    before = await admin.call("GET", path)
    changed = await admin.call("PATCH", path, {"credits_per_usd": 250})
    assert changed == {"credits_per_usd": 250, "runs_per_minute": before["runs_per_minute"]}
    assert await admin.call("PATCH", path, {"runs_per_minute": 7}) == {"credits_per_usd": 250, "runs_per_minute": 7}
    assert await admin.call("PATCH", path, {}) == await admin.call("GET", path)
    assert await people["other"].call("GET", path) == before
    for body in (
        {"credits_per_usd": 0, "runs_per_minute": 1},
        {"credits_per_usd": 1_000_000_000, "runs_per_minute": 1_000_000},
    ):
        assert await admin.call("PATCH", path, body) == body
    for name, value in (
        ("credits_per_usd", -1),
        ("credits_per_usd", 1_000_000_001),
        ("runs_per_minute", 0),
        ("runs_per_minute", 1_000_001),
    ):
        bad = await refusal(admin.call("PATCH", path, {name: value}))
        assert (bad.status, bad.body["code"], bad.body["field"]) == (400, "INVALID_OPTIONS", name)


# ---------------------------------------------------------------- usage and ledger


async def test_usage_is_a_users_or_the_projects(people: dict[str, Client], bookings: Bookings) -> None:
    await bookings.book("alice", 1, 1)
    await bookings.book("bob", 2, 2)
    admin = people["admin"]

    async def spent(query: str) -> set[str]:
        return {one["spent_usd"] for one in (await admin.call("GET", f"{ADMIN}/usage{query}"))["periods"]}

    one, two, both = "0.000002000", "0.000004000", "0.000006000"
    assert await spent("?user_id=alice") == {one}
    assert await spent("?user_id=bob") == {two}
    assert await spent("?user_id=nobody") == {ZERO}
    assert await spent("") == {both}
    own = await people["alice"].call("GET", "/v1/usage")
    assert [period["period"] for period in own["periods"]] == ["day", "month", "total"]
    assert {period["spent_usd"] for period in own["periods"]} == {one}
    elsewhere = await people["other"].call("GET", f"{ADMIN}/usage?user_id=alice")
    assert {period["spent_usd"] for period in elsewhere["periods"]} == {ZERO}


async def test_the_ledger_is_read_page_by_page(people: dict[str, Client], bookings: Bookings) -> None:
    for number in range(1, 6):
        await bookings.book("alice" if number % 2 else "bob", number, 0)
    admin = people["admin"]
    whole = (await admin.call("GET", f"{ADMIN}/ledger"))["data"]
    assert [one["input_tokens"] for one in whole] == [5, 4, 3, 2, 1]
    assert await pages(admin, f"{ADMIN}/ledger?", 2) == whole
    assert await pages(admin, f"{ADMIN}/ledger?user_id=bob&", 1) == [one for one in whole if one["user_id"] == "bob"]
    newest = bookings.calls[-1]
    assert whole[0] == {
        "api_call_id": newest.api_call_id, "created_at": whole[0]["created_at"], "user_id": "alice",
        "conversation_id": newest.thread_id, "message_id": f"msg_{newest.message_id}", "run_id": newest.run_id,
        "model": newest.model, "input_tokens": 5, "cached_tokens": 0, "cache_write_tokens": 0, "output_tokens": 0,
        "thinking_tokens": 0, "usage_estimated": False, "cost_usd": "0.000005000", "above_hold": False, "late": False,
    }  # fmt: skip
    assert (await people["other"].call("GET", f"{ADMIN}/ledger"))["data"] == []
    for route in ("ledger", "ledger?format=csv", "usage"):
        path = f"{ADMIN}/{route}{'&' if '?' in route else '?'}user_id="
        empty = await refusal(admin.call("GET", path))
        assert (empty.status, empty.body["field"]) == (400, "user_id"), path
    bad = await refusal(admin.call("GET", f"{ADMIN}/ledger?cursor=nonsense"))
    assert (bad.status, bad.body["field"]) == (400, "cursor")


async def test_the_whole_ledger_is_a_file(cluster: Cluster, people: dict[str, Client], bookings: Bookings) -> None:
    users = ["=1+1", "@alice", 'q"u,o', "ünïcode", *["alice"] * 201]
    for user in users:
        await bookings.book(user, 1, 0)
    text = await people["service"].text(f"{ADMIN}/ledger?format=csv")
    header, *lines = csv.reader(io.StringIO(text, newline=""))
    whole = await pages(people["service"], f"{ADMIN}/ledger?", 200)
    assert header == list(whole[0])
    assert [line[0] for line in lines] == [one["api_call_id"] for one in whole]
    assert len(lines) == len(users)
    assert [line[2] for line in lines[-4:]] == ["ünïcode", 'q"u,o', "'@alice", "'=1+1"]
    assert {line[header.index("cost_usd")] for line in lines} == {"0.000001000"}
    own = await people["service"].text(f"{ADMIN}/ledger?format=csv&user_id=%3D1%2B1")
    assert len(own.splitlines()) == 2


# ---------------------------------------------------------------- provider keys


async def test_a_provider_key_is_kept_and_never_shown(
    cluster: Cluster, admin: Client, people: dict[str, Client]
) -> None:
    path = f"{ADMIN}/provider-keys"
    assert await admin.call("GET", path) == {"data": []}
    kept = await admin.call("PUT", f"{path}/openai", {"api_key": SECRET})
    assert set(kept) == {"provider", "updated_at"}
    assert await admin.call("GET", path) == {"data": [kept]}
    assert await people["other"].call("GET", path) == {"data": []}
    for body in ({"api_key": SECRET + "\n"}, {"api_key": SECRET * 200}, {"api_key": SECRET, "x": 1}):
        bad = await refusal(admin.call("PUT", f"{path}/openai", body))
        assert (bad.status, SECRET in str(bad.body)) == (400, False)
    assert (await refusal(admin.call("PUT", f"{path}/nobody", {"api_key": SECRET}))).body["field"] == "provider"
    for _ in range(2):
        assert await admin.call("DELETE", f"{path}/openai") is None
    assert await admin.call("GET", path) == {"data": []}
    logs = "".join(cluster.log(service) for service in ("gateway", "conversation", "billing"))
    assert SECRET not in logs + cluster.log("conversation", 2)


# ---------------------------------------------------------------- the document


async def test_answers_are_as_the_document_says(people: dict[str, Client], bookings: Bookings) -> None:
    await bookings.book("alice", 1, 1)
    admin = people["service"]
    document = await admin.call("GET", "/openapi.json")
    check = partial(check_shape, document)
    price = {"model": "m", "input_usd": "1", "output_usd": "1"}
    check("NewPrice", price)
    check("Price", await admin.call("PUT", f"{ADMIN}/prices", price))
    check("PricePage", await admin.call("GET", f"{ADMIN}/prices"))
    check("SpendLimit", await admin.call("PUT", f"{ADMIN}/quotas/alice", {"period": "day", "limit_usd": "1.5"}))
    check("SpendLimit", await admin.call("PUT", f"{ADMIN}/caps/day", {"limit_usd": "1"}))
    check("Caps", await admin.call("GET", f"{ADMIN}/caps"))
    check("Terms", await admin.call("GET", f"{ADMIN}/terms"))
    check("Usage", await admin.call("GET", f"{ADMIN}/usage"))
    check("OwnUsage", await people["alice"].call("GET", "/v1/usage"))
    check("LedgerPage", await admin.call("GET", f"{ADMIN}/ledger"))
    check("ProviderKey", await admin.call("PUT", f"{ADMIN}/provider-keys/openai", {"api_key": SECRET}))
    check("ProviderKeys", await admin.call("GET", f"{ADMIN}/provider-keys"))
    check("Problem", (await refusal(people["alice"].call("GET", f"{ADMIN}/terms"))).body)
    kinds = document["paths"][f"{ADMIN}/ledger"]["get"]["responses"]["200"]["content"]
    assert set(kinds) == {"application/json", "text/csv"}


async def test_a_killed_billing_service_takes_only_money_away(
    cluster: Cluster, people: dict[str, Client], alice: Client
) -> None:
    cluster.kill("billing")
    try:
        async with aiohttp.ClientSession() as session:
            for path, status in (("/readyz", 200), ("/healthz", 200)):
                async with session.get(cluster.http[0] + path) as response:
                    assert response.status == status
        found = await refusal(people["service"].call("GET", f"{ADMIN}/caps"))
        assert (found.status, found.body["code"], found.body["retry_after"]) == (503, "UNAVAILABLE", 1)
        assert (await refusal(people["alice"].call("GET", "/v1/usage"))).status == 503
        assert (await alice.call("GET", "/v1/conversations"))["data"] is not None
        assert (await people["service"].call("GET", f"{ADMIN}/provider-keys")) == {"data": []}
    finally:
        cluster.restart("billing")
        await cluster.ready("billing")
    assert await people["service"].insist(lambda: people["service"].call("GET", f"{ADMIN}/caps")) == {"data": []}
