"""One effect per request, one run per thread (reports.md 188 to 192; durability.md 22, 23)."""

import asyncio

from google.protobuf.json_format import MessageToDict

from kit.errors import ServiceError
from tests.contract.conversation.harness import Launcher, Person, Reading, Service, Sql
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1 import conversation_service_pb2 as api
from threadloom.conversation.v1.message_pb2 import MessageRole

USER = MessageRole.MESSAGE_ROLE_USER


async def outcome(reading: Reading) -> str:
    """`done`, or the reason of the refusal."""
    try:
        await reading.end()
    except ServiceError as error:
        return error.reason
    return "done" if reading.kinds[-1] == "run_finished" else "failed"


async def create(person: Person, **fields: str) -> str:
    answer = await person.call(person.conversation.CreateThread, api.CreateThreadRequest(**fields))
    return str(answer.thread.id)


async def refused(person: Person, **fields: str) -> str:
    try:
        return await create(person, **fields)
    except ServiceError as error:
        return error.reason


async def test_50_equal_requests_at_once_are_one_run_and_one_call(
    launch: Launcher, provider: FakeProvider, sql: Sql
) -> None:
    services = [await launch(), await launch()]
    thread = await services[0].alice.thread()
    runs = [services[at % 2].alice.run(thread, "[fake chunks=3 delay=20]", key="a") for at in range(50)]
    for run in runs:
        await run.end(20)
    assert len({run.run_id for run in runs}) == 1
    assert len(provider.calls) == 1
    assert {run.text for run in runs} == {provider.calls[0].text}
    assert await sql.value("SELECT count(*) FROM conversation.ai_messages") == 2
    assert await sql.value("SELECT count(*) FROM conversation.ai_runs") == 1


