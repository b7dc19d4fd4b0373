"""Each way a provider can fail has a clear outcome, and the thread works on the next message."""

import time
from dataclasses import dataclass

import pytest

from tests.contract.conversation.harness import Launcher, Reading, Service, Sql
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1.message_pb2 import Message, MessageStatus
from threadloom.conversation.v1.run_pb2 import RunStatus

FAILED = MessageStatus.MESSAGE_STATUS_FAILED


@dataclass(frozen=True)
class Fault:
    """A script, what it must lead to, and how often the provider is asked."""

    script: str
    code: str
    calls: int
    http_status: int = 0
    deltas: int | None = None  # of the text that is kept; None: it failed before the reply


FAULTS = {
    "empty answer": Fault("empty=1", "AI_PROVIDER_ERROR", 1, deltas=0),
    "reset in mid-text": Fault("cut=3", "AI_PROVIDER_ERROR", 1, deltas=3),
    "closed in mid-text": Fault("close=3", "AI_PROVIDER_ERROR", 1, deltas=3),
    "closed after the last delta": Fault("close=5", "AI_PROVIDER_ERROR", 1, deltas=5),
    "garbage in mid-text": Fault("garbage_at=2", "AI_PROVIDER_ERROR", 1, deltas=2),
    "error event in mid-text": Fault("error_at=2", "AI_PROVIDER_ERROR", 1, deltas=2),
    "silence in mid-text": Fault("hang=2", "AI_PROVIDER_TIMEOUT", 1, deltas=2),
    "silence before the answer": Fault("hang=-1", "AI_PROVIDER_TIMEOUT", 3),
    "401": Fault("error=401", "AI_PROVIDER_ERROR", 1, 401),
    "403": Fault("error=403", "AI_PROVIDER_ERROR", 1, 403),
    "404": Fault("error=404", "AI_PROVIDER_ERROR", 1, 404),
    "422": Fault("error=422", "AI_PROVIDER_ERROR", 1, 422),
    "500 always": Fault("error=500", "AI_PROVIDER_ERROR", 3, 500),
    "503 always": Fault("error=503 retry_after=0", "AI_PROVIDER_ERROR", 3, 503),
    "429 always": Fault("error=429 retry_after=0.01", "AI_RATE_LIMITED", 3, 429),
    "429 for a long time": Fault("error=429 retry_after=120", "AI_RATE_LIMITED", 1, 429),
    "silence after 200": Fault("hang=0", "AI_PROVIDER_TIMEOUT", 3, deltas=0),
    "closed after 200": Fault("close=0", "AI_PROVIDER_ERROR", 3, deltas=0),
    "reset after 200": Fault("cut=0", "AI_PROVIDER_ERROR", 3, deltas=0),
    "garbage after 200": Fault("garbage_at=0", "AI_PROVIDER_ERROR", 3, deltas=0),
}


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once."""
    monkeypatch.setattr("services.conversation.domain.retries.RETRY_DELAY_SECONDS", 0.01)


async def ended(service: Service, thread: str, text: str) -> Reading:
    """A run and its outcome; it may not be an RPC error."""
    return await service.alice.run(thread, text).end()


def check_reply(messages: list[Message], run: Reading, fault: Fault, said: str) -> None:
    """The reply keeps what was shown; before the reply there is none."""
    if fault.deltas is None:
        assert [bool(message.parts) for message in messages] == [True]
        assert "reply_started" not in run.kinds
        return
    reply, text = messages[-1], "".join(said.split(" ")[at] + " " for at in range(fault.deltas))
    assert (reply.status, reply.error.code, reply.text) == (FAILED, fault.code, text)
    assert run.text == text
    assert run.kinds.count("reply_started") == run.kinds.count("step_started") == 1


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("short_delays")
async def test_a_fault_has_a_clear_outcome_and_the_thread_works_on(
    launch: Launcher, provider: FakeProvider, sql: Sql, name: str
) -> None:
    fault = FAULTS[name]
    service = await launch(THREADLOOM_MODEL_IDLE_SECONDS="0.25")
    thread = await service.alice.thread()
    run = await ended(service, thread, f"[fake {fault.script}]")
    failed = run.events[-1].run_failed
    assert (failed.error.code, failed.before_reply) == (fault.code, fault.deltas is None)
    assert failed.error.provider_status == fault.http_status
    assert failed.error.message.endswith((".", "script"))
    calls = provider.calls
    assert len(calls) == fault.calls
    check_reply(await service.alice.messages(thread), run, fault, calls[-1].text)
    stored = await service.alice.get_run(run.run_id)
    assert (stored.status, stored.error) == (RunStatus.RUN_STATUS_FAILED, failed.error)
    recorded = "SELECT id::text, status, attempt FROM conversation.api_calls ORDER BY started_at"
    assert await sql.rows(recorded) == [(c.client_request_id, "failed", n) for n, c in enumerate(calls, 1)]
    good = await ended(service, thread, "and now? [fake chunks=2]")
    assert good.kinds[-1] == "run_finished"
    assert len(await service.alice.messages(thread)) == (3 if fault.deltas is None else 4)


@pytest.mark.usefixtures("short_delays")
async def test_a_call_that_was_silent_from_the_start_is_booked(launch: Launcher, provider: FakeProvider) -> None:
    service = await launch(THREADLOOM_MODEL_IDLE_SECONDS="0.25")
    thread = await service.alice.thread()
    await ended(service, thread, "[fake hang=-1]")
    booked = await service.books.settled()
    assert [(entry.input - 1, entry.output) for entry in booked] == [(call.prompt_tokens, 0) for call in provider.calls]
    assert all(entry.estimated for entry in booked)


async def test_a_wrong_key_is_told_without_the_key(launch: Launcher) -> None:
    service = await launch(OPENAI_API_KEY="bad")
    thread = await service.alice.thread()
    error = (await ended(service, thread, "hello")).events[-1].run_failed.error
    assert (error.code, error.provider, error.provider_status) == ("AI_PROVIDER_ERROR", "openai", 401)
    assert "API key is wrong" in error.message


async def test_no_key_is_told_and_nobody_is_asked(launch: Launcher, provider: FakeProvider) -> None:
    service = await launch(OPENAI_API_KEY="-")
    thread = await service.alice.thread()
    run = await ended(service, thread, "hello")
    error = run.events[-1].run_failed.error
    assert error.code == "AI_PROVIDER_NOT_CONFIGURED"
    assert "make provider-key PROVIDER=openai" in error.message
    assert "OPENAI_API_KEY" in error.message
    assert run.events[-1].run_failed.before_reply
    assert provider.calls == []
    assert len(await service.alice.messages(thread)) == 1


async def test_a_provider_that_is_not_there_is_told(launch: Launcher) -> None:
    service = await launch(OPENAI_BASE_URL="http://127.0.0.1:1/v1")
    thread = await service.alice.thread()
    error = (await ended(service, thread, "hello")).events[-1].run_failed.error
    assert (error.code, error.message) == ("AI_PROVIDER_ERROR", "The model provider cannot be reached.")


@pytest.mark.parametrize("script", ["error=500", "error=429 retry_after=0.02", "cut=0", "close=0", "error_at=0"])
@pytest.mark.usefixtures("short_delays")
async def test_a_failure_before_any_output_is_retried_and_shows_one_answer(
    service: Service, provider: FakeProvider, sql: Sql, script: str
) -> None:
    thread = await service.alice.thread()
    run = await ended(service, thread, f"[fake {script} times=2 key=a]")
    assert run.kinds[-1] == "run_finished"
    assert run.text == provider.calls[2].text == (await service.alice.reply(thread)).text
    assert run.kinds.count("reply_started") == run.kinds.count("step_started") == 1
    retries = [trace.retry for trace in await service.alice.traces(thread) if trace.HasField("retry")]
    assert [(retry.attempt, retry.withdrawn_chars) for retry in retries] == [(2, 0), (3, 0)]
    statuses = "SELECT status, attempt FROM conversation.api_calls ORDER BY started_at"
    assert await sql.rows(statuses) == [("failed", 1), ("failed", 2), ("succeeded", 3)]
    assert run.events[-1].run_finished.usage.input_tokens == await sql.value(
        "SELECT sum(tokens_in) FROM conversation.api_calls"
    )


async def test_a_short_retry_after_is_waited_for(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await ended(service, thread, "[fake error=429 retry_after=0.3 times=1 key=a]")
    assert run.kinds[-1] == "run_finished"
    first, second = provider.calls
    assert 0.29 < second.arrived - first.arrived < 1.5
    (retry,) = [trace.retry for trace in await service.alice.traces(thread) if trace.HasField("retry")]
    assert retry.delay.ToMilliseconds() == 300
    assert "429" in retry.reason


async def test_a_long_retry_after_is_handed_over(service: Service) -> None:
    thread = await service.alice.thread()
    started = time.monotonic()
    error = (await ended(service, thread, "[fake error=429 retry_after=120]")).events[-1].run_failed.error
    assert error.retry_after.ToSeconds() == 120
    assert time.monotonic() - started < 2


async def test_output_that_was_shown_is_never_answered_a_second_time(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await ended(service, thread, "[fake cut=2 times=1 key=a]")
    assert run.events[-1].run_failed.error.code == "AI_PROVIDER_ERROR"
    assert len(provider.calls) == 1
    assert [trace.error.error.code for trace in await service.alice.traces(thread) if trace.HasField("error")] == [
        "AI_PROVIDER_ERROR"
    ]


async def test_thinking_that_was_shown_counts_as_output(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await ended(service, thread, "[fake reasoning=3 cut=2 times=1 key=a]")
    assert run.kinds[-1] == "run_failed"
    assert len(provider.calls) == 1
    assert (await service.alice.traces(thread))[0].text


@pytest.mark.parametrize(
    ("variable", "code"),
    [("THREADLOOM_TURN_SECONDS", "TURN_TIMEOUT"), ("THREADLOOM_MODEL_CALL_SECONDS", "AI_PROVIDER_TIMEOUT")],
)
@pytest.mark.parametrize("script", ["chunks=3 hang=2", "chunks=1000 delay=20"])
async def test_a_time_limit_keeps_the_text_and_tells_which_it_was(
    launch: Launcher, provider: FakeProvider, variable: str, code: str, script: str
) -> None:
    service = await launch(**{variable: "0.4"})
    thread = await service.alice.thread()
    started = time.monotonic()
    run = await ended(service, thread, f"[fake {script}]")
    assert time.monotonic() - started < 1.4
    reply = await service.alice.reply(thread)
    assert run.events[-1].run_failed.error.code == reply.error.code == code
    assert reply.text == run.text != ""
    assert provider.calls[0].text.startswith(run.text)
    assert [trace.error.error.code for trace in await service.alice.traces(thread) if trace.HasField("error")] == [code]
    await provider.until(lambda calls: calls[0].client_closed)
    await ended(service, thread, "and now?")


async def test_a_turn_that_takes_too_long_is_never_told_as_a_call_that_does(launch: Launcher) -> None:
    service = await launch(THREADLOOM_TURN_SECONDS="0.4", THREADLOOM_MODEL_CALL_SECONDS="0.4")
    runs = [service.alice.run(await service.alice.thread(), "[fake hang=0]") for _ in range(30)]
    assert {(await run.end()).events[-1].run_failed.error.code for run in runs} == {"TURN_TIMEOUT"}


async def test_a_turns_time_goes_on_over_retries(launch: Launcher, provider: FakeProvider) -> None:
    service = await launch(THREADLOOM_TURN_SECONDS="0.5", THREADLOOM_MODEL_IDLE_SECONDS="0.2")
    thread = await service.alice.thread()
    started = time.monotonic()
    run = await ended(service, thread, "[fake hang=-1]")
    assert run.events[-1].run_failed.error.code in ("TURN_TIMEOUT", "AI_PROVIDER_TIMEOUT")
    assert time.monotonic() - started < 1.5
    assert len(provider.calls) <= 2


async def test_a_failure_before_the_reply_is_traced_at_the_message_it_left_unanswered(service: Service) -> None:
    thread = await service.alice.thread()
    await ended(service, thread, "[fake error=500 times=1 key=traced]")
    await ended(service, thread, "[fake error=401]")
    asked = [message for message in await service.alice.messages(thread) if message.parts]
    traces = [trace for trace in await service.alice.traces(thread) if trace.message_id == asked[-1].id]
    assert [trace.WhichOneof("payload") for trace in traces] == ["error"]
    assert traces[0].error.error.provider_status == 401
