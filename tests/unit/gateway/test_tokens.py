"""Tokens of an identity provider, over real HTTP: its keys on a real server, the algorithm chosen by the key."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import RSAAlgorithm

from kit.callers import Role
from kit.outbound import allowed_hosts
from services.gateway import jwks as cache_module
from services.gateway.limits import TOKEN_LEEWAY_SECONDS
from tests.fakes.jwks import FakeIdentityProvider
from tests.support.signing import Signer, ec_signer, encoded, hmac_token, jwks, rsa_signer
from tests.unit.gateway.replica import ANON, PROJECT_ID, SECRET, SERVICE, Replica
from tests.unit.gateway.running import Gateway, Reply, running_gateway, token
from threadloom.conversation.v1.project_service_pb2 import Identity

PATH = "/v1/conversations"
RSA, EC = rsa_signer(), ec_signer()
STRANGER = rsa_signer("stranger")
SIGNERS = {"RS256": RSA, "ES256": EC}
HOUR = 3600


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with Replica() as found:
        yield found


@pytest.fixture
async def provider() -> AsyncIterator[FakeIdentityProvider]:
    async with FakeIdentityProvider() as found:
        yield found


@pytest.fixture
async def gateway(replica: Replica) -> AsyncIterator[Gateway]:
    async with running_gateway(replica.address, allowed_hosts=allowed_hosts("127.0.0.1")) as found:
        yield found


@pytest.fixture(params=["document", "url"])
def keys_of(request: pytest.FixtureRequest, replica: Replica, provider: FakeIdentityProvider) -> "Publisher":
    """The project's keys, either way they can be set."""
    return Publisher(request.param == "url", replica, provider)


class Publisher:
    """Sets the identity of the project acme."""

    def __init__(self, by_url: bool, replica: Replica, provider: FakeIdentityProvider) -> None:
        self._by_url, self._replica, self._provider = by_url, replica, provider

    def __call__(self, *keys: Signer | dict[str, Any], **identity: Any) -> None:
        found = Identity(**identity)
        if self._by_url:
            found.jwks_url = self._provider.publish("jwks", jwks(*keys))
        else:
            found.jwks = jwks(*keys).decode()
        self._replica.identities["acme"] = found


async def ask(gateway: Gateway, bearer: str, apikey: str = ANON) -> Reply:
    named = {"apikey": apikey} if apikey else {}
    return await gateway.ask("GET", PATH, headers={**named, "authorization": f"Bearer {bearer}"})


def refused(reply: Reply, words: str) -> None:
    assert (reply.status, reply.json["code"]) == (401, "UNAUTHENTICATED"), reply.body
    assert reply.headers["www-authenticate"] == "Bearer"
    assert words in reply.json["message"]


def relabelled(text: str, **header: Any) -> str:
    """The token under another header; its signature no longer fits."""
    head, _, rest = text.partition(".")
    known = json.loads(base64.urlsafe_b64decode(head + "=="))
    return f"{encoded({**known, **header})}.{rest}"


@pytest.mark.parametrize("algorithm", SIGNERS)
async def test_a_token_of_the_provider_proves_its_user(
    gateway: Gateway, replica: Replica, keys_of: Publisher, algorithm: str
) -> None:
    keys_of(RSA, EC)
    signer, now = SIGNERS[algorithm], int(time.time())
    for text, apikey in (
        (signer.token("alice"), ANON),
        (signer.token("alice", exp=now + HOUR, nbf=now - HOUR, iat=now + HOUR, aud="x", iss="y"), ANON),
        (signer.token("alice", project="acme"), ""),
        (signer.token("alice", project="acme"), SERVICE),
        (signer.token("alice", headers={"typ": "at+jwt"}), ANON),
    ):
        assert (await ask(gateway, text, apikey)).status == 200
        caller = replica.callers[-1]
        assert (caller.role, str(caller.project), caller.user) == (Role.USER, PROJECT_ID, "alice")
    assert (await ask(gateway, token())).status == 200  # the project's secret goes on working


