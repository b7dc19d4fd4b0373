"""A run that goes on with another model when one fails before it wrote anything (R30, R37)."""

from dataclasses import replace

import pytest

from kit.errors import ServiceError
from services.conversation import limits
from services.conversation.domain import events
from tests.contract.conversation.books import Books
from tests.contract.conversation.harness import Service, Sql
from tests.contract.conversation.orphans import an_orphan, insert
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1.run_event_pb2 import ModelSwitchTrace
from threadloom.conversation.v1.run_pb2 import RunOptions


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once."""
    monkeypatch.setattr("services.conversation.domain.retries.RETRY_DELAY_SECONDS", 0.01)


def asked(provider: FakeProvider) -> list[str]:
    """The models the provider was asked for."""
    return [call.body["model"] for call in provider.calls]


async def test_the_next_model_answers_when_the_first_is_not_tried_any_more(
    service: Service, books: Books, provider: FakeProvider, sql: Sql
) -> None:
    await books.price("second")
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake error=500 times=3 key=a]", fallback_models=["second"]).end()
    assert asked(provider) == ["fake-model"] * 3 + ["second"]
    assert (run.events[-1].run_finished.model, run.kinds.count("reply_started")) == ("second", 1)
    reply = await service.alice.reply(thread)
    assert (reply.model, reply.text) == ("second", provider.calls[3].text)
    (switch,) = [trace for trace in await service.alice.traces(thread) if trace.HasField("model_switch")]
    found = switch.model_switch
    assert (found.from_model, found.to_model) == ("fake-model", "second")
    assert found.reason
    calls = await sql.rows("SELECT model, attempt, status FROM conversation.api_calls ORDER BY started_at")
    assert calls == [*(("fake-model", n, "failed") for n in (1, 2, 3)), ("second", 4, "succeeded")]


@pytest.mark.parametrize("script", ["error=401", "error=404", "error=400"])
async def test_a_model_that_refuses_is_not_tried_again_before_the_next(
    service: Service, books: Books, provider: FakeProvider, script: str
) -> None:
    await books.price("second")
    thread = await service.alice.thread()
    run = await service.alice.run(thread, f"[fake {script} times=1 key=b]", fallback_models=["second"]).end()
    assert asked(provider) == ["fake-model", "second"]
    assert run.kinds[-1] == "run_finished"


async def test_a_model_without_a_price_is_passed_over(service: Service, books: Books, provider: FakeProvider) -> None:
    await books.price("second")
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello", model="nobody-knows", fallback_models=["second"]).end()
    assert asked(provider) == ["second"]
    assert run.events[-1].run_finished.model == "second"


async def test_a_failure_after_the_start_and_before_any_text_shows_one_start(
    service: Service, books: Books, provider: FakeProvider
) -> None:
    await books.price("second")
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake cut=0 times=3 key=c]", fallback_models=["second"]).end()
    assert asked(provider) == ["fake-model"] * 3 + ["second"]
    assert run.kinds.count("reply_started") == run.kinds.count("step_started") == 1
    assert run.events[-1].run_finished.model == "second"


async def test_when_all_fail_the_last_error_is_told(service: Service, books: Books, provider: FakeProvider) -> None:
    await books.price("second")
    await books.price("third")
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake error=401]", fallback_models=["second", "third"]).end()
    assert asked(provider) == ["fake-model", "second", "third"]
    assert run.events[-1].run_failed.before_reply


async def test_text_that_was_shown_is_not_followed_by_another_model_s(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake cut=2 chunks=4]", fallback_models=["second"]).end()
    assert run.kinds[-1] == "run_failed"
    assert asked(provider) == ["fake-model"]


async def test_no_money_is_no_reason_for_another_model(service: Service, books: Books, provider: FakeProvider) -> None:
    assert service.alice.caller.project is not None
    await books.quota(service.alice.caller.project, "alice", 0)
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello", fallback_models=["second"]).end()
    assert (run.events[-1].run_failed.error.code, provider.calls) == ("QUOTA_EXCEEDED", [])


async def test_an_heir_goes_on_with_the_model_the_run_had_come_to(
    service: Service, books: Books, provider: FakeProvider, sql: Sql
) -> None:
    await books.price("second")
    await books.price("third")
    thread = await service.alice.thread()
    switch = ModelSwitchTrace(from_model="fake-model", to_model="second", reason="down")
    options = RunOptions(fallback_models=["second", "third"]).SerializeToString()
    script = "[fake error=401 times=1 key=d]"
    orphan = an_orphan(thread, is_begun=False, text=script, options=options, model="second")
    log = [*orphan.log, *events.model_switch_trace("evt_001", 1, switch)]
    events.number(log, 1)
    run = await service.alice.follow(await insert(service, sql, replace(orphan, log=tuple(log)))).end()
    assert asked(provider) == ["second", "third"]
    assert run.events[-1].run_finished.model == "third"


@pytest.mark.parametrize(
    ("models", "is_taken"),
    [
        ([f"m{number}" for number in range(limits.FALLBACK_MODELS)], True),
        ([f"m{number}" for number in range(limits.FALLBACK_MODELS + 1)], False),
        (["a", "a"], False),
        (["mine"], False),
        ([""], False),
        (["a\nb"], False),
    ],
)
async def test_fallbacks_are_few_and_each_another(service: Service, models: list[str], is_taken: bool) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, "hello", model="mine", fallback_models=models)
    if is_taken:
        await run.end()
        return
    with pytest.raises(ServiceError) as refused:
        await run.end()
    assert refused.value.metadata["field"] == "fallback_models"
