"""Every route of the conversations dialect over HTTP: real services, real Postgres, real NATS."""

import asyncio
import json
import re
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from jsonschema import Draft202012Validator

from kit.money import format_usd
from tests.contract.gateway.calls import CONVERSATIONS, NOBODYS, ONE, path, refusal
from tests.fakes.provider import FakeProvider
from tests.support.billing import cost_nano
from tests.support.cluster import Cluster
from tests.support.http import Answer, Client

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"


def names(answer: Answer) -> list[str]:
    """The frames' names, runs of one name as one."""
    found = [frame.event for frame in answer.frames]
    return [name for at, name in enumerate(found) if at == 0 or found[at - 1] != name]


# ---------------------------------------------------------------- conversations


async def test_a_conversation_is_made_read_changed_and_deleted(alice: Client) -> None:
    made = await alice.call(
        "POST", CONVERSATIONS, {"title": "First", "system_prompt": "Be brief.", "default_model_slug": "m"}
    )
    assert re.fullmatch(UUID, made["id"])
    assert re.fullmatch(TIME, made["created_at"])
    assert made == {
        "id": made["id"],
        "user_id": "alice",
        "title": "First",
        "system_prompt": "Be brief.",
        "default_model_slug": "m",
        "created_at": made["created_at"],
        "updated_at": made["updated_at"],
        "active_run_id": None,
        "queued_runs": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "thinking_tokens": 0,
        "cached_tokens": 0,
        "cache_write_tokens": 0,
        "cost_usd": "0.000000000",
        "usage_estimated": False,
    }
    assert await alice.call("GET", path(made["id"])) == made
    changed = await alice.call("PATCH", path(made["id"]), {"title": "Second", "default_model_slug": None})
    assert (changed["title"], changed["system_prompt"], changed["default_model_slug"]) == ("Second", "Be brief.", None)
    assert changed["updated_at"] > made["updated_at"]
    assert await alice.call("DELETE", path(made["id"])) is None
    assert (await refusal(alice.call("GET", path(made["id"])))).status == 404
    assert (await refusal(alice.call("DELETE", path(made["id"])))).body["code"] == "THREAD_NOT_FOUND"


async def test_conversations_are_listed_page_by_page(users: dict[str, Client], cluster: Cluster) -> None:
    async with Client(cluster.http, cluster.headers(f"carol-{uuid4()}")) as carol:
        made = [await carol.create_conversation(title=f"{number}") for number in range(5)]
        found: list[str] = []
        cursor = ""
        while True:
            page = await carol.call("GET", f"{CONVERSATIONS}?limit=2{cursor}")
            found += [one["id"] for one in page["data"]]
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        assert found == made[::-1]
        bad = await refusal(carol.call("GET", f"{CONVERSATIONS}?cursor=nonsense"))
        assert (bad.status, bad.body["code"], bad.body["field"]) == (400, "INVALID_OPTIONS", "cursor")


