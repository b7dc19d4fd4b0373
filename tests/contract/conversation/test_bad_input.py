"""What may not be sent is refused with its field, and nothing of it is saved."""

from typing import Any

import pytest
from grpc import StatusCode, aio

from kit.errors import ServiceError
from tests.contract.conversation.harness import Person, Service, Sql
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1 import conversation_service_pb2 as api
from threadloom.conversation.v1.message_pb2 import ContentPart

# (arguments of `Person.run`, the reason, the field)
BAD_RUNS: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "x" * 200_001}, "CONTENT_TOO_LARGE", "content"),
    ({"text": ["x" * 100_000, "y" * 100_001]}, "CONTENT_TOO_LARGE", "content"),
    ({"text": ["x"] * 51}, "CONTENT_TOO_LARGE", "content"),
    ({"text": []}, "INVALID_OPTIONS", "content"),
    ({"text": ""}, "INVALID_OPTIONS", "content"),
    ({"text": " \n "}, "INVALID_OPTIONS", "content"),
    ({"text": "a\x00b"}, "INVALID_OPTIONS", "content"),
    ({"text": "a\x1bb"}, "INVALID_OPTIONS", "content"),
    ({"text": "a\x7fb"}, "INVALID_OPTIONS", "content"),
    ({"text": "x", "model": "a\nb"}, "INVALID_OPTIONS", "model"),
    ({"text": "x", "model": "\u00ad"}, "INVALID_OPTIONS", "model"),
    ({"text": "x", "model": " "}, "INVALID_OPTIONS", "model"),
    ({"text": "x", "model": "m" * 201}, "CONTENT_TOO_LARGE", "model"),
    ({"text": "x", "system": "a\x00"}, "INVALID_OPTIONS", "system"),
    ({"text": "x", "system": "s" * 200_001}, "CONTENT_TOO_LARGE", "system"),
    ({"text": "x", "temperature": -0.1}, "INVALID_OPTIONS", "temperature"),
    ({"text": "x", "temperature": 2.1}, "INVALID_OPTIONS", "temperature"),
    ({"text": "x", "temperature": float("nan")}, "INVALID_OPTIONS", "temperature"),
    ({"text": "x", "max_output_tokens": 0}, "INVALID_OPTIONS", "max_output_tokens"),
    ({"text": "x", "max_output_tokens": -1}, "INVALID_OPTIONS", "max_output_tokens"),
    ({"text": "x", "reasoning_effort": "e" * 33}, "CONTENT_TOO_LARGE", "reasoning_effort"),
    ({"text": "x", "reasoning_effort": "a\tb"}, "INVALID_OPTIONS", "reasoning_effort"),
    ({"text": "x", "key": "k" * 256}, "CONTENT_TOO_LARGE", "request_id"),
    ({"text": "x", "key": "a\nb"}, "INVALID_OPTIONS", "request_id"),
    ({"text": "x", "key": "a\x00b"}, "INVALID_OPTIONS", "request_id"),
]
BAD_THREADS: list[tuple[dict[str, str], str, str]] = [
    ({"title": "t" * 201}, "CONTENT_TOO_LARGE", "title"),
    ({"title": "a\nb"}, "INVALID_OPTIONS", "title"),
    ({"title": "a\x00"}, "INVALID_OPTIONS", "title"),
    ({"system_prompt": "s" * 200_001}, "CONTENT_TOO_LARGE", "system_prompt"),
    ({"system_prompt": "a\x01"}, "INVALID_OPTIONS", "system_prompt"),
    ({"default_model": "  "}, "INVALID_OPTIONS", "default_model"),
    ({"default_model": "m" * 201}, "CONTENT_TOO_LARGE", "default_model"),
    ({"default_model": "a\rb"}, "INVALID_OPTIONS", "default_model"),
]
NO_IDS = [
    "",
    "x",
    "0",
    "../..",
    "a\x00b",
    "\U0001f600",
    "01900000-0000-7000-8000-00000000000G",
    "0" * 32,
    "x" * 100_000,
]


