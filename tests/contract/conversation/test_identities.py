"""A project's identity: what may be set, by whom, and that it travels with the project."""

import json
from collections.abc import Awaitable
from typing import Any

import pytest

from kit.callers import Caller
from kit.errors import ServiceError
from kit.ids import new_id
from kit.jwks import KEYS_MAX
from kit.outbound import URL_CHARS
from services.conversation import limits
from tests.contract.conversation.harness import Launcher, Service, Sql, project_id
from tests.support.signing import ec_signer, jwks, rsa_signer
from threadloom.conversation.v1 import project_service_pb2 as projects
from threadloom.conversation.v1.project_service_pb2 import Identity

URL = "https://id.example/.well-known/jwks.json"
DOCUMENT = jwks(rsa_signer(), ec_signer()).decode()


async def refused(call: Awaitable[object]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await call
    return caught.value


def bare(identity: Identity) -> Identity:
    """Without the time it was set."""
    found = Identity()
    found.CopyFrom(identity)
    found.ClearField("update_time")
    return found


async def resolved(service: Service, caller: Caller) -> projects.Project:
    request = projects.ResolveProjectRequest(id=str(project_id(caller)))
    found: projects.Project = (await service.system.call(service.system.projects.ResolveProject, request)).project
    return found


@pytest.mark.parametrize(
    "given",
    [
        Identity(jwks_url=URL),
        Identity(jwks=DOCUMENT),
        Identity(jwks_url=URL, issuer="https://id.example/", audience="chat", refuses_hs256=True),
        Identity(jwks=DOCUMENT, issuer="i" * limits.IDENTITY_CLAIM_CHARS, audience="a" * limits.IDENTITY_CLAIM_CHARS),
        Identity(jwks_url="https://id.example/" + "a" * (URL_CHARS - len("https://id.example/"))),
    ],
)
async def test_an_identity_is_set_read_and_removed(
    service: Service, callers: dict[str, Caller], given: Identity
) -> None:
    acme = str(project_id(callers["role"]))
    assert (await refused(service.role.identity())).metadata == {"kind": "identity"}
    assert not (await resolved(service, callers["role"])).HasField("identity")
    first = await service.role.set_identity(given)
    second = await service.system.set_identity(given, acme)
    assert bare(first) == bare(second) == given
    assert second.update_time.ToNanoseconds() > first.update_time.ToNanoseconds()
    for person, named in ((service.role, ""), (service.role, acme), (service.system, acme)):
        assert await person.identity(named) == second
    assert (await resolved(service, callers["role"])).identity == second
    assert not (await resolved(service, callers["role elsewhere"])).HasField("identity")
    assert (await refused(service.people["role elsewhere"].identity())).reason == "NOT_FOUND"
    for _ in range(2):
        await service.role.delete_identity()
        assert (await refused(service.system.identity(acme))).metadata == {"kind": "identity"}
    assert not (await resolved(service, callers["role"])).HasField("identity")


async def test_what_is_set_takes_the_place_of_all_that_was_set(service: Service) -> None:
    await service.role.set_identity(Identity(jwks_url=URL, issuer="i", audience="a", refuses_hs256=True))
    await service.role.set_identity(Identity(jwks=DOCUMENT))
    assert bare(await service.role.identity()) == Identity(jwks=DOCUMENT)
    await service.role.set_identity(Identity(jwks_url=URL))
    assert bare(await service.role.identity()) == Identity(jwks_url=URL)


async def test_a_project_is_found_with_its_identity_however_it_is_named(service: Service) -> None:
    stub, system = service.system.projects, service.system
    made = await system.call(stub.CreateProject, projects.CreateProjectRequest(slug="third"))
    kept = await system.set_identity(Identity(jwks=DOCUMENT, audience="chat"), made.project.id)
    kinds = projects.KeyKind
    for by, kind in (
        ({"key": made.anon_key}, kinds.KEY_KIND_ANON),
        ({"key": made.service_key}, kinds.KEY_KIND_SERVICE),
        ({"slug": "third"}, kinds.KEY_KIND_UNSPECIFIED),
        ({"id": made.project.id}, kinds.KEY_KIND_UNSPECIFIED),
    ):
        found = await system.call(stub.ResolveProject, projects.ResolveProjectRequest(**by))
        assert (found.project.identity, found.project.slug, found.key_kind) == (kept, "third", kind)


async def test_only_the_projects_service_role_and_our_own_services_manage_it(
    service: Service, callers: dict[str, Caller], sql: Sql
) -> None:
    acme, other = str(project_id(callers["role"])), str(project_id(callers["role elsewhere"]))
    await service.role.set_identity(Identity(jwks_url=URL))
    before = await sql.contents()
    mallorys = Identity(jwks_url="https://mallory.example/jwks")
    wrong = [(who, named) for who in ("alice", "bob", "alice elsewhere") for named in ("", acme, other)]
    wrong += [("role", other), ("role elsewhere", acme), ("role", "x"), ("role", str(new_id()))]
    for who, named in wrong:
        person = service.people[who]
        for call in (person.set_identity(mallorys, named), person.identity(named), person.delete_identity(named)):
            error = await refused(call)
            assert (error.reason, "identity" in error.message) == ("FORBIDDEN", True), (who, named)
    for named, reason in (("", "INVALID_OPTIONS"), ("x", "NOT_FOUND"), (str(new_id()), "NOT_FOUND")):
        person = service.system
        for call in (person.set_identity(mallorys, named), person.identity(named), person.delete_identity(named)):
            error = await refused(call)
            assert (error.reason, error.metadata.get("kind")) == (reason, "project" if named else None)
    assert await sql.contents() == before


RSA, EC = rsa_signer(), ec_signer()
MANY = jwks(*[EC.jwk(kid=str(n), use=None, alg=None) for n in range(KEYS_MAX + 1)]).decode()


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        (Identity(), "jwks_url", "either jwks_url"),
        (Identity(issuer="x"), "jwks_url", "either jwks_url"),
        (Identity(jwks_url=""), "jwks_url", "https://"),
        (Identity(jwks_url="id.example/jwks"), "jwks_url", "https://"),
        (Identity(jwks_url="http://id.example/jwks"), "jwks_url", "https://"),
        (Identity(jwks_url="https://127.0.0.1/jwks"), "jwks_url", "public internet"),
        (Identity(jwks_url="https://169.254.169.254/latest"), "jwks_url", "public internet"),
        (Identity(jwks_url="https://[::1]/jwks"), "jwks_url", "public internet"),
        (Identity(jwks_url="https://me:secret@id.example/"), "jwks_url", "user or password"),
        (Identity(jwks_url="https://id.example/" + "a" * URL_CHARS), "jwks_url", str(URL_CHARS)),
        (Identity(jwks=""), "jwks", "not JSON"),
        (Identity(jwks="-----BEGIN PUBLIC KEY-----"), "jwks", "not JSON"),
        (Identity(jwks=json.dumps(RSA.jwk())), "jwks", "list `keys`"),
        (Identity(jwks='{"keys": []}'), "jwks", "no key that can verify"),
        (Identity(jwks=jwks(RSA.jwk(use="enc")).decode()), "jwks", "no key that can verify"),
        (Identity(jwks=jwks(rsa_signer("weak", 1024)).decode()), "jwks", "no key that can verify"),
        (Identity(jwks=jwks(EC, RSA.private_jwk()).decode()), "jwks", "private or shared key"),
        (Identity(jwks=jwks(EC, {"kty": "oct", "k": "c2VjcmV0"}).decode()), "jwks", "private or shared key"),
        (Identity(jwks=MANY), "jwks", str(KEYS_MAX)),
        (Identity(jwks=DOCUMENT + "\0"), "jwks", "U+0000"),
        (Identity(jwks_url=URL, issuer="i" * (limits.IDENTITY_CLAIM_CHARS + 1)), "issuer", "500"),
        (Identity(jwks_url=URL, audience="a" * (limits.IDENTITY_CLAIM_CHARS + 1)), "audience", "500"),
        (Identity(jwks_url=URL, issuer="a\nb"), "issuer", "single line"),
        (Identity(jwks_url=URL, audience="a\0b"), "audience", "U+0000"),
    ],
)
async def test_what_could_verify_nothing_is_refused_in_words(
    service: Service, sql: Sql, given: Identity, field: str, words: str
) -> None:
    error = await refused(service.role.set_identity(given))
    assert error.reason in ("INVALID_OPTIONS", "CONTENT_TOO_LARGE")
    assert error.metadata["field"] == field
    assert words in error.message
    assert await sql.value("SELECT count(*) FROM conversation.identities") == 0


