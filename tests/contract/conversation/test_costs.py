"""What a turn costs, on every surface of the service and in billing's books."""

import asyncio
import time
from dataclasses import fields

import pytest

from kit.ids import new_id
from kit.money import format_usd, parse_usd
from kit.pricing import upper_bound
from kit.rates import from_message
from services.conversation import limits
from services.conversation.outbox import Outbox
from services.conversation.settings import Settings
from tests.contract.conversation.books import Books
from tests.contract.conversation.harness import Launcher, Reading, Service, Sql, eventually, project_id
from tests.contract.conversation.orphans import HELD_INPUT, HELD_OUTPUT, SHOWN, an_orphan, insert
from tests.fakes.provider import FakeProvider
from tests.support.billing import RATES, TOKENIZER, cost_nano, input_bound
from tests.support.databases import Database
from tests.support.holds import Hold
from threadloom.conversation.v1.message_pb2 import MessageStatus, Usage

# The price lists and sums are those of tests/unit/kit/test_pricing.py.
PUBLISHED = [
    (
        "gpt-5-mini",
        "prompt_tokens=10000 cached_tokens=8000 completion_tokens=2000 reasoning_tokens=1500",
        "0.004700000",
    ),
    ("claude-sonnet-4-5", "prompt_tokens=12307 cache_write_tokens=12304 completion_tokens=550", "0.054399000"),
    ("gemini-2.5-pro", "prompt_tokens=250000 cached_tokens=40000 completion_tokens=2000", "0.565000000"),
]

LEASE = "INSERT INTO conversation.workers VALUES (%s, clock_timestamp() + interval '1 minute')"
# What an heir's first commit leaves.
CLOSE = (
    "UPDATE conversation.api_calls SET status = 'cut', tokens_in = 30, tokens_out = 7, cost_nano = %s,"
    " usage_source = 'estimated', ended_at = clock_timestamp() WHERE id = %s"
)
COUNT = "UPDATE conversation.ai_threads SET tokens_in = 30, tokens_out = 7, cost_nano = %s, usage_estimated = true"
BEGIN_NEXT = (
    "INSERT INTO conversation.api_calls (id, project_id, user_id, thread_id, run_id, message_id, step, attempt, model)"
    " SELECT gen_random_uuid(), project_id, user_id, thread_id, run_id, message_id, 2, 2, model"
    " FROM conversation.api_calls WHERE id = %s"
)


def end_of(run: Reading) -> Usage:
    """The totals a run ended with."""
    event = run.events[-1]
    return event.run_finished.usage if event.HasField("run_finished") else event.run_failed.usage


@pytest.mark.parametrize(("model", "figures", "usd"), PUBLISHED)
async def test_a_published_price_is_the_same_to_the_last_digit_everywhere(
    service: Service, books: Books, model: str, figures: str, usd: str
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, f"[fake chunks=2 {figures}]", model=model).end()
    nano, done = parse_usd(usd), run.events[-1].run_finished
    reply, (trace,) = await service.alice.reply(thread), await service.alice.traces(thread)
    (step,) = [event.step_finished for event in run.events if event.HasField("step_finished")]
    for usage in (done.usage, step.usage, trace.llm_request.usage, reply.usage):
        assert format_usd(usage.cost.nano_usd) == usd
    assert done.cost_credits == reply.cost_credits == nano  # a credit a nano-USD
    assert (await service.alice.get_thread(thread)).usage.cost.nano_usd == nano
    (entry,) = await books.settled()
    assert (entry.model, entry.cost, entry.estimated) == (model, nano, False)


async def test_every_call_of_a_run_is_in_its_total(service: Service, books: Books) -> None:
    thread = await service.alice.thread()
    await service.alice.run(thread, "first [fake chunks=3]").end()
    run = await service.alice.run(thread, "second [fake close=0 times=2 key=a]").end()
    entries = await books.settled()
    assert [entry.estimated for entry in entries] == [False, True, True, False]
    assert end_of(run).cost.nano_usd == sum(entry.cost for entry in entries[1:])
    assert end_of(run).estimated
    assert (await service.alice.get_thread(thread)).usage.cost.nano_usd == sum(entry.cost for entry in entries)


async def test_a_refused_call_costs_nothing_and_frees_its_hold(service: Service, books: Books, sql: Sql) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake error=401]").end()
    assert end_of(run) == Usage()
    assert await books.settled() == []
    assert await sql.rows("SELECT status FROM billing.holds") == [("released",)]


