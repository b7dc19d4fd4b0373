"""A message is answered: what is streamed, stored, traced and counted is the same."""

from tests.contract.conversation.harness import Service, Sql
from tests.fakes.provider import FakeProvider
from tests.support.billing import TOKENIZER, cost_nano
from threadloom.common.v1.money_pb2 import Money
from threadloom.conversation.v1.message_pb2 import MessageRole, MessageStatus, Usage
from threadloom.conversation.v1.run_pb2 import RunStatus

PLAIN = [
    "run_started",
    "reply_started",
    "step_started",
    "trace_started",
    "text_delta",
    "trace_delta",
    "trace_ended",
    "step_finished",
    "run_finished",
]


async def test_the_events_of_a_plain_run_come_in_order(service: Service) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello").end()
    # Deltas are merged as they come; whatever their number, they are neighbours.
    kinds = [
        kind for kind, before in zip(run.kinds, ["", *run.kinds], strict=False) if (kind, before) != ("text_delta",) * 2
    ]
    assert kinds == PLAIN
    assert [event.seq for event in run.events] == list(range(1, len(run.events) + 1))
    assert {(batch.run_id, batch.thread_id) for batch in run.batches} == {(run.run_id, thread)}


async def test_the_text_is_the_providers_and_is_stored(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, ["hello", "", "world"]).end()
    asked, reply = await service.alice.messages(thread)
    assert run.text == reply.text == provider.calls[0].text
    assert (asked.text, [part.text for part in asked.parts]) == ("hello\n\nworld", ["hello", "", "world"])
    assert (asked.role, asked.status) == (MessageRole.MESSAGE_ROLE_USER, MessageStatus.MESSAGE_STATUS_COMPLETE)
    assert (reply.role, reply.status) == (MessageRole.MESSAGE_ROLE_ASSISTANT, MessageStatus.MESSAGE_STATUS_COMPLETE)
    assert {asked.run_id, reply.run_id} == {run.run_id}
    assert (asked.position, reply.position) == (1, 2)
    assert asked.create_time.ToNanoseconds() < reply.create_time.ToNanoseconds()
    assert (await service.alice.get_thread(thread)).title == "hello world"


async def test_the_figures_of_the_end_are_the_providers_and_are_stored(service: Service, sql: Sql) -> None:
    thread = await service.alice.thread()
    script = (
        "[fake reasoning=2 prompt_tokens=100 completion_tokens=50 reasoning_tokens=20 cached_tokens=30 finish=length]"
    )
    run = await service.alice.run(thread, script).end()
    done, reply = run.events[-1].run_finished, await service.alice.reply(thread)
    cost = cost_nano(100, 50, cached_input_tokens=30)
    usage = Usage(input_tokens=100, output_tokens=50, thinking_tokens=20, cached_tokens=30, cost=Money(nano_usd=cost))
    assert done.usage == reply.usage == usage
    assert (done.finish_reason, done.model, done.provider) == ("length", "fake-model", "openai")
    assert (reply.finish_reason, reply.model, reply.provider) == ("length", "fake-model", "openai")
    assert done.cost_credits == reply.cost_credits == cost
    assert (await service.alice.get_thread(thread)).usage == usage
    assert not done.HasField("text")
    assert done.latency.ToNanoseconds() > 0
    assert done.latency.ToMilliseconds() == reply.latency_ms
    assert await sql.rows(
        "SELECT status, tokens_in, tokens_out, thinking_tokens, cached_tokens, usage_source, http_status"
        " FROM conversation.api_calls"
    ) == [("succeeded", 100, 50, 20, 30, "provider", 200)]


async def test_a_provider_that_reports_no_usage_is_estimated_and_flagged(service: Service) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, '[fake usage=never chunks=1 text="12345678"]').end()
    usage = run.events[-1].run_finished.usage
    assert (usage.output_tokens, usage.estimated) == (TOKENIZER.count("12345678"), True)


async def test_every_api_call_is_one_call_at_the_provider(service: Service, provider: FakeProvider, sql: Sql) -> None:
    thread = await service.alice.thread()
    for _ in range(3):
        await service.alice.run(thread, "hello").end()
    recorded = await sql.rows("SELECT id::text, status, attempt, step FROM conversation.api_calls ORDER BY started_at")
    assert recorded == [(call.client_request_id, "succeeded", 1, 1) for call in provider.calls]


async def test_traces_are_stored_with_their_text_and_figures(service: Service) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake reasoning=3]").end()
    thinking, request = await service.alice.traces(thread)
    assert (thinking.trace_id, thinking.WhichOneof("payload")) == ("evt_001", "thinking")
    assert thinking.text == "".join(e.trace_delta.text for e in run.events if e.HasField("trace_delta"))
    assert thinking.text
    assert request.llm_request.model == "fake-model"
    assert request.llm_request.usage == run.events[-1].run_finished.usage
    for trace in (thinking, request):
        assert (trace.run_id, trace.message_id) == (run.run_id, (await service.alice.reply(thread)).id)
        assert trace.HasField("end_time")


async def test_the_model_is_given_the_prompts_the_history_and_the_options(
    service: Service, provider: FakeProvider
) -> None:
    thread = await service.alice.thread(system_prompt="Be brief.", default_model="thread-model")
    first = await service.alice.run(thread, "one").end()
    await service.alice.run(
        thread,
        "two",
        model="run-model",
        system="In French.",
        temperature=0.0,
        max_output_tokens=7,
        reasoning_effort="low",
    ).end()
    bodies = [call.body for call in provider.calls]
    assert [body["model"] for body in bodies] == ["thread-model", "run-model"]
    assert "temperature" not in bodies[0]
    assert bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief.\n\nIn French."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "two"},
    ]
    assert (bodies[1]["temperature"], bodies[1]["max_completion_tokens"], bodies[1]["reasoning_effort"]) == (
        0,
        7,
        "low",
    )


async def test_a_run_that_ended_reads_as_ended(service: Service) -> None:
    thread = await service.alice.thread()
    streamed = await service.alice.run(thread, "hello").end()
    run = await service.alice.get_run(streamed.run_id)
    assert (run.status, run.last_seq, run.takeovers) == (RunStatus.RUN_STATUS_SUCCEEDED, len(streamed.events), 0)
    assert run.HasField("finish_time")
    assert not (await service.alice.get_thread(thread)).active_run_id


async def test_a_reader_that_leaves_does_not_end_the_run(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, "[fake chunks=4 gate=leave gate_at=2]")
    await run.until(lambda reading: reading.text)
    await run.leave()
    provider.open_gate("leave")
    whole = await service.alice.follow(run.run_id).end()
    assert whole.text == (await service.alice.reply(thread)).text == provider.calls[0].text
    assert provider.calls[0].outcome == "finished"


async def test_a_long_history_is_given_whole_and_in_order(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    provider.script(chunks=1, text="yes")
    for number in range(60):
        await service.alice.run(thread, str(number)).end()
    expected = [{"role": "user", "content": "0"}]
    for number in range(1, 60):
        expected += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": str(number)}]
    assert provider.calls[-1].body["messages"] == expected