@pytest.mark.parametrize("algorithm", SIGNERS)
@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"exp": -HOUR}, "expired"),
        ({"exp": -TOKEN_LEEWAY_SECONDS - 2}, "expired"),
        ({"nbf": HOUR}, "not valid yet"),
        ({"nbf": TOKEN_LEEWAY_SECONDS + 30}, "not valid yet"),
        ({"exp": -TOKEN_LEEWAY_SECONDS + 3}, ""),
        ({"nbf": TOKEN_LEEWAY_SECONDS - 1}, ""),
    ],
)
async def test_time_counts_with_the_leeway_of_every_token(
    gateway: Gateway, keys_of: Publisher, algorithm: str, claims: dict[str, float], words: str
) -> None:
    keys_of(RSA, EC)
    now = int(time.time())
    reply = await ask(gateway, SIGNERS[algorithm].token(**{name: int(now + at) for name, at in claims.items()}))
    if words:
        refused(reply, words)
    else:
        assert reply.status == 200, reply.body


async def test_claims_count_as_in_every_token(gateway: Gateway, keys_of: Publisher) -> None:
    keys_of(RSA, EC)
    for subject, words in ((7, "1 to 255"), ("", "1 to 255"), ("x" * 256, "1 to 255"), ("a\nb", "1 to 255")):
        text = RSA.token("alice") if subject == 7 else RSA.token(subject)
        if subject == 7:  # what PyJWT does not encode
            text = by_hand({"alg": "RS256", "kid": "r1"}, {"sub": 7})
        refused(await ask(gateway, text), words)
    refused(await ask(gateway, by_hand({"alg": "RS256", "kid": "r1"}, {})), "no claim `sub`")
    refused(await ask(gateway, by_hand({"alg": "RS256", "kid": "r1"}, b'{"sub":"alice","exp":1e999}')), "well-formed")
    refused(await ask(gateway, EC.token(project="other")), "different projects")
    refused(await ask(gateway, EC.token(project="other"), ""), "HS256")  # of the other project, which has no JWKS
    refused(await ask(gateway, EC.token(project="nowhere"), ""), "names no project")
    refused(await ask(gateway, EC.token(), ""), "no claim `project`")


def by_hand(header: dict[str, Any], claims: Any) -> str:
    """A token with the provider's true RSA signature over whatever."""
    signed = f"{encoded(header)}.{encoded(claims)}"
    signature = RSAAlgorithm(RSAAlgorithm.SHA256).sign(signed.encode(), RSA.key)  # type: ignore[arg-type]
    return f"{signed}.{encoded(signature)}"


@pytest.mark.parametrize("role", ["admin", "authenticated"])
async def test_the_claim_role_makes_an_admin(gateway: Gateway, replica: Replica, keys_of: Publisher, role: str) -> None:
    keys_of(RSA)
    headers = {"apikey": ANON, "authorization": f"Bearer {RSA.token(role=role)}"}
    reply = await gateway.ask("DELETE", "/v1/admin/identity", headers=headers)
    assert reply.status == (204 if role == "admin" else 403)


@pytest.mark.parametrize("signer", [RSA, EC], ids=["rsa", "ec"])
async def test_a_public_key_is_no_secret(gateway: Gateway, keys_of: Publisher, signer: Signer) -> None:
    """HS256 with the public key as the HMAC's secret, in every form it is published in, under every header."""
    keys_of(signer)
    for name, secret in signer.encodings().items():
        for header in (
            {"alg": "HS256", "kid": signer.kid},
            {"alg": "HS256"},
            {"alg": signer.algorithm, "kid": signer.kid},
            {"alg": signer.algorithm},
        ):
            reply = await ask(gateway, hmac_token(secret, header))
            assert reply.status == 401, (name, header)
            assert "signature" in reply.json["message"] or "well-formed" in reply.json["message"], (name, header)
    # Nor is it with the project's own secret under the name of an asymmetric algorithm.
    refused(await ask(gateway, hmac_token(SECRET.encode(), {"alg": signer.algorithm})), "signature")


@pytest.mark.parametrize(
    "algorithm",
    ["none", "None", "NONE", "", "HS384", "HS512", "RS384", "RS512", "PS256", "ES384", "ES512", "ES256K", "EdDSA",
     "rs256", "RS256 ", None, 7, True, ["RS256"], {"RS256": 1}],
)  # fmt: skip
async def test_other_algorithms_are_refused(gateway: Gateway, keys_of: Publisher, algorithm: Any) -> None:
    keys_of(RSA, EC)
    for signer in (RSA, EC):
        text = relabelled(signer.token(), alg=algorithm)
        for one in (text, text.rpartition(".")[0] + "."):
            refused(await ask(gateway, one), "must be signed with HS256, RS256 or ES256")