async def test_a_running_count_does_not_stand_for_a_cut_answer(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    script = "[fake usage=first prompt_tokens=50 chunks=400 delay=5]"
    run = await service.alice.run(thread, script).until(lambda reading: len(reading.text) > 200)
    await service.alice.cancel(run.run_id)
    usage = end_of(await run.end())
    assert (usage.input_tokens, usage.estimated) == (50, True)
    assert usage.output_tokens == TOKENIZER.count(run.text)


async def test_reasoning_counted_beside_the_output_is_added_once(service: Service, books: Books) -> None:
    thread = await service.alice.thread()
    figures = "prompt_tokens=11125 cached_tokens=7441 completion_tokens=429 reasoning_tokens=409"
    await service.alice.run(thread, f"[fake {figures}]").end()
    await service.alice.run(thread, f"[fake {figures.replace('=429', '=20')}]").end()  # a total without them
    for entry in await books.settled():
        assert (entry.output, entry.reasoning, entry.cost) == (429, 409, cost_nano(11_125, 429, 7_441))


async def test_cached_tokens_counted_beside_the_input_are_added_once(service: Service, books: Books) -> None:
    thread = await service.alice.thread()
    await service.alice.run(thread, "[fake prompt_tokens=10 cached_tokens=500 completion_tokens=3]").end()
    (entry,) = await books.settled()
    assert (entry.input, entry.cached, entry.cost) == (510, 500, cost_nano(510, 3, 500))


async def test_zeros_for_an_answer_are_no_report(service: Service, books: Books) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake prompt_tokens=0 completion_tokens=0 reasoning_tokens=0]").end()
    (entry,) = await books.settled()
    assert entry.estimated
    assert entry.output == TOKENIZER.count(run.text)


# ---------------------------------------------------------------- what a call may write


async def test_the_limit_a_provider_gets_is_what_the_hold_grants(service: Service, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    await service.alice.run(thread, "hello").end()
    await service.alice.run(thread, "hello", max_output_tokens=77).end()
    (default,) = [field.metadata["default"] for field in fields(Settings) if field.name == "most_output"]
    assert [call.body["max_completion_tokens"] for call in provider.calls] == [int(default), 77]


async def test_a_small_quota_shortens_the_answer(service: Service, books: Books, provider: FakeProvider) -> None:
    thread = await service.alice.thread()
    text, rates = "tell me [fake chunks=100]", from_message(RATES)
    bound = input_bound(text)
    await books.quota(project_id(service.alice.caller), "alice", upper_bound(rates, bound, 60))
    run = await service.alice.run(thread, text, max_output_tokens=1000, min_output_tokens=60).end()
    assert run.events[-1].run_finished.finish_reason == "length"
    assert provider.calls[0].body["max_completion_tokens"] == 60
    assert end_of(run).output_tokens <= 60


async def test_less_than_the_fewest_tokens_worth_an_answer_is_refused(
    service: Service, books: Books, provider: FakeProvider, sql: Sql
) -> None:
    thread = await service.alice.thread()
    text, rates = "tell me", from_message(RATES)
    bound = input_bound(text)
    await books.quota(project_id(service.alice.caller), "alice", upper_bound(rates, bound, 60) - 1)
    run = await service.alice.run(thread, text, max_output_tokens=1000, min_output_tokens=60).end()
    failed = run.events[-1].run_failed
    assert (failed.error.code, failed.before_reply) == ("QUOTA_EXCEEDED", True)
    assert provider.calls == []
    assert [message.text for message in await service.alice.messages(thread)] == [text]
    await service.alice.run(thread, text, max_output_tokens=1000, min_output_tokens=1).end()
    assert len(provider.calls) == 1


async def test_a_provider_that_ignores_its_limit_is_closed_at_it(
    service: Service, books: Books, provider: FakeProvider
) -> None:
    thread = await service.alice.thread()
    script = "[fake chunks=3000 delay=2 unlimited=1]"
    run = await service.alice.run(thread, script, max_output_tokens=50).end()
    await provider.until(lambda calls: calls[0].client_closed)
    assert run.events[-1].run_finished.finish_reason == "length"
    reply = await service.alice.reply(thread)
    assert (reply.status, reply.text) == (MessageStatus.MESSAGE_STATUS_COMPLETE, run.text)
    (entry,) = await books.settled()
    assert 50 < entry.output < 100  # a tenth more, and the piece that passed it, were written and are paid
    assert (entry.estimated, entry.output) == (True, TOKENIZER.count(run.text))


async def test_a_model_without_a_price_is_refused_with_the_line_to_type(
    service: Service, books: Books, provider: FakeProvider
) -> None:
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello", model="nobody-knows-it").end()
    error = run.events[-1].run_failed.error
    assert error.code == "MODEL_NOT_PRICED"
    assert "make price MODEL=nobody-knows-it IN=" in error.message
    assert provider.calls == []
    await books.price("nobody-knows-it")
    assert (await service.alice.run(thread, "hello", model="nobody-knows-it").end()).kinds[-1] == "run_finished"


async def test_a_run_counts_once_against_the_rate_limit_whatever_it_calls(service: Service, sql: Sql) -> None:
    thread = await service.alice.thread()
    await service.alice.run(thread, "[fake close=0 times=2 key=a]").end()
    assert await sql.value("SELECT used FROM billing.rate_windows") == 1


async def test_the_rate_limit_is_told_with_the_time_to_wait(
    service: Service, books: Books, provider: FakeProvider
) -> None:
    await books.runs_per_minute(project_id(service.alice.caller), 1)
    thread = await service.alice.thread()
    await service.alice.run(thread, "hello").end()
    error = (await service.alice.run(thread, "hello").end()).events[-1].run_failed.error
    assert (error.code, error.provider) == ("AI_RATE_LIMITED", "")
    assert 0 < error.retry_after.ToNanoseconds() <= 60e9
    assert len(provider.calls) == 1


# ---------------------------------------------------------------- billing away


async def test_the_end_of_an_answer_does_not_wait_for_billing(
    launch: Launcher, books: Books, provider: FakeProvider
) -> None:
    service = await launch()
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake chunks=6 gate=g gate_at=3]").until(lambda reading: reading.text)
    async with books.away():
        provider.open_gate("g")
        done = (await run.end(2.0)).events[-1].run_finished
        reply = await service.alice.reply(thread)
        assert done.usage.cost.nano_usd == reply.usage.cost.nano_usd > 0
        assert await books.ledger() == []
    (entry,) = await books.settled()
    assert entry.cost == done.usage.cost.nano_usd