async def test_a_key_makes_one_conversation(alice: Client) -> None:
    key = {"Idempotency-Key": str(uuid4())}
    made = await asyncio.gather(*(alice.call("POST", CONVERSATIONS, {"title": "Once"}, key) for _ in range(10)))
    assert len({one["id"] for one in made}) == 1
    other = await refusal(alice.call("POST", CONVERSATIONS, {"title": "Other"}, key))
    assert (other.status, other.body["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")


# ---------------------------------------------------------------- a turn


async def test_a_message_is_answered_and_kept(alice: Client) -> None:
    conversation = await alice.create_conversation()
    answer = await alice.ask(
        conversation, "[fake chunks=3 reasoning=2 completion_tokens=70 prompt_tokens=11 cached_tokens=1]"
    )
    thinking = ["trace_start", "trace_delta", "trace_end"]
    call = ["trace_start", "trace_delta", "delta", "trace_delta", "trace_end"]
    assert names(answer) == [*thinking, *call, "done"]
    assert answer.order() == sorted(set(answer.order()))
    done = answer.frames[-1].data
    assert (done["input_tokens"], done["output_tokens"], done["finish_reason"]) == (11, 70, "stop")
    question, reply = await alice.messages(conversation)
    assert (question["role"], question["status"], question["model"]) == ("user", "complete", None)
    assert (reply["role"], reply["status"], reply["content"]) == ("assistant", "complete", answer.text)
    assert (reply["id"], reply["run_id"]) == (done["message_id"], done["run_id"])
    assert done["cost_usd"] == format_usd(cost_nano(11, 70, cached_input_tokens=1))
    assert (done["cost_cents_usd"], done["cost_credits"]) == (150, 0)  # 150,100 nano-USD; 1,000 credits a USD
    for name in ("model", "input_tokens", "output_tokens", "thinking_tokens", "cached_tokens", "finish_reason"):
        assert reply[name] == done[name]
    for name in ("cost_usd", "cost_credits", "cost_cents_usd"):
        assert reply[name] == done[name]
    whole = await alice.call("GET", path(conversation))
    traces = (await alice.call("GET", path(conversation, "/traces")))["data"]
    (trace,) = [one for one in traces if one["type"] == "llm_request"]
    assert whole["cost_usd"] == trace["cost_usd"] == done["cost_usd"]
    assert answer.frames[-3].data["cost_usd"] == done["cost_usd"]
    assert (reply["error"], reply["cursor"], reply["conversation_id"]) == (None, None, conversation)
    assert (await alice.call("GET", path(conversation)))["title"].startswith("[fake")


async def test_parts_are_kept_as_parts(alice: Client) -> None:
    conversation = await alice.create_conversation()
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    await alice.ask(conversation, parts)
    await alice.ask(conversation, parts[:1])
    messages = await alice.messages(conversation)
    assert [message["content"] for message in messages if message["role"] == "user"] == [parts, "One"]


async def test_traces_are_listed(alice: Client) -> None:
    conversation = await alice.create_conversation()
    answer = await alice.ask(conversation, "[fake chunks=1 reasoning=2]")
    page = await alice.call("GET", path(conversation, "/traces"))
    thinking, call = page["data"]
    shown = "".join(
        frame.data["text"] for frame in answer.frames if frame.event == "trace_delta" and "text" in frame.data
    )
    assert (thinking["id"], thinking["type"], thinking["text"]) == ("evt_001", "thinking", shown)
    assert (call["id"], call["type"], call["step"]) == ("evt_002", "llm_request", 1)
    assert call["message_id"] == answer.frames[-1].data["message_id"]
    assert call["latency_ms"] >= 0
    assert re.fullmatch(TIME, call["ended_at"])
    first = await alice.call("GET", path(conversation, "/traces?limit=1"))
    second = await alice.call("GET", path(conversation, f"/traces?limit=1&cursor={first['next_cursor']}"))
    assert first["data"] + second["data"] == page["data"]
    of_message = await alice.call("GET", path(conversation, f"/traces?message_id={call['message_id']}"))
    assert of_message["data"] == page["data"]
    assert (await refusal(alice.call("GET", path(conversation, "/traces?message_id=msg_x")))).body["kind"] == "message"


async def test_messages_are_listed_page_by_page(alice: Client) -> None:
    conversation = await alice.create_conversation()
    for _ in range(2):
        await alice.ask(conversation, "Hello")
    whole = await alice.messages(conversation)
    found: list[Any] = []
    page: dict[str, Any] = {"next_cursor": ""}
    while page["next_cursor"] is not None:
        cursor = f"&cursor={page['next_cursor']}" if page["next_cursor"] else ""
        page = await alice.call("GET", path(conversation, f"/messages?limit=1{cursor}"))
        found += page["data"]
    assert found == whole
    assert len(whole) == 4


async def test_a_provider_that_refuses_is_a_status(alice: Client, provider: FakeProvider) -> None:
    conversation = await alice.create_conversation()
    limited = await refusal(alice.ask(conversation, "[fake error=429 retry_after=60]"))
    assert (limited.status, limited.body["code"], limited.body["retry_after"]) == (429, "rate_limit", 60)
    broken = await refusal(alice.ask(conversation, "[fake error=401]"))
    assert (broken.status, broken.body["code"]) == (502, "AI_PROVIDER_ERROR")
    assert all(message["role"] == "user" for message in await alice.messages(conversation))
    # The conversation works on.
    assert (await alice.ask(conversation, "Hello")).end is not None


async def test_a_failure_in_mid_text_is_an_event(alice: Client) -> None:
    conversation = await alice.create_conversation()
    answer = await alice.ask(conversation, "[fake chunks=5 cut=2]")
    assert answer.end is not None
    assert answer.end.event == "error"
    reply = (await alice.messages(conversation))[-1]
    assert (reply["status"], reply["content"]) == ("error", answer.text)
    assert reply["error"]["code"] == answer.end.data["code"]


async def test_one_key_is_one_run(alice: Client, provider: FakeProvider) -> None:
    conversation = await alice.create_conversation()

    async def post() -> Answer:
        found = Answer()
        async with alice.post(conversation, "[fake chunks=20 delay=10]", key="the-key") as frames:
            async for frame in frames:
                found.add(frame)
        return found

    answers = await asyncio.gather(*(post() for _ in range(10)))
    assert len({json.dumps([(one.id, one.data) for one in answer.frames]) for answer in answers}) == 1
    assert len(provider.calls) == 1
    reused = await refusal(anext_of(alice, conversation, "Something else", "the-key"))
    assert (reused.status, reused.body["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")


async def anext_of(client: Client, conversation: str, content: Any, key: str | None = None, **options: Any) -> None:
    async with client.post(conversation, content, key=key, **options) as frames:
        async for _ in frames:
            return


async def test_a_second_run_is_refused_and_saves_nothing(alice: Client, provider: FakeProvider) -> None:
    conversation = await alice.create_conversation()
    async with alice.post(conversation, "[fake chunks=3 gate=a gate_at=1]") as frames:
        await anext(frames)
        busy = await refusal(alice.ask(conversation, "Me too"))
        active = (await alice.call("GET", path(conversation)))["active_run_id"]
        assert (busy.status, busy.body["code"], busy.body["run_id"]) == (409, "RUN_IN_PROGRESS", active)
        provider.open_gate("a")
        async for _ in frames:
            pass
    assert len(await alice.messages(conversation)) == 2


# ---------------------------------------------------------------- resume and cancel


async def test_a_stream_resumes_at_any_frame(alice: Client) -> None:
    conversation = await alice.create_conversation()
    whole = await alice.ask(conversation, "[fake chunks=20 reasoning=2]")
    for at in range(len(whole.frames)):
        rest = Answer()
        async with alice.resume(conversation, whole.frames[at].id) as frames:
            async for frame in frames:
                rest.add(frame)
        # At the end the end is told again.
        assert rest.frames == (whole.frames[at + 1 :] or whole.frames[-1:])


async def test_an_open_run_is_joined_and_its_message_is_a_cursor(alice: Client, provider: FakeProvider) -> None:
    conversation = await alice.create_conversation()
    whole, joined, continued = Answer(), Answer(), Answer()
    async with alice.post(conversation, "[fake chunks=30 gate=b gate_at=10]") as frames:
        while "w9" not in whole.text:
            whole.add(await anext(frames))
        message = (await alice.messages(conversation))[-1]
        assert (message["status"], message["content"]) == ("streaming", whole.text)

        async def read(answer: Answer, last_id: str) -> None:
            async with alice.resume(conversation, last_id) as more:
                async for frame in more:
                    answer.add(frame)

        readers = [asyncio.create_task(read(joined, "")), asyncio.create_task(read(continued, message["cursor"]))]
        await asyncio.sleep(0.2)
        provider.open_gate("b")
        async for frame in frames:
            whole.add(frame)
        await asyncio.gather(*readers)
    assert joined.frames == whole.frames
    assert message["content"] + continued.text == whole.text


async def test_a_stream_of_nothing_is_204(alice: Client) -> None:
    conversation = await alice.create_conversation()
    async with alice.resume(conversation) as frames:
        assert [frame async for frame in frames] == []
    bad = await refusal(alice.call("GET", path(conversation, f"/stream?after={NOBODYS}:1.1")))
    assert (bad.status, bad.body["kind"]) == (404, "run")


async def test_cancel_keeps_the_text_and_frees_the_conversation(alice: Client, provider: FakeProvider) -> None:
    conversation = await alice.create_conversation()
    answer = Answer()
    async with alice.post(conversation, "[fake chunks=1000 delay=20]") as frames:
        while len(answer.text) < 20:
            answer.add(await anext(frames))
        cancelled = await alice.cancel(conversation)
        async for frame in frames:
            answer.add(frame)
    assert answer.end is not None
    assert (answer.end.event, answer.end.data["finish_reason"]) == ("done", "cancelled")
    assert cancelled == {"run_id": answer.end.data["run_id"], "status": "cancelled"}
    await provider.until(lambda calls: calls[-1].outcome == "closed_by_client")
    reply = (await alice.messages(conversation))[-1]
    assert (reply["status"], reply["content"], reply["finish_reason"]) == ("cancelled", answer.text, "cancelled")
    # Again, by name, and with nothing in progress: never an error.
    body = {"run_id": cancelled["run_id"]}
    assert (await alice.call("POST", path(conversation, "/cancel"), body))["status"] == "cancelled"
    assert await alice.cancel(conversation) == {"run_id": None, "status": "idle"}
    assert (await alice.ask(conversation, "Hello")).end is not None


async def test_a_ticket_opens_one_stream(alice: Client, cluster: Cluster, provider: FakeProvider) -> None:
    conversation = await alice.create_conversation()
    whole = await alice.ask(conversation, "Hello")
    ticket = (await alice.call("POST", "/v1/stream-tickets"))["ticket"]
    url = cluster.http[0] + path(conversation, f"/stream?after={whole.frames[0].id}&ticket={ticket}")
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as response:
            assert response.status == 200
            assert b"event: done" in await response.read()
        async with session.get(url) as response:
            assert response.status == 401
    assert ticket not in cluster.log("gateway")


# ---------------------------------------------------------------- what is refused


LONG = "x" * 200_001
BAD_MESSAGES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"content": LONG}, 413, "CONTENT_TOO_LARGE", "content"),
    ({"content": [{"type": "text", "text": "x" * 100_001}] * 2}, 413, "CONTENT_TOO_LARGE", "content"),
    ({"content": [{"type": "text", "text": "x"}] * 51}, 413, "CONTENT_TOO_LARGE", "content"),
    ({"content": []}, 400, "INVALID_OPTIONS", "content"),
    ({"content": ""}, 400, "INVALID_OPTIONS", "content"),
    ({"content": " \n"}, 400, "INVALID_OPTIONS", "content"),
    ({"content": "a\x00b"}, 400, "INVALID_OPTIONS", "content"),
    ({"content": "a\x1bb"}, 400, "INVALID_OPTIONS", "content"),
    ({"content": "a\x7fb"}, 400, "INVALID_OPTIONS", "content"),
    ({"content": "x", "model": "a\x00"}, 400, "INVALID_OPTIONS", "model"),
    ({"content": "x", "system": "a\x01"}, 400, "INVALID_OPTIONS", "system"),
    ({"content": "x", "temperature": 2.1}, 400, "INVALID_OPTIONS", "temperature"),
    ({"content": "x", "temperature": -0.1}, 400, "INVALID_OPTIONS", "temperature"),
    ({"content": "x", "max_output_tokens": 0}, 400, "INVALID_OPTIONS", "max_output_tokens"),
    ({"content": "x", "reasoning_effort": "x" * 100}, 413, "CONTENT_TOO_LARGE", "reasoning_effort"),
    ({"content": "x", "unknown": 1}, 400, "INVALID_OPTIONS", "unknown"),
]