async def test_a_key_verifies_by_its_own_algorithm_only(gateway: Gateway, keys_of: Publisher) -> None:
    keys_of(RSA, EC)
    refused(await ask(gateway, relabelled(EC.token(), alg="RS256")), "is for ES256, the token says RS256")
    refused(await ask(gateway, relabelled(RSA.token(), alg="ES256")), "is for RS256, the token says ES256")
    # Without a kid the key of the header's type is tried, and does not fit.
    nameless_rsa, nameless_ec = Signer(RSA.key, None), Signer(EC.key, None)
    refused(await ask(gateway, relabelled(nameless_ec.token(), alg="RS256")), "signature")
    refused(await ask(gateway, relabelled(nameless_rsa.token(), alg="ES256")), "signature")
    refused(await ask(gateway, relabelled(EC.token(), kid="r1")), "is for RS256, the token says ES256")


@pytest.mark.parametrize("algorithm", SIGNERS)
async def test_what_another_key_signed_is_refused(gateway: Gateway, keys_of: Publisher, algorithm: str) -> None:
    keys_of(RSA, EC)
    signer = SIGNERS[algorithm]
    impostor = Signer(rsa_signer("i").key if algorithm == "RS256" else ec_signer("i").key, signer.kid)
    refused(await ask(gateway, impostor.token()), "signature")
    whole = signer.token()
    refused(await ask(gateway, whole[:-8] + ("A" * 8 if whole[-8:] != "A" * 8 else "B" * 8)), "signature")
    refused(await ask(gateway, whole.rpartition(".")[0] + "."), "signature")
    # A key that the token brings along is not looked at.
    for headers in ({"jwk": STRANGER.jwk()}, {"jku": "https://mallory.example/jwks"}, {"x5c": ["MII="]}):
        refused(await ask(gateway, Signer(STRANGER.key, "r1").token(headers=headers)), "signature")


async def test_without_a_kid_there_must_be_one_key_of_the_type(gateway: Gateway, keys_of: Publisher) -> None:
    keys_of(RSA, EC, EC.jwk(kid="enc", use="enc"), rsa_signer("weak", 1024))
    nameless = Signer(RSA.key, None)
    assert (await ask(gateway, nameless.token())).status == 200
    assert (await ask(gateway, Signer(EC.key, None).token())).status == 200


async def test_several_keys_of_the_type_need_a_kid(gateway: Gateway, keys_of: Publisher) -> None:
    keys_of(RSA, STRANGER, EC)
    refused(await ask(gateway, Signer(RSA.key, None).token()), "Give each a `kid`")
    assert (await ask(gateway, RSA.token())).status == 200


async def test_two_keys_of_one_name_are_told_apart_by_type_and_not_guessed_at(
    gateway: Gateway, keys_of: Publisher
) -> None:
    keys_of(Signer(RSA.key, "same"), Signer(EC.key, "same"), Signer(STRANGER.key, "twice"), Signer(RSA.key, "twice"))
    assert (await ask(gateway, Signer(RSA.key, "same").token())).status == 200
    assert (await ask(gateway, Signer(EC.key, "same").token())).status == 200
    refused(await ask(gateway, Signer(STRANGER.key, "twice").token()), "Give each a `kid`")


async def test_keys_of_no_use_verify_nothing(gateway: Gateway, keys_of: Publisher) -> None:
    p384 = ec_signer("p384", ec.SECP384R1)
    weak = rsa_signer("weak", 1024)
    shared = {"kty": "oct", "kid": "shared", "k": encoded(b"a-shared-key-that-is-long-enough-to-sign"), "alg": "HS256"}
    keys_of(EC, RSA.jwk(use="enc"), weak, p384.jwk(alg=None), shared)
    refused(await ask(gateway, RSA.token()), "names no key")
    with pytest.warns(match="below the minimum"):
        text = weak.token()
    refused(await ask(gateway, text), "names no key")
    refused(await ask(gateway, Signer(RSA.key, None).token()), "no key that may verify RS256")
    secret = b"a-shared-key-that-is-long-enough-to-sign"
    refused(await ask(gateway, hmac_token(secret, {"alg": "HS256", "kid": "shared"})), "project's secret")


