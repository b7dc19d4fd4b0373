"""Who is believed to be whom, with real tokens, over real HTTP."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kit.callers import Role
from tests.unit.gateway.replica import ANON, OTHER_SERVICE, PROJECT_ID, SECRET, SERVICE, Replica
from tests.unit.gateway.running import ALICE, Gateway, Reply, running_gateway, token

PATH = "/v1/conversations"
NOW, HOUR = int(time.time()), 3600


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with Replica() as found:
        yield found


@pytest.fixture
async def gateway(replica: Replica) -> AsyncIterator[Gateway]:
    async with running_gateway(replica.address) as found:
        yield found


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def encoded(data: Any) -> str:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def handmade(header: Any, claims: Any, secret: str = SECRET) -> str:
    """A token no library would make, with a right HMAC-SHA256 signature."""
    signed = f"{encoded(header)}.{encoded(claims)}"
    return f"{signed}.{encoded(hmac.new(secret.encode(), signed.encode(), hashlib.sha256).digest())}"


def tampered(text: str) -> str:
    """The token with another signature of the right length."""
    signed, _, signature = text.rpartition(".")
    return f"{signed}.{'A' if signature[0] != 'A' else 'B'}{signature[1:]}"


HS256 = {"alg": "HS256", "typ": "JWT"}


@pytest.mark.parametrize(
    ("headers", "role", "user"),
    [
        (ALICE, Role.USER, "alice"),
        (bearer(token(project="acme")), Role.USER, "alice"),
        ({"apikey": ANON, **bearer(token(project="acme"))}, Role.USER, "alice"),
        ({"apikey": SERVICE, **bearer(token())}, Role.USER, "alice"),
        ({"apikey": ANON, "authorization": f"bearer  {token('bøb 7')}"}, Role.USER, "bøb 7"),
        ({"apikey": SERVICE}, Role.SERVICE, ""),
        (bearer(SERVICE), Role.SERVICE, ""),
        ({"apikey": ANON, **bearer(SERVICE)}, Role.SERVICE, ""),
        ({"apikey": SERVICE, **bearer(SERVICE)}, Role.SERVICE, ""),
        ({"apikey": ANON, **bearer(token(exp=NOW + HOUR, nbf=NOW - HOUR))}, Role.USER, "alice"),
        ({"apikey": ANON, **bearer(token(iat=NOW + HOUR, aud="x", iss="y"))}, Role.USER, "alice"),
    ],
)
async def test_a_proven_caller_is_passed_on(
    gateway: Gateway, replica: Replica, headers: dict[str, str], role: Role, user: str
) -> None:
    reply = await gateway.ask("GET", PATH, headers=headers)
    assert reply.status == 200
    caller = replica.callers[-1]
    assert (caller.role, str(caller.project), caller.user) == (role, PROJECT_ID, user)


def refused(reply: Reply, words: str) -> None:
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json["code"] == "UNAUTHENTICATED"
    assert words in reply.json["message"]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "apikey"),
        ({"apikey": ANON}, "names a project, not a user"),
        (bearer(ANON), "names a project, not a user"),
        ({"apikey": ANON, **bearer(ANON)}, "names a project, not a user"),
        ({"apikey": "nonsense"}, "no project's key"),
        ({"apikey": "nonsense", **bearer(token())}, "no project's key"),
        ({"apikey": "x" * 5000, **bearer(token())}, "no project's key"),
        ({"apikey": ANON, **bearer("nonsense")}, "neither a user's token"),
        ({"apikey": ANON, "authorization": "Basic YTpi"}, "Bearer <token>"),
        ({"apikey": ANON, "authorization": "Bearer"}, "Bearer <token>"),
        ({"apikey": ANON, **bearer(OTHER_SERVICE)}, "different projects"),
        ({"apikey": ANON, **bearer(token(project="other"))}, "different projects"),
        (bearer(token()), "no claim `project`"),
        (bearer(token(project="nowhere")), "names no project"),
        (bearer(token(project=7)), "names no project"),
        (bearer(token(project="other")), "signature"),
        ({"apikey": ANON, **bearer(token(secret="wrong-" + SECRET))}, "signature"),
        ({"apikey": ANON, **bearer(tampered(token()))}, "signature"),
        ({"apikey": ANON, **bearer(token(exp=NOW - HOUR))}, "expired"),
        ({"apikey": ANON, **bearer(token(nbf=NOW + HOUR))}, "not valid yet"),
        ({"apikey": ANON, **bearer(token(algorithm="HS512", secret=SECRET * 2))}, "HS256"),
        ({"apikey": ANON, **bearer(token(user=None))}, "no claim `sub`"),
        ({"apikey": ANON, **bearer(token(user=""))}, "1 to 255"),
        ({"apikey": ANON, **bearer(token(user=" "))}, "1 to 255"),
        ({"apikey": ANON, **bearer(token(user="a\nb"))}, "1 to 255"),
        ({"apikey": ANON, **bearer(token(user="x" * 256))}, "1 to 255"),
        ({"apikey": ANON, **bearer(handmade(HS256, {"sub": 7}))}, "1 to 255"),
        ({"apikey": ANON, **bearer(handmade({"alg": "none"}, {"sub": "alice"}))}, "HS256"),
        ({"apikey": ANON, **bearer(f"{encoded({'alg': 'none'})}.{encoded({'sub': 'alice'})}.")}, "HS256"),
        ({"apikey": ANON, **bearer(handmade({"alg": "RS256"}, {"sub": "alice"}))}, "HS256"),
        ({"apikey": ANON, **bearer(handmade({"alg": ["HS256"]}, {"sub": "alice"}))}, "HS256"),
        ({"apikey": ANON, **bearer(handmade(HS256, {"sub": "alice", "exp": "soon"}))}, "not a well-formed JWT"),
        ({"apikey": ANON, **bearer(handmade(HS256, b'{"sub":"alice","exp":1e999}'))}, "not a well-formed JWT"),
        ({"apikey": ANON, **bearer(handmade(HS256, b"[" * 5000))}, "not a well-formed JWT"),
        ({"apikey": ANON, **bearer(handmade(HS256, b"\xff\xfe"))}, "not a well-formed JWT"),
        ({"apikey": ANON, **bearer(handmade(HS256, [1]))}, "not a well-formed JWT"),
        ({"apikey": ANON, **bearer("..")}, "not a well-formed JWT"),
        (bearer(handmade(HS256, b'{"sub":"alice","project":"\\ud800"}')), "names no project"),
    ],
)
async def test_what_proves_nothing_is_refused(gateway: Gateway, headers: dict[str, str], words: str) -> None:
    reply = await gateway.ask("GET", PATH, headers=headers)
    refused(reply, words)
    secrets = [value.removeprefix("Bearer ") for value in headers.values() if len(value) > len("Bearer ..")]
    assert not any(secret in reply.body.decode() for secret in (*secrets, SECRET))


async def test_clocks_may_differ_by_seconds(gateway: Gateway) -> None:
    for claims in ({"exp": int(time.time()) - 3}, {"nbf": int(time.time()) + 3}):
        assert (await gateway.ask("GET", PATH, headers={"apikey": ANON, **bearer(token(**claims))})).status == 200


async def test_projects_are_asked_for_once_in_a_while(gateway: Gateway, replica: Replica) -> None:
    for _ in range(5):
        assert (await gateway.ask("GET", PATH)).status == 200
        assert (await gateway.ask("GET", PATH, headers={"apikey": "nonsense"})).status == 401
    assert replica.resolves == 2


async def test_a_lookup_that_fails_is_no_refusal() -> None:
    async with Replica() as gone:
        address = gone.address
    async with running_gateway(address) as gateway:
        reply = await gateway.ask("GET", PATH)
    assert reply.status == 503
    assert reply.json["code"] == "UNAVAILABLE"
    assert reply.headers["retry-after"] == "1"


async def test_a_ticket_opens_one_stream(
    gateway: Gateway, replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    made = await gateway.ask("POST", "/v1/stream-tickets")
    assert made.status == 201
    assert made.json == {"ticket": "a-ticket", "expires_at": "1970-01-01T00:01:00.000000Z"}
    stream = "/v1/conversations/01900000-0000-7000-8000-00000000000a/stream?ticket=a-ticket"
    assert (await gateway.ask("GET", stream, headers={})).status == 204
    assert replica.callers[-1].user == "alice"
    refused(await gateway.ask("GET", stream, headers={}), "ticket")
    # Its own headers do not help a bad ticket, and a ticket opens nothing else.
    refused(await gateway.ask("GET", stream), "ticket")
    refused(await gateway.ask("GET", f"{PATH}?ticket=a-ticket", headers={}), "apikey")
    assert (await gateway.ask("GET", f"{PATH}?ticket=a-ticket")).json["field"] == "ticket"
    assert "a-ticket" not in capsys.readouterr().out
