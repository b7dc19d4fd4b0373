"""A project's identity before real services: set over HTTP, its provider's tokens are taken, in its project only."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import jwt
import pytest
from jsonschema import Draft202012Validator

from deploy.local.secret_file import ProjectKeys
from services.gateway.limits import PROJECT_SECONDS
from tests.contract.conversation.harness import eventually
from tests.contract.gateway.calls import CONVERSATIONS, refusal
from tests.fakes.jwks import FakeIdentityProvider
from tests.support.cluster import Cluster
from tests.support.http import Client, Refused
from tests.support.signing import Signer, ec_signer, hmac_token, jwks, rsa_signer

IDENTITY = "/v1/admin/identity"
RSA, EC = rsa_signer(), ec_signer()
CHANGE_SECONDS = PROJECT_SECONDS + 5  # for a machine that is busy
ALLOWED = {"THREADLOOM_ALLOWED_HOSTS": "127.0.0.1"}


@pytest.fixture(scope="module")
def environ() -> dict[str, dict[str, str]]:
    """Identity providers of this machine may be called."""
    return {"gateway": ALLOWED, "conversation": ALLOWED}


@pytest.fixture
async def identity_provider() -> AsyncIterator[FakeIdentityProvider]:
    async with FakeIdentityProvider() as found:
        yield found


@pytest.fixture
def other(cluster: Cluster) -> ProjectKeys:
    """Another project than `project`."""
    return cluster.create_project(f"o-{uuid4().hex[:12]}")


@pytest.fixture
async def clients(cluster: Cluster) -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


class Door:
    """Requests under any headers."""

    def __init__(self, cluster: Cluster, stack: AsyncExitStack) -> None:
        self._cluster, self._stack = cluster, stack

    async def client(self, **headers: str) -> Client:
        return await self._stack.enter_async_context(Client(self._cluster.http, headers))

    async def admin(self, project: ProjectKeys) -> Client:
        return await self.client(apikey=project.service_key)

    async def status(self, project: ProjectKeys, token: str) -> int:
        """What a user with this token is answered."""
        client = await self.client(apikey=project.anon_key, Authorization=f"Bearer {token}")
        try:
            await client.call("GET", CONVERSATIONS)
        except Refused as refused:
            return refused.status
        return 200

    async def becomes(self, status: int, project: ProjectKeys, token: str) -> None:
        """Waits until a user with this token is answered so."""

        async def is_so() -> bool:
            return await self.status(project, token) == status

        await eventually(is_so, CHANGE_SECONDS)


@pytest.fixture
def door(cluster: Cluster, clients: AsyncExitStack) -> Door:
    return Door(cluster, clients)


def hs256(project: ProjectKeys, **claims: Any) -> str:
    return jwt.encode({"sub": "alice", **claims}, project.jwt_secret, "HS256")


async def test_an_identity_is_set_read_and_removed(cluster: Cluster, door: Door, project: ProjectKeys) -> None:
    admin = await door.admin(project)
    found = await refusal(admin.call("GET", IDENTITY))
    assert (found.status, found.body["kind"]) == (404, "identity")
    document = await admin.call("GET", "/openapi.json")
    schema = Draft202012Validator({"$ref": "#/components/schemas/Identity", **document})
    url = "https://id.example/jwks.json"
    for body, kept in (
        ({"jwks_url": url}, {"jwks_url": url, "jwks": None, "issuer": None, "audience": None, "hs256": True}),
        (
            {"jwks": {"keys": [RSA.jwk()]}, "issuer": "i", "audience": "a", "hs256": False},
            {"jwks_url": None, "jwks": {"keys": [RSA.jwk()]}, "issuer": "i", "audience": "a", "hs256": False},
        ),
    ):
        for _ in range(2):
            answer = await admin.call("PUT", IDENTITY, body)
            schema.validate(answer)
            assert {**kept, "updated_at": answer["updated_at"]} == answer
            assert await admin.call("GET", IDENTITY) == answer
    as_admin = await door.client(apikey=project.anon_key, Authorization=f"Bearer {hs256(project, role='admin')}")
    assert (await refusal(as_admin.call("GET", IDENTITY))).status == 401  # HS256 was taken away above
    for _ in range(2):
        assert await admin.call("DELETE", IDENTITY) is None
    assert (await refusal(admin.call("GET", IDENTITY))).status == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "jwks_url"),
        ({"issuer": "i"}, "jwks_url"),
        ({"jwks_url": "http://id.example/jwks"}, "jwks_url"),
        ({"jwks_url": "https://10.0.0.1/jwks"}, "jwks_url"),
        ({"jwks_url": "https://id.example/", "jwks": {"keys": [RSA.jwk()]}}, "jwks"),
        ({"jwks": {"keys": []}}, "jwks"),
        ({"jwks": {"keys": [RSA.private_jwk()]}}, "jwks"),
        ({"jwks": "text"}, "jwks"),
        ({"jwks_url": "https://id.example/", "issuer": ""}, "issuer"),
        ({"jwks_url": "https://id.example/", "audience": ""}, "audience"),
        ({"jwks_url": "https://id.example/", "audience": "a\nb"}, "audience"),
        ({"jwks_url": "https://id.example/", "hs256": "no"}, "hs256"),
        ({"jwks_url": "https://id.example/", "algorithms": ["HS256"]}, "algorithms"),
    ],
)
async def test_what_is_wrong_is_told_by_its_field(
    door: Door, project: ProjectKeys, body: dict[str, Any], field: str
) -> None:
    admin = await door.admin(project)
    found = await refusal(admin.call("PUT", IDENTITY, body))
    assert (found.status, found.body["code"], found.body["field"]) == (400, "INVALID_OPTIONS", field)
    assert (await refusal(admin.call("GET", IDENTITY))).status == 404


async def test_a_document_that_is_too_large_is_refused(door: Door, project: ProjectKeys) -> None:
    admin = await door.admin(project)
    found = await refusal(admin.call("PUT", IDENTITY, {"jwks": {"keys": [EC.jwk()], "pad": "x" * 20_000}}))
    assert (found.status, found.body["code"]) == (413, "CONTENT_TOO_LARGE")


@pytest.mark.parametrize("by_url", [True, False], ids=["url", "document"])
async def test_a_user_of_the_provider_talks_and_nobody_else_does(
    door: Door, project: ProjectKeys, other: ProjectKeys, identity_provider: FakeIdentityProvider, by_url: bool
) -> None:
    url = identity_provider.publish("jwks", jwks(RSA, EC))
    keys = {"jwks_url": url} if by_url else {"jwks": {"keys": [RSA.jwk(), EC.jwk()]}}
    claims = {"iss": "https://id.example/", "aud": "chat", "exp": int(time.time()) + 600}
    admin = await door.admin(project)
    await admin.call("PUT", IDENTITY, {**keys, "issuer": claims["iss"], "audience": "chat"})
    for signer in (RSA, EC):
        client = await door.client(Authorization=f"Bearer {signer.token('carol', project=project.slug, **claims)}")
        conversation = await client.create_conversation()
        whole = await client.ask(conversation, "Hello")
        assert whole.end is not None
        assert whole.end.event == "done"
        assert (await client.call("GET", f"{CONVERSATIONS}/{conversation}"))["user_id"] == "carol"
    good = RSA.token(**claims)
    assert await door.status(project, good) == 200
    assert await door.status(project, hs256(project)) == 200
    assert await door.status(other, good) == 401
    assert await door.status(project, hs256(other)) == 401
    for bad in (
        RSA.token(**{**claims, "aud": "another app"}),
        RSA.token(**{**claims, "iss": "https://mallory.example/"}),
        RSA.token(**{**claims, "exp": int(time.time()) - 600}),
        RSA.token(**{**claims, "nbf": int(time.time()) + 600}),
        RSA.token(**claims, project=other.slug),
        Signer(rsa_signer("stranger").key, "r1").token(**claims),
        rsa_signer("stranger").token(**claims),
        jwt.encode({"sub": "alice", **claims}, None, "none"),
    ):
        assert await door.status(project, bad) == 401
    for secret in RSA.encodings().values():
        assert await door.status(project, hmac_token(secret, {"alg": "HS256", "kid": "r1"}, **claims)) == 401
    assert identity_provider.fetched("jwks") == (2 if by_url else 0)  # the second one for the unknown kid


async def test_a_change_counts_within_ten_seconds(door: Door, project: ProjectKeys) -> None:
    admin = await door.admin(project)
    assert await door.status(project, RSA.token()) == 401
    await admin.call("PUT", IDENTITY, {"jwks": {"keys": [RSA.jwk()]}, "hs256": False})
    await door.becomes(200, project, RSA.token())
    assert await door.status(project, hs256(project)) == 401
    await admin.call("DELETE", IDENTITY)
    await door.becomes(401, project, RSA.token())
    assert await door.status(project, hs256(project)) == 200


async def test_a_provider_that_is_away_is_503_and_not_asked_by_each_request(
    door: Door, project: ProjectKeys, identity_provider: FakeIdentityProvider
) -> None:
    admin = await door.admin(project)
    await admin.call("PUT", IDENTITY, {"jwks_url": identity_provider.publish("jwks", jwks(RSA))})
    gate = identity_provider.hang("jwks")
    begun = time.monotonic()
    statuses = await asyncio.gather(*(door.status(project, RSA.token()) for _ in range(20)))
    assert set(statuses) == {503}
    assert time.monotonic() - begun < 10
    assert identity_provider.fetched("jwks") == 1
    assert await door.status(project, hs256(project)) == 200
    gate.set()
    identity_provider.publish("jwks", jwks(RSA))
    await door.becomes(200, project, RSA.token())
    identity_provider.publish("jwks", b"", status=500)
    for _ in range(50):
        assert await door.status(project, RSA.token()) == 200
    assert identity_provider.fetched("jwks") == 2


async def test_the_outside_of_the_walls_holds_for_redirects_too(
    door: Door, project: ProjectKeys, identity_provider: FakeIdentityProvider
) -> None:
    target = identity_provider.publish("target", jwks(RSA))
    url = identity_provider.publish("jwks", b"", status=302, headers={"Location": target})
    await (await door.admin(project)).call("PUT", IDENTITY, {"jwks_url": url})
    assert await door.status(project, RSA.token()) == 503
    assert identity_provider.fetched("target") == 0