async def test_a_document_has_a_largest_size(service: Service) -> None:
    def padded(size: int) -> str:
        document: dict[str, Any] = {"keys": [EC.jwk()], "pad": ""}
        document["pad"] = "x" * (size - len(json.dumps(document)))
        return json.dumps(document)

    await service.role.set_identity(Identity(jwks=padded(limits.JWKS_BYTES)))
    error = await refused(service.role.set_identity(Identity(jwks=padded(limits.JWKS_BYTES + 1))))
    assert error.metadata == {"field": "jwks", "limit": str(limits.JWKS_BYTES), "unit": "bytes"}


async def test_allowed_hosts_may_be_named_though_they_are_private_and_without_tls(launch: Launcher) -> None:
    service = await launch(THREADLOOM_ALLOWED_HOSTS="id.internal, 10.1.0.0/16")
    for url in ("http://id.internal:8080/jwks", "https://10.1.2.3/jwks"):
        assert (await service.role.set_identity(Identity(jwks_url=url))).jwks_url == url
    for url in ("http://other.internal/jwks", "https://10.2.0.1/jwks"):
        assert (await refused(service.role.set_identity(Identity(jwks_url=url)))).metadata == {"field": "jwks_url"}


async def test_a_removed_project_takes_its_identity_along(
    service: Service, callers: dict[str, Caller], sql: Sql
) -> None:
    await service.role.set_identity(Identity(jwks_url=URL))
    await sql.rows("DELETE FROM conversation.projects WHERE id = %s", project_id(callers["role"]))
    assert await sql.value("SELECT count(*) FROM conversation.identities") == 0