async def test_without_billing_no_model_is_called_and_the_message_is_kept(
    launch: Launcher, books: Books, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HOLD_WAIT_SECONDS", 0.3)
    service = await launch()
    thread = await service.alice.thread()
    async with books.away():
        run = await service.alice.run(thread, "hello", key="a").end()
        error = run.events[-1].run_failed.error
        assert (error.code, run.events[-1].run_failed.before_reply) == ("UNAVAILABLE", True)
        assert "Billing does not answer" in error.message
        assert error.retry_after.ToNanoseconds() > 0
    assert provider.calls == []
    assert [message.text for message in await service.alice.messages(thread)] == ["hello"]
    assert await books.settled() == []
    again = await service.alice.run(thread, "hello", key="a").end()
    assert again.kinds[-1] == "run_finished"
    assert [message.text for message in await service.alice.messages(thread)] == ["hello", again.text]


async def test_a_billing_that_is_back_in_time_is_not_noticed(launch: Launcher, books: Books) -> None:
    service = await launch()
    thread = await service.alice.thread()
    async with books.away():
        run = service.alice.run(thread, "hello")
        await run.until(lambda reading: reading.events)
    assert (await run.end()).kinds[-1] == "run_finished"


async def test_a_cancel_does_not_wait_for_billing(launch: Launcher, books: Books, provider: FakeProvider) -> None:
    service = await launch()
    thread = await service.alice.thread()
    async with books.away():
        run = await service.alice.run(thread, "hello").until(lambda reading: reading.events)
        began = time.monotonic()
        await service.alice.cancel(run.run_id)
        assert (await run.end(1.0)).events[-1].run_finished.finish_reason == "cancelled"
        assert time.monotonic() - began < 1.0
    assert provider.calls == []
    assert await books.settled() == []


# ---------------------------------------------------------------- owners that are gone


async def test_a_call_that_was_not_sent_is_barred_and_costs_nothing(service: Service, books: Books, sql: Sql) -> None:
    thread = await service.alice.thread()
    orphan = an_orphan(thread, is_begun=False, status="started")
    run = await service.alice.follow(await insert(service, sql, orphan)).end()
    (entry,) = await books.settled()  # of the call that was made again
    assert end_of(run).cost.nano_usd == entry.cost
    query = "SELECT status, amount_nano FROM billing.holds WHERE api_call_id = %s"
    assert await sql.rows(query, orphan.call) == [("released", 0)]
    calls = await sql.rows("SELECT status, usage_source, cost_nano FROM conversation.api_calls ORDER BY started_at")
    assert calls[0] == ("cut", "none", 0)


async def test_a_call_that_may_have_been_made_counts_though_nothing_of_it_was_shown(
    service: Service, books: Books, sql: Sql
) -> None:
    thread = await service.alice.thread()
    orphan = an_orphan(thread, is_begun=False, text="y" * 41)
    run = await service.alice.follow(await insert(service, sql, orphan)).end()
    cut, made = await books.settled()
    read = TOKENIZER.count_input([{"content": "y" * 41}])
    assert (cut.input, cut.output, cut.estimated, cut.cost) == (read, 0, True, cost_nano(read, 0))
    assert end_of(run).cost.nano_usd == cut.cost + made.cost
    assert (await service.alice.reply(thread)).usage == end_of(run)


async def test_a_cut_run_that_may_no_longer_spend_ends_with_its_text(
    service: Service, books: Books, sql: Sql, provider: FakeProvider
) -> None:
    thread = await service.alice.thread()
    orphan = an_orphan(thread)
    run_id = await insert(service, sql, orphan)
    await books.quota(project_id(service.alice.caller), "alice", cost_nano(HELD_INPUT, HELD_OUTPUT))
    run = await service.alice.follow(run_id).end()
    failed = run.events[-1].run_failed
    assert (failed.error.code, failed.before_reply) == ("QUOTA_EXCEEDED", False)
    (cut,) = await books.settled()
    reply = await service.alice.reply(thread)
    assert (reply.status, reply.usage.cost.nano_usd) == (MessageStatus.MESSAGE_STATUS_FAILED, cut.cost)
    assert reply.text == SHOWN  # paid, and not made again: it stays
    assert "step_superseded" not in run.kinds
    assert end_of(run) == reply.usage
    assert provider.calls == []


async def test_an_heir_that_dies_before_it_could_tell_leaves_it_to_the_next(
    service: Service, books: Books, sql: Sql
) -> None:
    """The cut call is closed by then, the call that follows has its row, and the log knows of neither."""
    thread, heir = await service.alice.thread(), new_id()
    await sql.rows(LEASE, heir)
    orphan = an_orphan(thread, worker=heir)
    run_id, cost = await insert(service, sql, orphan), cost_nano(30, 7)
    await books.settle(project_id(service.alice.caller), orphan.call, 30, 7, cost)
    await sql.rows(CLOSE, cost, orphan.call)
    await sql.rows(COUNT, cost)
    await sql.rows(BEGIN_NEXT, orphan.call)
    await sql.rows("UPDATE conversation.workers SET lease_until = clock_timestamp() WHERE id = %s", heir)
    run = await service.alice.follow(run_id).end()
    made = [entry for entry in await books.settled() if not entry.estimated]
    assert len(made) == 1
    (superseded,) = [event.step_superseded for event in run.events if event.HasField("step_superseded")]
    assert superseded.usage.cost.nano_usd == cost
    assert end_of(run).cost.nano_usd == cost + made[0].cost


async def test_a_hand_over_between_hold_and_request_charges_nothing_for_it(
    launch: Launcher, books: Books, provider: FakeProvider, database: Database
) -> None:
    """It happens while the record of the sending commits: this process knows that nothing was sent."""
    first = await launch(THREADLOOM_DRAIN_SECONDS="0.01")
    thread = await first.alice.thread()
    with Hold(database.admin_url, "api_calls", "NEW.status = 'sent'", "UPDATE", at_commit=True) as hold:
        run = first.alice.run(thread, "hello")
        await asyncio.to_thread(hold.wait, 5.0)
        first.ask_to_stop()
        await asyncio.wait({run.task}, timeout=0.3)  # the drain is over by then
        hold.release()
    second = await launch()
    await run.refusal()
    await second.alice.follow(run.run_id).end()
    (entry,) = await books.settled()
    assert (len(provider.calls), entry.estimated) == (1, False)


async def test_what_the_cut_call_held_pays_for_the_one_made_again(
    service: Service, books: Books, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quota pays for one call at a time, and the outbox is slow."""
    monkeypatch.setattr(limits, "OUTBOX_POLL_SECONDS", 60)
    monkeypatch.setattr(Outbox, "wake", lambda self: None)
    thread, bound = await service.alice.thread(), input_bound("hello")
    await books.quota(project_id(service.alice.caller), "alice", upper_bound(from_message(RATES), bound, 300))
    orphan = an_orphan(thread, is_begun=False)
    run = await service.alice.follow(await insert(service, sql, orphan)).end()
    assert run.kinds[-1] == "run_finished"


async def test_what_billing_refuses_stays_until_it_is_mended(
    service: Service, books: Books, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OUTBOX_PAUSE_SECONDS", 0.01)
    thread = await service.alice.thread()
    await service.alice.run(thread, "[fake gate=g]").until(lambda reading: "reply_started" in reading.kinds)
    id = await sql.value("SELECT id FROM conversation.api_calls")
    await sql.rows(
        "INSERT INTO conversation.outbox (id, topic, project_id, payload)"
        " SELECT gen_random_uuid(), 'billing.settle', project_id, '' FROM conversation.api_calls WHERE id = %s",
        id,
    )

    async def was_tried() -> bool:
        return bool(await sql.value("SELECT attempts FROM conversation.outbox") >= 3)

    await eventually(was_tried)
    await sql.rows("DELETE FROM conversation.outbox")
    await service.alice.cancel((await sql.rows("SELECT id::text FROM conversation.ai_runs"))[0][0])