async def refused(person: Person, method: Any, request: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await person.call(method, request)
    return caught.value


async def test_bad_messages_are_refused_and_nothing_is_saved(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    before = await sql.contents()
    for given, reason, field in BAD_RUNS:
        refusal = await service.alice.run(thread, **given).refusal()
        assert (refusal.reason, refusal.metadata["field"]) == (reason, field), given
        assert refusal.message.endswith(".")
    assert await sql.contents() == before
    assert provider.calls == []


async def test_a_part_of_no_kind_is_refused(service: Service, sql: Sql) -> None:
    thread = await service.alice.thread()
    before = await sql.contents()
    refusal = await service.alice.send(api.RunRequest(thread_id=thread, parts=[ContentPart()])).refusal()
    assert (refusal.reason, refusal.metadata) == ("INVALID_OPTIONS", {"field": "content"})
    assert await sql.contents() == before


async def test_the_largest_message_is_taken_whole(service: Service, provider: FakeProvider) -> None:
    await service.books.price("m" * 200)
    thread = await service.alice.thread(system_prompt="s" * 200_000, title="t" * 200, default_model="m" * 200)
    text = "\U0001f600" * 200_000
    await service.alice.run(thread, text, key="k" * 255).end()
    assert (await service.alice.messages(thread))[0].text == text
    assert provider.calls[0].body["messages"][-1]["content"] == text
    await service.alice.run(thread, ["x" * 4_000] * 50).end()
    asked = (await service.alice.messages(thread))[2]
    assert (len(asked.parts), sum(len(part.text) for part in asked.parts)) == (50, 200_000)


@pytest.mark.parametrize("change", ["create", "update"])
async def test_bad_threads_are_refused_and_nothing_is_saved(service: Service, sql: Sql, change: str) -> None:
    thread, alice = await service.alice.thread(), service.alice
    before = await sql.contents()
    for given, reason, field in BAD_THREADS:
        if change == "create":
            refusal = await refused(alice, alice.conversation.CreateThread, api.CreateThreadRequest(**given))
        else:
            request = api.UpdateThreadRequest(thread_id=thread, **given)
            refusal = await refused(alice, alice.conversation.UpdateThread, request)
        assert (refusal.reason, refusal.metadata["field"]) == (reason, field), given
    assert await sql.contents() == before


async def test_an_update_changes_what_is_given_and_only_that(service: Service) -> None:
    thread = await service.alice.thread(title="a", system_prompt="b", default_model="c")
    alice = service.alice

    async def updated(**given: str) -> tuple[str, str, str]:
        request = api.UpdateThreadRequest(thread_id=thread, **given)
        found = (await alice.call(alice.conversation.UpdateThread, request)).thread
        return found.title, found.system_prompt, found.default_model

    assert await updated(title="x") == ("x", "b", "c")
    assert await updated(system_prompt="") == ("x", "", "c")
    assert await updated() == ("x", "", "c")


async def test_what_is_no_id_names_nothing(service: Service, sql: Sql) -> None:
    alice, stub = service.alice, service.alice.conversation
    before = await sql.contents()
    for id in NO_IDS:
        for method, request in (
            (stub.GetThread, api.GetThreadRequest(thread_id=id)),
            (stub.UpdateThread, api.UpdateThreadRequest(thread_id=id, title="x")),
            (stub.DeleteThread, api.DeleteThreadRequest(thread_id=id)),
            (stub.ListMessages, api.ListMessagesRequest(thread_id=id)),
            (stub.ListTraces, api.ListTracesRequest(thread_id=id)),
        ):
            assert (await refused(alice, method, request)).reason == "THREAD_NOT_FOUND", (id, request)
        assert (await refused(alice, stub.GetRun, api.GetRunRequest(run_id=id))).reason in (
            "NOT_FOUND",
            "THREAD_NOT_FOUND",
        )
        assert (await alice.run(id, "hello").refusal()).reason == "THREAD_NOT_FOUND"
        assert (await alice.follow("", thread=id).refusal()).reason == "THREAD_NOT_FOUND"
        assert (await alice.follow(id).refusal()).reason in ("NOT_FOUND", "THREAD_NOT_FOUND")
    assert await sql.contents() == before


async def test_bad_pages_are_refused(service: Service) -> None:
    thread, alice, stub = await service.alice.thread(), service.alice, service.alice.conversation
    for size, token, field in ((-1, "", "page_size"), (0, "x", "page_token"), (1, "\x00", "page_token")):
        for method, request in (
            (stub.ListThreads, api.ListThreadsRequest(page_size=size, page_token=token)),
            (stub.ListMessages, api.ListMessagesRequest(thread_id=thread, page_size=size, page_token=token)),
            (stub.ListTraces, api.ListTracesRequest(thread_id=thread, page_size=size, page_token=token)),
        ):
            refusal = await refused(alice, method, request)
            assert (refusal.reason, refusal.metadata) == ("INVALID_OPTIONS", {"field": field})
    big = api.ListMessagesRequest(thread_id=thread, page_size=2**31 - 1)
    assert list((await alice.call(stub.ListMessages, big)).messages) == []


async def test_bytes_that_are_no_message_do_not_hurt_the_server(service: Service) -> None:
    raw: Any = service.channel.unary_unary("/threadloom.conversation.v1.ConversationService/GetThread")
    for payload in (b"\xff" * 100, b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"):
        with pytest.raises(aio.AioRpcError) as caught:
            await raw(payload, metadata=service.alice.metadata)
        assert caught.value.code() in (StatusCode.INTERNAL, StatusCode.INVALID_ARGUMENT, StatusCode.UNKNOWN)
    assert await service.alice.thread()
