"""Who may call what: every RPC with the wrong caller. A new RPC fails here until it is in the table."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest_asyncio
from google.protobuf.message import Message
from grpc import aio

from kit.callers import CREDENTIAL_KEY, PROJECT_KEY, ROLE_KEY, USER_KEY
from kit.channels import to_service_error
from kit.errors import ServiceError
from kit.ids import new_id
from tests.contract.conversation.harness import CREDENTIAL, Person, Service, Sql, eventually, project_id
from tests.contract.conversation.hooks import Admin
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1 import conversation_service_pb2 as api
from threadloom.conversation.v1 import project_service_pb2 as projects
from threadloom.conversation.v1 import relay_service_pb2 as relay
from threadloom.conversation.v1 import webhook_service_pb2 as hooks
from threadloom.conversation.v1.message_pb2 import ContentPart
from threadloom.conversation.v1.run_pb2 import IfRunning, RunOptions

MALLORYS = projects.Identity(jwks_url="https://mallory.example/jwks.json")
HELLO = [ContentPart(text="hello")]
INTERRUPT = RunOptions(if_running=IfRunning.IF_RUNNING_INTERRUPT)
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Things:
    """What alice has."""

    thread: str
    run: str
    message: str
    project: str
    webhook: str
    delivery: str


@dataclass(frozen=True)
class Row:
    """What somebody would send for alice's things.

    `to_others` is the answer to bob, to another project's user of the same name and to another
    project's service role; `to_system` the answer to a service of ours on nobody's behalf. Only a
    service role may manage webhooks: that another project's reaches none is in test_webhooks.py too.
    """

    request: Callable[[Things], Message]
    to_others: str
    to_system: str = "FORBIDDEN"
    to_role_elsewhere: str = ""  # when it is another than `to_others`


# ListThreads and CreateThread name nothing of anybody: they are answered, and what they show is tested below.
TABLE: dict[str, Row] = {
    "ConversationService.CreateThread": Row(lambda _: api.CreateThreadRequest(), "own"),
    "ConversationService.ListThreads": Row(lambda _: api.ListThreadsRequest(), "own"),
    "ConversationService.GetThread": Row(lambda has: api.GetThreadRequest(thread_id=has.thread), "THREAD_NOT_FOUND"),
    "ConversationService.UpdateThread": Row(
        lambda has: api.UpdateThreadRequest(thread_id=has.thread, title="mine"), "THREAD_NOT_FOUND"
    ),
    "ConversationService.DeleteThread": Row(
        lambda has: api.DeleteThreadRequest(thread_id=has.thread), "THREAD_NOT_FOUND"
    ),
    "ConversationService.ListMessages": Row(
        lambda has: api.ListMessagesRequest(thread_id=has.thread), "THREAD_NOT_FOUND"
    ),
    "ConversationService.ListTraces": Row(
        lambda has: api.ListTracesRequest(thread_id=has.thread, message_id=has.message), "THREAD_NOT_FOUND"
    ),
    "ConversationService.Run": Row(lambda has: api.RunRequest(thread_id=has.thread, parts=HELLO), "THREAD_NOT_FOUND"),
    "ConversationService.StartRun": Row(
        lambda has: api.StartRunRequest(run=api.RunRequest(thread_id=has.thread, parts=HELLO)), "THREAD_NOT_FOUND"
    ),
    "ConversationService.Follow": Row(lambda has: api.FollowRequest(run_id=has.run), "NOT_FOUND"),
    "ConversationService.CancelRun": Row(lambda has: api.CancelRunRequest(run_id=has.run), "NOT_FOUND"),
    "ConversationService.GetRun": Row(lambda has: api.GetRunRequest(run_id=has.run), "NOT_FOUND"),
    "ProjectService.CreateProject": Row(lambda _: projects.CreateProjectRequest(slug="new"), "FORBIDDEN", "own"),
    "ProjectService.ResolveProject": Row(
        lambda has: projects.ResolveProjectRequest(id=has.project), "FORBIDDEN", "own"
    ),
    "ProjectService.SetProviderKey": Row(
        lambda has: projects.SetProviderKeyRequest(project_id=has.project, provider="openai", api_key="a-key-of-bobs"),
        "FORBIDDEN",
        "own",
    ),
    "ProjectService.ListProviderKeys": Row(
        lambda has: projects.ListProviderKeysRequest(project_id=has.project), "FORBIDDEN", "own"
    ),
    "ProjectService.DeleteProviderKey": Row(
        lambda has: projects.DeleteProviderKeyRequest(project_id=has.project, provider="openai"), "FORBIDDEN", "own"
    ),
    "ProjectService.SetIdentity": Row(
        lambda has: projects.SetIdentityRequest(project_id=has.project, identity=MALLORYS), "FORBIDDEN", "own"
    ),
    "ProjectService.GetIdentity": Row(
        lambda has: projects.GetIdentityRequest(project_id=has.project), "FORBIDDEN", "NOT_FOUND"
    ),
    "ProjectService.DeleteIdentity": Row(
        lambda has: projects.DeleteIdentityRequest(project_id=has.project), "FORBIDDEN", "own"
    ),
    "ProjectService.CreateStreamTicket": Row(lambda _: projects.CreateStreamTicketRequest(), "own"),
    "ProjectService.RedeemStreamTicket": Row(
        lambda _: projects.RedeemStreamTicketRequest(ticket="x"), "FORBIDDEN", "UNAUTHENTICATED"
    ),
    "RelayService.Relay": Row(lambda _: relay.RelayRequest(), "FORBIDDEN", "INVALID_OPTIONS"),  # an id is missing
    "WebhookService.CreateWebhook": Row(
        lambda _: hooks.CreateWebhookRequest(url="https://10.0.0.1/", events=["run.failed"]),
        "FORBIDDEN",
        to_role_elsewhere="INVALID_OPTIONS",
    ),
    "WebhookService.ListWebhooks": Row(lambda _: hooks.ListWebhooksRequest(), "FORBIDDEN", to_role_elsewhere="own"),
    "WebhookService.UpdateWebhook": Row(
        lambda has: hooks.UpdateWebhookRequest(webhook_id=has.webhook, enabled=True),
        "FORBIDDEN",
        to_role_elsewhere="NOT_FOUND",
    ),
    "WebhookService.RotateWebhookSecret": Row(
        lambda has: hooks.RotateWebhookSecretRequest(webhook_id=has.webhook), "FORBIDDEN", to_role_elsewhere="NOT_FOUND"
    ),
    "WebhookService.DeleteWebhook": Row(
        lambda has: hooks.DeleteWebhookRequest(webhook_id=has.webhook), "FORBIDDEN", to_role_elsewhere="own"
    ),
    "WebhookService.SendTestWebhook": Row(
        lambda has: hooks.SendTestWebhookRequest(webhook_id=has.webhook), "FORBIDDEN", to_role_elsewhere="NOT_FOUND"
    ),
    "WebhookService.ListWebhookDeliveries": Row(
        lambda has: hooks.ListWebhookDeliveriesRequest(webhook_id=has.webhook),
        "FORBIDDEN",
        to_role_elsewhere="NOT_FOUND",
    ),
    "WebhookService.RedeliverWebhookDelivery": Row(
        lambda has: hooks.RedeliverWebhookDeliveryRequest(delivery_id=has.delivery),
        "FORBIDDEN",
        to_role_elsewhere="NOT_FOUND",
    ),
}
# The same by the name of the thread instead of the run.
MORE: dict[str, Row] = {
    "ConversationService.Follow": Row(lambda has: api.FollowRequest(thread_id=has.thread), "THREAD_NOT_FOUND"),
    "ConversationService.CancelRun": Row(
        lambda has: api.CancelRunRequest(thread_id=has.thread, include_queued=True), "THREAD_NOT_FOUND"
    ),
    "ConversationService.Run": Row(
        lambda has: api.RunRequest(thread_id=has.thread, parts=HELLO, options=INTERRUPT), "THREAD_NOT_FOUND"
    ),
}
# What a service of ours may write.
THEIRS_TO_WRITE = ("ProjectService.CreateProject", "ProjectService.SetProviderKey", "ProjectService.SetIdentity")
OTHERS = ("bob", "alice elsewhere", "role elsewhere")
# Metadata that names no caller, beside the right credential.
NOBODIES: dict[str, dict[str, str]] = {
    "no role": {PROJECT_KEY: "P", USER_KEY: "alice"},
    "an unknown role": {ROLE_KEY: "root", PROJECT_KEY: "P", USER_KEY: "alice"},
    "no user": {ROLE_KEY: "user", PROJECT_KEY: "P"},
    "an empty user": {ROLE_KEY: "user", PROJECT_KEY: "P", USER_KEY: ""},
    "a blank user": {ROLE_KEY: "user", PROJECT_KEY: "P", USER_KEY: "%20%09"},
    "no project": {ROLE_KEY: "user", USER_KEY: "alice"},
    "an empty project": {ROLE_KEY: "service", PROJECT_KEY: ""},
    "a slug for a project": {ROLE_KEY: "service", PROJECT_KEY: "acme"},
}


@pytest_asyncio.fixture
async def things(service: Service, provider: FakeProvider, sql: Sql) -> Things:
    """A thread of alice's with a run that waits at a gate, its text at rest; her project's webhook, which is off."""
    thread = await service.alice.thread(title="alice's own", user_id="alice")
    run = await service.alice.run(thread, "[fake chunks=3 gate=g gate_at=1]").until(lambda reading: reading.text)
    message = (await service.alice.reply(thread)).id
    await eventually(lambda: sql.value("SELECT text <> '' FROM conversation.ai_messages WHERE role = 'assistant'"))
    admin = Admin(service)
    hook, _ = await admin.create("https://8.8.8.8/", ("run.failed",))
    await admin.call(admin.stub.UpdateWebhook, hooks.UpdateWebhookRequest(webhook_id=hook, enabled=False))
    ping = await admin.call(admin.stub.SendTestWebhook, hooks.SendTestWebhookRequest(webhook_id=hook))
    return Things(thread, run.run_id, message, str(project_id(service.alice.caller)), hook, ping.delivery.id)


def rpcs() -> set[str]:
    services = [
        service for file in (api, projects, relay, hooks) for service in file.DESCRIPTOR.services_by_name.values()
    ]
    return {f"{service.name}.{method.name}" for service in services for method in service.methods}


def all_rows() -> list[tuple[str, Row]]:
    return [*TABLE.items(), *MORE.items()]


async def answer(person: Person, name: str, request: Message, metadata: Metadata | None = None) -> str:
    """The reason the call was refused with, or `own` when it was answered."""
    service, _, method = name.partition(".")
    given = person.metadata if metadata is None else metadata
    call: Any
    if service == "RelayService":
        call = person.relay.Relay(iter([request]), metadata=given, timeout=5)
    else:
        stubs = {"ConversationService": person.conversation, "ProjectService": person.projects}
        call = getattr(stubs.get(service, person.webhooks), method)(request, metadata=given, timeout=5)
    try:
        if isinstance(call, aio.UnaryStreamCall | aio.StreamStreamCall):
            async for _ in call:
                call.cancel()
                return "own"
        else:
            await call
    except aio.AioRpcError as error:
        return to_service_error(error).reason
    return "own"


def test_every_rpc_is_in_the_table() -> None:
    assert rpcs() == set(TABLE)


async def test_others_cannot_tell_alices_things_from_nothing(service: Service, things: Things, sql: Sql) -> None:
    nothing = Things(str(new_id()), str(new_id()), str(new_id()), things.project, str(new_id()), str(new_id()))
    before = await sql.contents()
    for name, row in all_rows():
        for who in OTHERS:
            expected = row.to_role_elsewhere if who == "role elsewhere" and row.to_role_elsewhere else row.to_others
            if row.to_others == "own":
                continue
            for what in (things, nothing):
                assert await answer(service.people[who], name, row.request(what)) == expected, (name, who)
    assert await sql.contents() == before


async def test_a_service_of_ours_on_nobodys_behalf_has_no_threads(service: Service, things: Things, sql: Sql) -> None:
    before = await sql.contents()
    for name, row in all_rows():
        if name not in THEIRS_TO_WRITE:
            assert await answer(service.system, name, row.request(things)) == row.to_system, name
    assert await sql.contents() == before


async def test_a_caller_that_is_not_wholly_named_is_refused_everywhere(
    service: Service, things: Things, sql: Sql
) -> None:
    before = await sql.contents()
    for name, row in all_rows():
        for kind, named in NOBODIES.items():
            metadata = tuple((key, things.project if value == "P" else value) for key, value in named.items())
            given = ((CREDENTIAL_KEY, CREDENTIAL), *metadata)
            assert await answer(service.alice, name, row.request(things), given) == "INVALID_OPTIONS", (name, kind)
    assert await sql.contents() == before


async def test_without_the_right_credential_nothing_is_answered(service: Service, things: Things, sql: Sql) -> None:
    before = await sql.contents()
    for name, row in all_rows():
        for person in (service.alice, service.role, service.system):
            bare = tuple(pair for pair in person.metadata if pair[0] != CREDENTIAL_KEY)
            for credential in ((), ((CREDENTIAL_KEY, ""),), ((CREDENTIAL_KEY, CREDENTIAL + "x"),)):
                given = (*credential, *bare)
                assert await answer(service.alice, name, row.request(things), given) == "UNAUTHENTICATED", name
    assert await sql.contents() == before


async def test_lists_show_a_caller_its_own_and_the_service_role_its_project(service: Service, things: Things) -> None:
    async def listed(who: str) -> list[str]:
        person = service.people[who]
        found = await person.call(person.conversation.ListThreads, api.ListThreadsRequest())
        return [thread.id for thread in found.threads]

    bobs = await service.bob.thread()
    assert await listed("alice") == [things.thread]
    assert await listed("bob") == [bobs]
    assert set(await listed("role")) == {things.thread, bobs}
    for elsewhere in ("alice elsewhere", "role elsewhere"):
        assert await listed(elsewhere) == []


async def test_the_service_role_acts_for_the_user_it_names(service: Service, things: Things) -> None:
    assert await service.role.get_thread(things.thread)
    thread = await service.role.thread(user_id="bob")
    assert (await service.bob.get_thread(thread)).user_id == "bob"
    run = await service.role.run(thread, "hello").end()
    assert (await service.bob.reply(thread)).text == run.text
    await service.role.cancel(things.run)
    await service.role.delete(things.thread)


async def test_nobody_creates_a_thread_for_somebody_else_but_the_service_role(service: Service, sql: Sql) -> None:
    for person, user in ((service.bob, "alice"), (service.role, ""), (service.role, "\u200b")):
        assert await answer(person, "ConversationService.CreateThread", api.CreateThreadRequest(user_id=user)) == (
            "INVALID_OPTIONS"
        )
    assert await sql.value("SELECT count(*) FROM conversation.ai_threads") == 0


async def test_a_run_is_not_found_in_another_thread_of_its_own_user(service: Service, things: Things) -> None:
    other = await service.alice.thread()
    for request in (
        api.FollowRequest(thread_id=other, run_id=things.run),
        api.CancelRunRequest(thread_id=other, run_id=things.run),
    ):
        name = type(request).__name__.removesuffix("Request")
        assert await answer(service.alice, f"ConversationService.{name}", request) == "NOT_FOUND"


async def test_calls_at_once_never_see_each_others_caller(service: Service) -> None:
    own = {name: await service.people[name].thread() for name in ("alice", "bob", "alice elsewhere")}

    async def look(who: str, whose: str) -> bool:
        try:
            await service.people[who].get_thread(own[whose])
        except ServiceError:
            return False
        return True

    pairs = [(who, whose) for _ in range(20) for who in own for whose in own]
    seen = await asyncio.gather(*(look(*pair) for pair in pairs))
    assert seen == [who == whose for who, whose in pairs]


async def test_a_ticket_stands_for_its_caller_once(service: Service) -> None:
    for person, user, role in ((service.alice, "alice", "user"), (service.role, "", "service")):
        made = await person.call(person.projects.CreateStreamTicket, projects.CreateStreamTicketRequest())
        redeem = projects.RedeemStreamTicketRequest(ticket=made.ticket)
        calls = [service.system.call(service.system.projects.RedeemStreamTicket, redeem) for _ in range(10)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        good = [found for found in answers if not isinstance(found, BaseException)]
        assert [(found.user_id, found.role) for found in good] == [(user, role)]
        assert {found.reason for found in answers if isinstance(found, ServiceError)} == {"UNAUTHENTICATED"}


async def test_an_expired_ticket_is_refused_and_used_up(service: Service, sql: Sql) -> None:
    made = await service.alice.call(service.alice.projects.CreateStreamTicket, projects.CreateStreamTicketRequest())
    await sql.rows("UPDATE conversation.stream_tickets SET expires_at = clock_timestamp() - interval '1 second'")
    request = projects.RedeemStreamTicketRequest(ticket=made.ticket)
    assert await answer(service.system, "ProjectService.RedeemStreamTicket", request) == "UNAUTHENTICATED"


async def test_a_project_is_resolved_by_its_keys_its_slug_and_its_id_and_by_nothing_else(service: Service) -> None:
    stub, system = service.system.projects, service.system
    made = await system.call(stub.CreateProject, projects.CreateProjectRequest(slug="new-one"))
    kinds = projects.KeyKind
    for by, kind in (
        ({"key": made.anon_key}, kinds.KEY_KIND_ANON),
        ({"key": made.service_key}, kinds.KEY_KIND_SERVICE),
        ({"slug": "new-one"}, kinds.KEY_KIND_UNSPECIFIED),
        ({"id": made.project.id}, kinds.KEY_KIND_UNSPECIFIED),
    ):
        found = await system.call(stub.ResolveProject, projects.ResolveProjectRequest(**by))
        assert (found.project, found.key_kind) == (made.project, kind)
    for wrong in ({"key": ""}, {"key": made.anon_key[:-1]}, {"slug": "New-One"}, {"slug": "new-one\x00"}, {"id": "x"}):
        request = projects.ResolveProjectRequest(**wrong)
        assert await answer(system, "ProjectService.ResolveProject", request) == "NOT_FOUND", wrong
    again = projects.CreateProjectRequest(slug="new-one")
    assert await answer(system, "ProjectService.CreateProject", again) == "ALREADY_EXISTS"
    assert await answer(system, "ProjectService.CreateProject", projects.CreateProjectRequest(slug="A")) == (
        "INVALID_OPTIONS"
    )