async def test_the_same_key_after_the_end_gives_the_same_events(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    first = await service.alice.run(thread, "hello", key="a").end()
    second = await service.alice.run(thread, "hello", key="a").end()
    assert [MessageToDict(event) for event in second.events] == [MessageToDict(event) for event in first.events]
    assert len(provider.calls) == 1
    assert len(await service.alice.messages(thread)) == 2


async def test_the_same_key_with_another_body_is_refused(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    await service.alice.run(thread, "hello", key="a").end()
    assert await outcome(service.alice.run(thread, "hello!", key="a")) == "IDEMPOTENCY_KEY_REUSED"
    assert await outcome(service.alice.run(thread, "hello", key="a", temperature=1.0)) == "IDEMPOTENCY_KEY_REUSED"
    assert len(provider.calls) == 1
    assert len(await service.alice.messages(thread)) == 2


async def test_a_key_is_its_callers_and_its_threads_own(service: Service, provider: FakeProvider) -> None:
    for person in (service.alice, service.bob, service.people["alice elsewhere"]):
        for _ in range(2):
            assert await outcome(person.run(await person.thread(), "hello", key="a")) == "done"
    assert len(provider.calls) == 6


async def test_a_failure_before_the_reply_frees_the_key_and_reuses_the_message(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    text = "[fake error=401 times=2 key=a]"
    first = service.alice.run(thread, text, key="a")
    assert await outcome(first) == "failed"
    (kept,) = await service.alice.messages(thread)
    second = service.alice.run(thread, text, key="a")
    assert await outcome(second) == "failed"
    third = service.alice.run(thread, text, key="a")
    assert await outcome(third) == "done"
    asked, reply = await service.alice.messages(thread)
    assert (asked.id, asked.text) == (kept.id, text)
    assert asked.run_id == reply.run_id == third.run_id
    assert len({first.run_id, second.run_id, third.run_id}) == 3
    assert third.events[0].run_started.user_message_id == kept.id
    assert provider.calls[2].body["messages"] == [{"role": "user", "content": text}]
    assert (await service.alice.run(thread, text, key="a").end()).run_id == third.run_id
    assert await sql.value("SELECT count(*) FROM conversation.api_calls") == len(provider.calls) == 3


async def test_20_equal_retries_at_once_of_a_freed_key_are_one_run(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    text = "[fake error=401 times=1 key=a]"
    assert await outcome(service.alice.run(thread, text, key="a")) == "failed"
    runs = [service.alice.run(thread, text, key="a") for _ in range(20)]
    assert {await outcome(run) for run in runs} == {"done"}
    assert len({run.run_id for run in runs}) == 1
    assert len(provider.calls) == 2
    assert await sql.value("SELECT count(*) FROM conversation.ai_messages") == 2


async def test_a_freed_key_with_another_body_is_still_refused(service: Service) -> None:
    thread = await service.alice.thread()
    assert await outcome(service.alice.run(thread, "[fake error=401]", key="a")) == "failed"
    assert await outcome(service.alice.run(thread, "hello", key="a")) == "IDEMPOTENCY_KEY_REUSED"


async def test_a_freed_key_does_not_get_past_a_run_in_progress(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    text = "[fake error=401 times=1 key=a]"
    assert await outcome(service.alice.run(thread, text, key="a")) == "failed"
    other = await service.alice.run(thread, "[fake hang=0]").until(lambda reading: "reply_started" in reading.kinds)
    refusal = await service.alice.run(thread, text, key="a").refusal()
    assert (refusal.reason, refusal.metadata) == ("RUN_IN_PROGRESS", {"run_id": other.run_id})
    await service.alice.cancel(other.run_id)
    assert await outcome(service.alice.run(thread, text, key="a")) == "done"
    assert [message.role for message in await service.alice.messages(thread)].count(USER) == 2
    assert len(provider.calls) == 3


async def test_a_retried_message_is_what_the_model_answers_though_others_came_between(
    service: Service, provider: FakeProvider
) -> None:
    thread = await service.alice.thread()
    text = "first question [fake error=401 times=1 key=a]"
    assert await outcome(service.alice.run(thread, text, key="a")) == "failed"
    assert await outcome(service.alice.run(thread, "second question [fake chunks=1]")) == "done"
    assert await outcome(service.alice.run(thread, text, key="a")) == "done"
    asked = provider.calls[-1].body["messages"]
    assert asked[-1] == {"role": "user", "content": text}
    assert [message["content"].split(" [")[0] for message in asked[:-1]] == ["second question", provider.calls[1].text]


async def test_of_20_messages_at_once_one_runs_and_the_others_are_not_saved(
    launch: Launcher, provider: FakeProvider
) -> None:
    services = [await launch(), await launch()]
    thread = await services[0].alice.thread()
    runs = [services[at % 2].alice.run(thread, f"[fake chunks=2 gate=g] {at}") for at in range(20)]
    waiting = asyncio.gather(*(outcome(run) for run in runs))
    await asyncio.wait({run.task for run in runs}, return_when=asyncio.FIRST_COMPLETED)
    while sum(run.task.done() for run in runs) < 19:
        await asyncio.wait({run.task for run in runs if not run.task.done()}, return_when=asyncio.FIRST_COMPLETED)
    provider.open_gate("g")
    outcomes = await waiting
    assert sorted(outcomes) == ["RUN_IN_PROGRESS"] * 19 + ["done"]
    winner = runs[outcomes.index("done")]
    assert {run.error.metadata["run_id"] for run in runs if run.error} == {winner.run_id}
    asked, reply = await services[0].alice.messages(thread)
    assert asked.text == f"[fake chunks=2 gate=g] {outcomes.index('done')}"
    assert reply.text == provider.calls[0].text
    assert len(provider.calls) == 1


async def test_a_refused_message_may_be_sent_again_under_its_key(service: Service) -> None:
    thread = await service.alice.thread()
    other = await service.alice.run(thread, "[fake hang=0]").until(lambda reading: reading.events)
    assert await outcome(service.alice.run(thread, "hello", key="a")) == "RUN_IN_PROGRESS"
    await service.alice.cancel(other.run_id)
    assert await outcome(service.alice.run(thread, "hello", key="a")) == "done"


async def test_creating_a_thread_twice_under_one_key_makes_one(service: Service, sql: Sql) -> None:
    made = await asyncio.gather(*(create(service.alice, title="x", request_id="a") for _ in range(10)))
    assert len(set(made)) == 1
    assert await sql.value("SELECT count(*) FROM conversation.ai_threads") == 1
    assert await refused(service.alice, title="y", request_id="a") == "IDEMPOTENCY_KEY_REUSED"
    assert await create(service.bob, title="x", request_id="a") != made[0]
    await service.alice.delete(made[0])
    assert await refused(service.alice, title="x", request_id="a") == "THREAD_NOT_FOUND"


async def test_the_key_of_a_deleted_threads_run_is_not_answered_again(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    await service.alice.run(thread, "hello", key="a").end()
    await service.alice.delete(thread)
    assert await outcome(service.alice.run(thread, "hello", key="a")) == "THREAD_NOT_FOUND"
    assert len(provider.calls) == 1