@pytest.mark.parametrize("kid", ["made-up", "", "R1", "../r1", "x" * 5000, "' OR 1=1", "\u0000"])
async def test_a_made_up_kid_is_refused(gateway: Gateway, keys_of: Publisher, kid: str) -> None:
    keys_of(RSA)
    refused(await ask(gateway, Signer(RSA.key, kid).token()), "names no key")


@pytest.mark.parametrize("kid", [7, None, ["r1"], {"kid": "r1"}, True])
async def test_a_kid_that_is_no_text_is_malformed(gateway: Gateway, keys_of: Publisher, kid: Any) -> None:
    keys_of(RSA)
    refused(await ask(gateway, by_hand({"alg": "RS256", "kid": kid}, {"sub": "alice"})), "well-formed")


async def test_issuer_and_audience_are_required_where_they_are_set(gateway: Gateway, keys_of: Publisher) -> None:
    keys_of(RSA, issuer="https://id.example/", audience="chat")
    good = {"iss": "https://id.example/", "aud": "chat"}
    for claims in (good, {**good, "aud": ["other", "chat"]}):
        assert (await ask(gateway, RSA.token(**claims))).status == 200
    for change, words in (
        ({"aud": "other"}, "must be or hold the audience"),
        ({"aud": ["other"]}, "must be or hold the audience"),
        ({"aud": "chat "}, "must be or hold the audience"),
        ({"aud": {"chat": 1}}, "must be or hold the audience"),
        ({"aud": ["chat", 7]}, "must be or hold the audience"),
        ({"aud": None}, "no claim `aud`"),
        ({"aud": []}, "no claim `aud`"),
        ({"iss": "https://id.example"}, "must be the issuer"),
        ({"iss": "https://mallory.example/"}, "must be the issuer"),
    ):
        refused(await ask(gateway, RSA.token(**{**good, **change})), words)
    refused(await ask(gateway, RSA.token(aud="chat")), "no claim `iss`")
    refused(await ask(gateway, RSA.token(iss="https://id.example/")), "no claim `aud`")
    refused(await ask(gateway, by_hand({"alg": "RS256", "kid": "r1"}, {"sub": "a", **good, "iss": ["x"]})), "issuer")
    # The app's own tokens are for this project by their secret, and need neither.
    assert (await ask(gateway, token())).status == 200


async def test_hs256_is_refused_once_the_project_says_so(gateway: Gateway, keys_of: Publisher) -> None:
    keys_of(RSA, refuses_hs256=True)
    assert (await ask(gateway, RSA.token())).status == 200
    for text in (token(), hmac_token(SECRET.encode(), {"alg": "HS256", "kid": "r1"})):
        refused(await ask(gateway, text), "must be signed with RS256 or ES256")
    for secret in RSA.encodings().values():
        refused(await ask(gateway, hmac_token(secret, {"alg": "HS256"})), "must be signed with RS256 or ES256")
    # The service key is no user's token.
    assert (await gateway.ask("GET", PATH, headers={"apikey": SERVICE})).status == 200


async def test_a_project_without_an_identity_takes_only_its_secret(gateway: Gateway) -> None:
    for signer in (RSA, EC):
        refused(await ask(gateway, signer.token()), "must be signed with HS256.")


async def test_an_identity_is_its_own_projects(
    gateway: Gateway, replica: Replica, provider: FakeIdentityProvider
) -> None:
    replica.identities["acme"] = Identity(jwks=jwks(RSA).decode())
    replica.identities["other"] = Identity(jwks_url=provider.publish("other", jwks(EC)))
    refused(await ask(gateway, EC.token()), "names no key")
    refused(await ask(gateway, RSA.token(project="other"), ""), "names no key")
    assert (await ask(gateway, EC.token(project="other"), "")).status == 200
    assert (await ask(gateway, RSA.token(project="acme"), "")).status == 200


# ---------------------------------------------------------------- the provider's server


def at_url(replica: Replica, provider: FakeIdentityProvider, *keys: Signer, **page: Any) -> None:
    replica.identities["acme"] = Identity(jwks_url=provider.publish("jwks", jwks(*keys), **page))


