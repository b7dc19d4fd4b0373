"""Messages sent while an answer is in progress, over HTTP: waiting, interrupting, in the background."""

import asyncio
from typing import Any
from uuid import uuid4

import aiohttp
from jsonschema import Draft202012Validator

from tests.contract.conversation.harness import eventually
from tests.contract.gateway.calls import ONE, path, refusal
from tests.fakes.provider import FakeProvider
from tests.support.cluster import Cluster
from tests.support.http import Answer, Client

QUEUED_RUNS = 10
PACE_SECONDS = 0.1


async def waiting(client: Client, conversation: str, count: int) -> None:
    """Until so many messages wait."""

    async def look() -> bool:
        found = await client.call("GET", path(conversation))
        return found["active_run_id"] is not None and found["queued_runs"] == count

    await eventually(look)


async def start(client: Client, conversation: str, content: str, **options: Any) -> Any:
    """A message in the background."""
    body = {"content": content, "background": True, **options}
    return await client.call("POST", path(conversation, "/messages"), body)


async def follow(client: Client, conversation: str, last_id: str = "", into: Answer | None = None) -> Answer:
    answer = into or Answer()
    async with client.resume(conversation, last_id) as frames:
        async for frame in frames:
            answer.add(frame)
    return answer


def requests(provider: FakeProvider) -> list[list[str]]:
    return [[str(message["content"]) for message in call.body["messages"]] for call in provider.calls]


async def test_three_messages_in_a_row_are_answered_in_order_and_each_knows_the_answers_before(
    alice: Client, provider: FakeProvider
) -> None:
    conversation = await alice.create_conversation()
    asked = ["One [fake chunks=3 gate=q1 gate_at=1]", "Two [fake chunks=2]", "Three [fake chunks=2]"]
    asking = []
    for number, text in enumerate(asked):
        asking.append(asyncio.create_task(alice.ask(conversation, text, if_running="enqueue")))
        await waiting(alice, conversation, number)

    async def only_the_first_is_there() -> bool:
        return [message["role"] for message in await alice.messages(conversation)] == ["user", "assistant"]

    await eventually(only_the_first_is_there)
    provider.open_gate("q1")
    answers = await asyncio.gather(*asking)
    said = [text for pair in zip(asked, (answer.text for answer in answers), strict=True) for text in pair]
    messages = await alice.messages(conversation)
    assert [message["content"] for message in messages] == said
    assert [message["run_id"] for message in messages[1::2]] == [one.frames[-1].data["run_id"] for one in answers]
    assert requests(provider) == [said[:1], said[:3], said[:5]]


async def test_three_messages_within_300_ms_are_answered_in_order_and_each_knows_the_answers_before(
    alice: Client, provider: FakeProvider
) -> None:
    conversation = await alice.create_conversation()
    asked = ["One [fake chunks=3 first=1500 delay=50]", "Two [fake chunks=2]", "Three [fake chunks=2]"]
    asking = []
    for text in asked:
        asking.append(asyncio.create_task(alice.ask(conversation, text, if_running="enqueue")))
        await asyncio.sleep(PACE_SECONDS)  # time must pass here: what is tested is the pace of somebody who types fast
    assert not any(call.outcome == "finished" for call in provider.calls)  # the first answer is slower than the typing
    answers = await asyncio.gather(*asking)
    said = [text for pair in zip(asked, (answer.text for answer in answers), strict=True) for text in pair]
    assert [message["content"] for message in await alice.messages(conversation)] == said
    assert requests(provider) == [said[:1], said[:3], said[:5]]


async def test_an_interrupted_answer_keeps_its_text_and_the_next_one_knows_it(
    alice: Client, provider: FakeProvider
) -> None:
    conversation = await alice.create_conversation()
    endless, first = "One [fake chunks=3000 delay=10]", Answer()
    async with alice.post(conversation, endless) as frames:
        while len(first.text) < 20:
            first.add(await anext(frames))
        second = await alice.ask(conversation, "Two [fake chunks=2]", if_running="interrupt")
        async for frame in frames:
            first.add(frame)
    assert first.end is not None
    assert (first.end.event, first.end.data["finish_reason"]) == ("done", "cancelled")
    said = [endless, first.text, "Two [fake chunks=2]", second.text]
    messages = await alice.messages(conversation)
    assert [(message["status"], message["content"]) for message in messages[1::2]] == [
        ("cancelled", first.text),
        ("complete", second.text),
    ]
    assert requests(provider) == [said[:1], said[:3]]


