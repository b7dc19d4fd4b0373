"""The money routes before a billing service whose answers the test writes: callers, bodies, names, failover."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kit.callers import Role
from kit.errors import ServiceError, invalid, unavailable
from services.gateway.limits import BODY_BYTES
from tests.unit.gateway.billing_replica import BillingReplica
from tests.unit.gateway.replica import ANON, PROJECT_ID, SERVICE, Replica
from tests.unit.gateway.running import ALICE, NOWHERE, Gateway, Reply, running_gateway, token
from threadloom.billing.v1 import usage_pb2

ADMIN = {"apikey": SERVICE}
PRICES, QUOTA, CAP = "/v1/admin/prices", "/v1/admin/quotas/bob", "/v1/admin/caps/day"
PRICE = {"model": "m", "input_usd": "0.15", "output_usd": "0.6"}


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with Replica() as found:
        yield found


@pytest.fixture
async def billing() -> AsyncIterator[BillingReplica]:
    async with BillingReplica([]) as found:
        yield found


@pytest.fixture
async def gateway(replica: Replica, billing: BillingReplica) -> AsyncIterator[Gateway]:
    async with running_gateway(replica.address, billing=(billing.address,)) as found:
        yield found


def problem(reply: Reply, status: int, code: str) -> Any:
    assert (reply.status, reply.json["code"]) == (status, code)
    assert reply.json["message"].endswith(".")
    return reply.json


def bearer(**claims: Any) -> dict[str, str]:
    return {"apikey": ANON, "authorization": f"Bearer {token(**claims)}"}


@pytest.mark.parametrize("headers", [ADMIN, {"authorization": f"Bearer {SERVICE}"}, bearer(role="admin")])
async def test_an_admin_calls_as_the_service_role(
    gateway: Gateway, billing: BillingReplica, headers: dict[str, str]
) -> None:
    assert (await gateway.ask("GET", PRICES, headers=headers)).status == 200
    caller = billing.callers[-1]
    assert (caller.role, str(caller.project), caller.user) == (Role.SERVICE, PROJECT_ID, "")


@pytest.mark.parametrize(
    "headers",
    [
        ALICE,
        {**ALICE, "apikey": SERVICE},
        bearer(role="authenticated"),
        bearer(role="Admin"),
        bearer(role="admin "),
        bearer(role="service_role"),
        bearer(role=["admin"]),
        bearer(role={"admin": True}),
        bearer(role=True),
        bearer(role=None),
        bearer(is_admin=True),
        bearer(app_metadata={"role": "admin"}),
    ],
)
async def test_an_ordinary_user_is_told_what_to_send(
    gateway: Gateway, billing: BillingReplica, headers: dict[str, str]
) -> None:
    for method, path, body in (("GET", PRICES, None), ("PUT", PRICES, PRICE), ("DELETE", QUOTA, None)):
        told = problem(await gateway.ask(method, path, body, headers=headers), 403, "FORBIDDEN")["message"]
        assert "service key" in told
        assert "`role`" in told
    assert not billing.requests


async def test_who_may_not_ask_is_not_told_what_is_wrong_with_the_question(gateway: Gateway) -> None:
    problem(await gateway.ask("PUT", PRICES, b"{", headers=ALICE), 403, "FORBIDDEN")
    problem(await gateway.ask("GET", PRICES + "?nonsense=1", headers={}), 401, "UNAUTHENTICATED")
    problem(await gateway.ask("GET", PRICES, headers={"apikey": ANON}), 401, "UNAUTHENTICATED")
    forged = {"apikey": ANON, "authorization": f"Bearer {token(secret='x' * 40, role='admin')}"}
    problem(await gateway.ask("GET", PRICES, headers=forged), 401, "UNAUTHENTICATED")


async def test_an_admin_is_an_ordinary_user_elsewhere(
    gateway: Gateway, replica: Replica, billing: BillingReplica
) -> None:
    admin = bearer(role="admin")
    assert (await gateway.ask("GET", "/v1/conversations", headers=admin)).status == 200
    assert (replica.callers[-1].role, replica.callers[-1].user) == (Role.USER, "alice")
    usage = await gateway.ask("GET", "/v1/usage", headers=admin)
    assert (usage.status, usage.json["user_id"], usage.json["quota"]) == (200, "alice", None)
    assert {(caller.role, caller.user) for caller in billing.callers} == {(Role.USER, "alice")}


async def test_a_service_key_has_no_usage_of_its_own(gateway: Gateway, billing: BillingReplica) -> None:
    assert (
        "/v1/admin/usage" in problem(await gateway.ask("GET", "/v1/usage", headers=ADMIN), 403, "FORBIDDEN")["message"]
    )
    assert not billing.requests


async def test_a_ticket_opens_nothing_here(gateway: Gateway) -> None:
    assert (await gateway.ask("POST", "/v1/stream-tickets", headers=bearer(role="admin"))).status == 201
    problem(await gateway.ask("GET", PRICES + "?ticket=a-ticket", headers={}), 401, "UNAUTHENTICATED")


async def test_a_price_goes_through_to_the_last_digit(gateway: Gateway, billing: BillingReplica) -> None:
    body = {
        "model": "m", "input_usd": "0.15", "output_usd": "100000", "cached_input_usd": "0.000000001",
        "cache_write_usd": None, "request_fee_usd": "1000.000000000",
        "tiers": [{"above_input_tokens": 200_000, "input_usd": "0", "output_usd": "2", "cache_write_usd": "3.5"}],
    }  # fmt: skip
    reply = await gateway.ask("PUT", PRICES, body, headers=ADMIN)
    assert reply.json == {
        "model": "m", "scope": "project", "input_usd": "0.150000000", "output_usd": "100000.000000000",
        "cached_input_usd": "0.000000001", "cache_write_usd": "0.150000000", "request_fee_usd": "1000.000000000",
        "tiers": [
            {
                "above_input_tokens": 200_000, "input_usd": "0.000000000", "output_usd": "2.000000000",
                "cached_input_usd": "0.000000000", "cache_write_usd": "3.500000000",
            }
        ],
        "updated_at": "2026-03-01T10:00:00.000005Z",
    }  # fmt: skip
    sent = billing.requests[-1].rates
    assert (sent.base.input.nano_usd, sent.base.HasField("cache_write")) == (150_000_000, False)
    assert (sent.request_fee.nano_usd, sent.tiers[0].prices.cache_write.nano_usd) == (10**12, 3_500_000_000)


TIER = {"above_input_tokens": 1, "input_usd": "1", "output_usd": "1"}
BAD_PRICES = [
    ({"input_usd": "0.0000000001"}, "input_usd", "plain digits"),
    ({"input_usd": "-1"}, "input_usd", "plain digits"),
    ({"input_usd": ""}, "input_usd", "plain digits"),
    ({"input_usd": "1e3"}, "input_usd", "plain digits"),
    ({"input_usd": "100000.000000001"}, "input_usd", "at most 100000 USD"),
    ({"input_usd": "9" * 5000}, "input_usd", "more than an amount can hold"),
    ({"input_usd": 0.15}, "input_usd", "must be a string"),
    ({"input_usd": 1}, "input_usd", "must be a string"),
    ({"input_usd": 10**30}, "input_usd", "must be a string"),
    ({"input_usd": None}, "input_usd", "Expected `str`"),
    ({"input_usd": ["1"]}, "input_usd", "Expected `str`"),
    ({"output_usd": "x"}, "output_usd", "plain digits"),
    ({"cached_input_usd": 0.1}, "cached_input_usd", "must be a string"),
    ({"cached_input_usd": "100001"}, "cached_input_usd", "at most 100000 USD"),
    ({"cache_write_usd": "x"}, "cache_write_usd", "plain digits"),
    ({"request_fee_usd": "1000.000000001"}, "request_fee_usd", "at most 1000 USD"),
    ({"input": "1"}, "input", "not an option"),
    ({"tiers": {}}, "tiers", "Expected `array`"),
    ({"tiers": [TIER, {**TIER, "input_usd": 5}]}, "tiers[1].input_usd", "must be a string"),
    ({"tiers": [TIER, {**TIER, "output_usd": "x"}]}, "tiers[1].output_usd", "plain digits"),
    ({"tiers": [{**TIER, "request_fee_usd": "1"}]}, "tiers[0].request_fee_usd", "not an option"),
    ({"tiers": [{"input_usd": "1", "output_usd": "1"}]}, "tiers[0].above_input_tokens", "missing"),
    ({"tiers": [{**TIER, "above_input_tokens": 2**63}]}, "tiers[0].above_input_tokens", ""),
    ({"tiers": [{**TIER, "above_input_tokens": 1.5}]}, "tiers[0].above_input_tokens", "Expected `int`"),
]


@pytest.mark.parametrize(("change", "field", "words"), BAD_PRICES)
async def test_a_bad_price_names_the_field(
    gateway: Gateway, billing: BillingReplica, change: dict[str, Any], field: str, words: str
) -> None:
    told = problem(await gateway.ask("PUT", PRICES, {**PRICE, **change}, headers=ADMIN), 400, "INVALID_OPTIONS")
    assert told["field"] == field
    assert words in told["message"]
    assert not billing.requests


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{", b'"m"', b"\xff", b"1" * 5000])
@pytest.mark.parametrize("path", [PRICES, QUOTA, CAP])
async def test_what_is_no_object_is_refused(gateway: Gateway, billing: BillingReplica, path: str, raw: bytes) -> None:
    assert problem(await gateway.ask("PUT", path, raw, headers=ADMIN), 400, "INVALID_OPTIONS")["field"] == "body"
    assert not billing.requests


async def test_a_huge_body_is_refused(gateway: Gateway) -> None:
    raw = json.dumps({**PRICE, "model": "m" * BODY_BYTES}).encode()
    problem(await gateway.ask("PUT", PRICES, raw, headers=ADMIN), 413, "CONTENT_TOO_LARGE")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (QUOTA, {"period": "day"}, "limit_usd"),
        (QUOTA, {"limit_usd": "5"}, "period"),
        (QUOTA, {"period": "week", "limit_usd": "5"}, "period"),
        (QUOTA, {"period": 1, "limit_usd": "5"}, "period"),
        (QUOTA, {"period": "day", "limit_usd": 5}, "limit_usd"),
        (QUOTA, {"period": "day", "limit_usd": 5.5}, "limit_usd"),
        (QUOTA, {"period": "day", "limit_usd": "-5"}, "limit_usd"),
        (QUOTA, {"period": "day", "limit_usd": "9223372036.854775808"}, "limit_usd"),
        (QUOTA, {"period": "day", "limit_usd": "5", "user_id": "eve"}, "user_id"),
        (CAP, {}, "limit_usd"),
        (CAP, {"limit_usd": None}, "limit_usd"),
        (CAP, {"limit_usd": "5.", "period": "day"}, "period"),
        ("/v1/admin/caps/week", {"limit_usd": "5"}, "period"),
        ("/v1/admin/caps/DAY", {"limit_usd": "5"}, "period"),
    ],
)
async def test_a_bad_limit_names_the_field(
    gateway: Gateway, billing: BillingReplica, path: str, body: Any, field: str
) -> None:
    assert problem(await gateway.ask("PUT", path, body, headers=ADMIN), 400, "INVALID_OPTIONS")["field"] == field
    assert not billing.requests


async def test_the_largest_limit_and_none_at_all(gateway: Gateway, billing: BillingReplica) -> None:
    for text, shown in (("9223372036.854775807",) * 2, ("0", "0.000000000")):
        reply = await gateway.ask("PUT", QUOTA, {"period": "month", "limit_usd": text}, headers=ADMIN)
        assert reply.json == {
            "period": "month", "limit_usd": shown, "spent_usd": "0.000000000", "held_usd": "0.000000000"
        }  # fmt: skip
    assert (await gateway.ask("DELETE", QUOTA, headers=ADMIN)).status == 204
    assert not billing.requests[-1].HasField("limit")
    assert (await gateway.ask("DELETE", CAP, headers=ADMIN)).status == 204
    assert (billing.requests[-1].period, billing.requests[-1].HasField("limit")) == (usage_pb2.PERIOD_DAY, False)


@pytest.mark.parametrize(
    ("path", "user"),
    [
        ("/v1/admin/quotas", ""),
        ("/v1/admin/quotas/bob", "bob"),
        ("/v1/admin/quotas/auth0%7C7", "auth0|7"),
        ("/v1/admin/quotas/a%2Fb", "a/b"),
        ("/v1/admin/quotas/https:%2F%2Fissuer%2Fbob", "https://issuer/bob"),
        ("/v1/admin/quotas/%2E%2E", ".."),
        ("/v1/admin/quotas/b%C3%B8b", "bøb"),
        ("/v1/admin/quotas/%20", " "),
    ],
)
async def test_a_user_is_named_by_the_path(gateway: Gateway, billing: BillingReplica, path: str, user: str) -> None:
    assert problem(await gateway.ask("GET", path, headers=ADMIN), 404, "NOT_FOUND")["kind"] == "quota"
    assert billing.requests[-1].user_id == user


@pytest.mark.parametrize("path", ["/v1/admin/quotas/", "/v1/admin/caps/", "/v1/admin/quotas/bob%0A", "/v1/admin"])
async def test_no_user_is_not_every_user(gateway: Gateway, billing: BillingReplica, path: str) -> None:
    for method in ("GET", "DELETE"):
        assert problem(await gateway.ask(method, path, headers=ADMIN), 404, "NOT_FOUND")["kind"] == "path"
    assert not billing.requests


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ({}, (None, None)),
        ({"credits_per_usd": 0}, (0, None)),
        ({"runs_per_minute": 2**31 - 1}, (None, 2**31 - 1)),
        ({"credits_per_usd": 2**63 - 1, "runs_per_minute": -(2**31)}, (2**63 - 1, -(2**31))),
    ],
)
async def test_terms_that_are_given_are_sent(
    gateway: Gateway, billing: BillingReplica, body: Any, sent: tuple[int | None, int | None]
) -> None:
    assert (await gateway.ask("PATCH", "/v1/admin/terms", body, headers=ADMIN)).status == 200
    terms = billing.requests[-1].terms
    found = [getattr(terms, name) if terms.HasField(name) else None for name in ("credits_per_usd", "runs_per_minute")]
    assert tuple(found) == sent


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"credits_per_usd": None}, "credits_per_usd"),
        ({"credits_per_usd": "1"}, "credits_per_usd"),
        ({"credits_per_usd": 1.5}, "credits_per_usd"),
        ({"credits_per_usd": 2**63}, "credits_per_usd"),
        ({"runs_per_minute": 2**31}, "runs_per_minute"),
        ({"runs_per_minute": True}, "runs_per_minute"),
        ({"runs": 1}, "runs"),
    ],
)
async def test_bad_terms_name_the_field(gateway: Gateway, billing: BillingReplica, body: Any, field: str) -> None:
    reply = await gateway.ask("PATCH", "/v1/admin/terms", body, headers=ADMIN)
    assert problem(reply, 400, "INVALID_OPTIONS")["field"] == field
    assert not billing.requests


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ("rates", "tiers"),
        ("model", "model"),
        ("page_token", "cursor"),
        ("terms.credits_per_usd", "credits_per_usd"),
        ("user_id", "user_id"),
    ],
)
async def test_what_billing_refuses_has_the_clients_name(
    gateway: Gateway, billing: BillingReplica, told: str, field: str
) -> None:
    billing.failure = invalid(told, "A sentence.")
    reply = await gateway.ask("PUT", PRICES, PRICE, headers=ADMIN)
    assert problem(reply, 400, "INVALID_OPTIONS")["field"] == field


async def test_without_billing_only_money_is_away(replica: Replica) -> None:
    async with running_gateway(replica.address, billing=(NOWHERE,)) as gateway:
        for path in (PRICES, QUOTA, "/v1/admin/ledger?format=csv", "/v1/admin/usage"):
            reply = await gateway.ask("GET", path, headers=ADMIN)
            problem(reply, 503, "UNAVAILABLE")
            assert reply.headers["retry-after"] == "1"
        problem(await gateway.ask("GET", "/v1/usage"), 503, "UNAVAILABLE")
        assert (await gateway.ask("GET", "/v1/conversations")).status == 200
        assert (await gateway.ask("GET", "/readyz")).status == 200


async def test_another_billing_replica_answers(replica: Replica, billing: BillingReplica) -> None:
    async with running_gateway(replica.address, billing=(NOWHERE, billing.address)) as gateway:
        for _ in range(4):
            assert (await gateway.ask("GET", PRICES, headers=ADMIN)).status == 200
    async with BillingReplica([]) as stopping:
        stopping.failure = unavailable("Stopping.")
        async with running_gateway(replica.address, billing=(stopping.address, billing.address)) as gateway:
            assert (await gateway.ask("PUT", PRICES, PRICE, headers=ADMIN)).status == 200
            stopping.failure = billing.failure = ServiceError("INTERNAL", "Something went wrong.")
            problem(await gateway.ask("PUT", PRICES, PRICE, headers=ADMIN), 500, "INTERNAL")


KEY = "sk-a-key-that-must-not-be-seen"


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps({"api_key": KEY}).encode(),
        json.dumps({"api_key": [KEY]}).encode(),
        json.dumps({"api_key": {"value": KEY}}).encode(),
        json.dumps({"api_key": KEY, "more": KEY}).encode(),
        json.dumps({"key": KEY}).encode(),
        json.dumps(KEY).encode(),
        json.dumps([KEY]).encode(),
        f'{{"api_key": {KEY}}}'.encode(),
        f'{{"api_key": "{KEY}\\ud800"}}'.encode(),
        f'{{"api_key": "{KEY}'.encode(),
        KEY.encode(),
    ],
)
async def test_a_key_is_not_repeated(
    gateway: Gateway, replica: Replica, capsys: pytest.CaptureFixture[str], raw: bytes
) -> None:
    replica.failure = invalid("api_key", "A sentence.")
    reply = await gateway.ask("PUT", "/v1/admin/provider-keys/openai", raw, headers=ADMIN)
    assert reply.status == 400
    shown = capsys.readouterr()
    assert KEY not in reply.body.decode() + str(reply.headers) + shown.out + shown.err


async def test_a_key_that_breaks_something_is_not_logged(
    gateway: Gateway, replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    replica.failure = ServiceError("INTERNAL", "Something went wrong.")
    reply = await gateway.ask("PUT", "/v1/admin/provider-keys/openai", {"api_key": KEY}, headers=ADMIN)
    assert reply.status == 500
    await gateway.ask("DELETE", f"/v1/admin/provider-keys/{KEY}", headers=ADMIN)
    await replica.die()
    assert (await gateway.ask("PUT", "/v1/admin/provider-keys/openai", {"api_key": KEY}, headers=ADMIN)).status == 503
    problem(
        await gateway.ask("PUT", f"/v1/admin/provider-keys/openai?api_key={KEY}", headers=ADMIN), 400, "INVALID_OPTIONS"
    )
    shown = capsys.readouterr()
    assert KEY not in reply.body.decode() + shown.out + shown.err


async def test_a_browser_app_may_put(gateway: Gateway) -> None:
    preflight = {"origin": "http://localhost:3000", "access-control-request-method": "PUT"}
    reply = await gateway.ask("OPTIONS", PRICES, headers=preflight)
    assert "PUT" in reply.headers["access-control-allow-methods"]