@pytest.mark.parametrize(("body", "status", "code", "field"), BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
async def test_a_bad_message_is_refused_and_not_saved(
    alice: Client, provider: FakeProvider, body: dict[str, Any], status: int, code: str, field: str
) -> None:
    conversation = await alice.create_conversation()
    found = await refusal(alice.call("POST", path(conversation, "/messages"), body))
    assert (found.status, found.body["code"], found.body["field"]) == (status, code, field)
    assert await alice.messages(conversation) == []
    assert provider.calls == []


async def test_the_longest_message_is_taken(alice: Client, cluster: Cluster) -> None:
    conversation, text = await alice.create_conversation(), "😀" * 200_000
    body = json.dumps({"content": text}, ensure_ascii=False).encode()
    async with (
        aiohttp.ClientSession(headers=cluster.headers("alice")) as session,
        session.post(cluster.http[0] + path(conversation, "/messages"), data=body) as response,
    ):
        assert b"event: done" in await response.read()
    assert (await alice.messages(conversation))[0]["content"] == text


async def test_deleting_ends_an_open_stream(alice: Client) -> None:
    conversation = await alice.create_conversation()
    answer = Answer()
    async with alice.post(conversation, "[fake chunks=1000 delay=20]") as frames:
        answer.add(await anext(frames))
        await alice.call("DELETE", path(conversation))
        async for frame in frames:
            answer.add(frame)
    assert answer.end is not None


# ---------------------------------------------------------------- the document


async def test_answers_fit_the_served_document(alice: Client) -> None:
    document = await alice.call("GET", "/openapi.json")
    conversation = await alice.create_conversation(title="Fits")
    await alice.ask(conversation, "[fake chunks=2 reasoning=1]")
    await refusal(alice.ask(conversation, "[fake error=401]"))
    for template, url in (
        (CONVERSATIONS, CONVERSATIONS),
        (ONE, path(conversation)),
        (ONE + "/messages", path(conversation, "/messages")),
        (ONE + "/traces", path(conversation, "/traces")),
    ):
        schema = document["paths"][template]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        whole = {**schema, "components": document["components"]}
        Draft202012Validator(whole).validate(await alice.call("GET", url))
    problem = {"$ref": "#/components/schemas/Problem", "components": document["components"]}
    Draft202012Validator(problem).validate((await refusal(alice.call("GET", path(NOBODYS)))).body)