async def test_a_background_message_is_accepted_at_once_and_followed_later(
    alice: Client, provider: FakeProvider
) -> None:
    conversation = await alice.create_conversation()
    key = {"Idempotency-Key": str(uuid4())}
    body = {"content": "One [fake chunks=3 gate=q2 gate_at=1]", "background": True}
    first = await alice.call("POST", path(conversation, "/messages"), body, key)
    second = await start(alice, conversation, "Two [fake chunks=2]", if_running="enqueue")
    assert (first["status"], second["status"]) == ("running", "queued")
    assert await alice.call("POST", path(conversation, "/messages"), body, key) == first
    busy = await refusal(start(alice, conversation, "Three"))
    assert (busy.status, busy.body["code"], busy.body["run_id"]) == (409, "RUN_IN_PROGRESS", first["run_id"])
    attached = [Answer(), Answer()]
    followers = [
        asyncio.create_task(follow(alice, conversation, into=attached[0])),
        asyncio.create_task(follow(alice, conversation, f"{first['run_id']}:0.0", into=attached[1])),
        asyncio.create_task(follow(alice, conversation, f"{second['run_id']}:0.0")),
    ]

    async def are_attached() -> bool:
        return all(answer.frames for answer in attached)

    await eventually(are_attached)  # the first one to the run that is active now
    provider.open_gate("q2")
    *of_first, of_second = await asyncio.gather(*followers)
    assert of_first[0].frames == of_first[1].frames
    messages = await alice.messages(conversation)
    assert [message["id"] for message in messages] == [
        *(first["user_message_id"], first["message_id"]),
        *(second["user_message_id"], second["message_id"]),
    ]
    assert (messages[1]["content"], messages[3]["content"]) == (of_first[0].text, of_second.text)
    done = await alice.call("POST", path(conversation, "/messages"), body, key)
    assert done == {**first, "status": "succeeded"}


async def test_what_waits_is_cancelled_alone_or_with_all(alice: Client, provider: FakeProvider) -> None:
    conversation = await alice.create_conversation()
    first = await start(alice, conversation, "One [fake chunks=3 gate=q3 gate_at=1]")
    runs = [await start(alice, conversation, f"{number}", if_running="enqueue") for number in range(3)]
    body = {"run_id": runs[1]["run_id"]}
    assert await alice.call("POST", path(conversation, "/cancel"), body) == {**body, "status": "cancelled"}
    told = await follow(alice, conversation, f"{runs[1]['run_id']}:0.0")
    assert [(frame.event, frame.data["finish_reason"]) for frame in told.frames] == [("done", "cancelled")]
    await waiting(alice, conversation, 2)
    both = await refusal(alice.call("POST", path(conversation, "/cancel"), {**body, "queued": True}))
    assert (both.status, both.body["field"]) == (400, "queued")
    stopped = await alice.call("POST", path(conversation, "/cancel"), {"queued": True})
    assert stopped == {"run_id": first["run_id"], "status": "cancelled"}
    assert (await alice.call("GET", path(conversation)))["queued_runs"] == 0
    assert len(await alice.messages(conversation)) == 2
    again = await alice.call("POST", path(conversation, "/cancel"), {"queued": True})
    assert again == {"run_id": None, "status": "idle"}


async def test_the_eleventh_that_wants_to_wait_is_refused_and_told_why(alice: Client, provider: FakeProvider) -> None:
    conversation = await alice.create_conversation()
    await start(alice, conversation, "One [fake chunks=3 gate=q4 gate_at=1]")
    for number in range(QUEUED_RUNS):
        assert (await start(alice, conversation, f"{number}", if_running="enqueue"))["status"] == "queued"
    full = await refusal(alice.ask(conversation, "more", if_running="enqueue"))
    assert (full.status, full.body["code"]) == (409, "RUN_IN_PROGRESS")
    assert "10 messages wait" in full.body["message"]
    await alice.call("DELETE", path(conversation))


async def test_a_stream_that_waits_gets_its_head_in_ten_seconds_and_its_answer_later(
    alice: Client, cluster: Cluster, provider: FakeProvider
) -> None:
    conversation = await alice.create_conversation()
    await start(alice, conversation, "One [fake chunks=3 gate=q5 gate_at=1]")
    body = {"content": "Two [fake chunks=1]", "if_running": "enqueue"}
    async with (
        aiohttp.ClientSession(headers=cluster.headers("alice")) as session,
        session.post(cluster.http[0] + path(conversation, "/messages"), json=body) as response,
    ):
        assert (response.status, len(response.headers["X-Run-Id"])) == (200, 36)
        assert (await alice.call("GET", path(conversation)))["queued_runs"] == 1
        provider.open_gate("q5")
        assert b"event: done" in await response.read()


async def test_a_background_answer_fits_the_served_document(alice: Client) -> None:
    document = await alice.call("GET", "/openapi.json")
    conversation = await alice.create_conversation()
    made = await start(alice, conversation, "[fake chunks=1]")
    responses = document["paths"][ONE + "/messages"]["post"]["responses"]
    schema = responses["202"]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": document["components"]}).validate(made)
    await follow(alice, conversation, f"{made['run_id']}:0.0")