async def test_a_thousand_requests_are_one_fetch(
    gateway: Gateway, replica: Replica, provider: FakeIdentityProvider
) -> None:
    at_url(replica, provider, RSA, EC)
    gate = provider.hang("jwks")
    first = [asyncio.create_task(ask(gateway, RSA.token(f"user-{number}"))) for number in range(50)]
    await asyncio.wait_for(provider.asked.wait(), 10)
    gate.set()
    assert {reply.status for reply in await asyncio.gather(*first)} == {200}
    for _ in range(20):
        replies = await asyncio.gather(*(ask(gateway, EC.token()) for _ in range(50)))
        assert {reply.status for reply in replies} == {200}
    assert provider.fetched("jwks") == 1


async def test_a_rotated_key_works_at_once(gateway: Gateway, replica: Replica, provider: FakeIdentityProvider) -> None:
    at_url(replica, provider, RSA)
    assert (await ask(gateway, RSA.token())).status == 200
    at_url(replica, provider, RSA, STRANGER)
    assert (await ask(gateway, STRANGER.token())).status == 200
    assert (await ask(gateway, RSA.token())).status == 200
    assert provider.fetched("jwks") == 2


async def test_a_removed_key_is_refused_when_its_time_is_up(
    gateway: Gateway, replica: Replica, provider: FakeIdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "JWKS_FRESH_SECONDS_MIN", 0.2)
    at_url(replica, provider, RSA, EC, headers={"Cache-Control": "max-age=0"})
    assert (await ask(gateway, RSA.token())).status == 200
    at_url(replica, provider, EC)
    async with asyncio.timeout(10):
        while (reply := await ask(gateway, RSA.token())).status == 200:
            pass
    refused(reply, "names no key")
    assert (await ask(gateway, EC.token())).status == 200


async def test_made_up_kids_make_no_flood(gateway: Gateway, replica: Replica, provider: FakeIdentityProvider) -> None:
    at_url(replica, provider, RSA)
    for wave in range(10):
        asking = (ask(gateway, Signer(STRANGER.key, f"kid-{wave}-{number}").token()) for number in range(50))
        assert {reply.status for reply in await asyncio.gather(*asking)} == {401}
    assert provider.fetched("jwks") == 2
    assert (await ask(gateway, RSA.token())).status == 200


async def test_a_provider_that_hangs_takes_no_user_away_it_has_proven(
    gateway: Gateway, replica: Replica, provider: FakeIdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "JWKS_SECONDS", 0.5)
    at_url(replica, provider, RSA)
    assert (await ask(gateway, RSA.token())).status == 200
    provider.hang("jwks")
    unknown = await asyncio.wait_for(ask(gateway, STRANGER.token()), 5)
    assert (unknown.status, unknown.json["code"]) == (503, "UNAVAILABLE")
    assert unknown.headers["retry-after"] == "5"
    for _ in range(50):
        assert (await ask(gateway, RSA.token())).status == 200


@pytest.mark.parametrize(
    "page",
    [
        {"status": 500},
        {"status": 302, "headers": {"Location": "/elsewhere"}},
        {"body": b"<html>"},
        {"body": b"x" * 10_000_000},
        {},
    ],
    ids=["500", "redirect", "garbage", "10 MB", "hang"],
)
async def test_a_provider_that_was_never_heard_is_no_refusal(
    gateway: Gateway,
    replica: Replica,
    provider: FakeIdentityProvider,
    monkeypatch: pytest.MonkeyPatch,
    page: dict[str, Any],
) -> None:
    monkeypatch.setattr(cache_module, "JWKS_SECONDS", 0.5 if not page else 5.0)
    provider.publish("elsewhere", jwks(RSA))
    replica.identities["acme"] = Identity(jwks_url=provider.publish("jwks", **{"body": jwks(RSA), **page}))
    if not page:
        provider.hang("jwks")
    asking = (asyncio.wait_for(ask(gateway, RSA.token()), 10) for _ in range(20))
    for reply in await asyncio.gather(*asking):
        assert (reply.status, reply.json["code"]) == (503, "UNAVAILABLE")
        assert "identity provider" in reply.json["message"]
    assert (provider.fetched("jwks"), provider.fetched("elsewhere")) == (1, 0)
    assert (await ask(gateway, token())).status == 200  # the app's own tokens need no provider


async def test_an_address_within_our_walls_is_not_called(replica: Replica, provider: FakeIdentityProvider) -> None:
    at_url(replica, provider, RSA)
    async with running_gateway(replica.address) as guarded:
        reply = await ask(guarded, RSA.token())
    assert (reply.status, reply.json["code"]) == (503, "UNAVAILABLE")
    assert provider.fetched("jwks") == 0
