"""What a quota or a cap pays for, and not one call more, however many ask at once."""

import asyncio
from collections.abc import Sequence

import pytest

from kit import pricing
from kit.rates import from_message
from services.conversation import limits
from tests.contract.conversation.harness import Person, Reading, Service, eventually, project_id
from tests.fakes.provider import FakeProvider
from tests.support.billing import INPUT_NANO, OUTPUT_NANO, RATES, TOKENIZER, input_bound
from threadloom.billing.v1.usage_pb2 import Period
from threadloom.common.v1.money_pb2 import Money
from threadloom.common.v1.rates_pb2 import PriceTier, Rates, TokenPrices

OUTPUT = 60  # tokens a run of these tests may have, and must; its three words are fewer
GATED, PLAIN = "[fake chunks=3 gate=g]", "[fake chunks=3]"
AT_ONCE = 100
CROWD_SECONDS = 60.0  # for a hundred runs on a machine that does other things too

DAY, MONTH, TOTAL = Period.PERIOD_DAY, Period.PERIOD_MONTH, Period.PERIOD_TOTAL


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds of one user queue; here a crowd waits for them however slow the machine is."""
    monkeypatch.setattr(limits, "HOLD_WAIT_SECONDS", CROWD_SECONDS)
    monkeypatch.setattr(limits, "BILLING_SECONDS", CROWD_SECONDS)


def held_for(text: str, rates: Rates = RATES, output: int = OUTPUT) -> int:
    """Nano-USD that are set aside for a thread's first run."""
    return pricing.upper_bound(from_message(rates), input_bound(text), output)


async def started(people: Sequence[Person], text: str, how_many: int) -> list[Reading]:
    """So many runs at once, each on a thread of its own, of each person in turn."""
    each = [people[number % len(people)] for number in range(how_many)]
    threads = [await person.thread() for person in each]
    return [
        person.run(thread, text, max_output_tokens=OUTPUT, min_output_tokens=OUTPUT)
        for person, thread in zip(each, threads, strict=True)
    ]


async def decided(runs: Sequence[Reading], provider: FakeProvider, paid: int) -> None:
    """All runs but the paid ones have ended, and those wait at the gate."""

    async def is_decided() -> bool:
        waiting = sum(call.held == "g" for call in provider.calls)
        return waiting == paid and sum(run.is_over for run in runs) == len(runs) - paid

    await eventually(is_decided, CROWD_SECONDS)


def refusals(runs: Sequence[Reading]) -> list[str]:
    """Why runs failed before their reply."""
    failed = [run.events[-1].run_failed for run in runs if run.kinds[-1] == "run_failed"]
    assert all(end.before_reply for end in failed)
    return [end.error.code for end in failed]


async def replies(service: Service) -> int:
    """Replies that were saved, of everybody."""
    query = "SELECT count(*) FROM conversation.ai_messages WHERE role = 'assistant'"
    return int(await service.books.sql.value(query))


async def check_paid(service: Service, provider: FakeProvider, runs: list[Reading], paid: int, code: str) -> None:
    """So many calls were made and no more, and the others saved nothing but the question."""
    await decided(runs, provider, paid)
    assert len(provider.calls) == paid
    provider.open_gate("g")
    await asyncio.gather(*(run.end(CROWD_SECONDS) for run in runs))
    assert refusals(runs) == [code] * (len(runs) - paid)
    assert len(provider.calls) == len(await service.books.settled()) == await replies(service) == paid


async def test_a_quota_that_pays_for_ten_lets_ten_of_a_hundred_through(
    service: Service, provider: FakeProvider
) -> None:
    quota = 10 * held_for(GATED)
    await service.books.quota(project_id(service.alice.caller), "alice", quota)
    runs = await started([service.alice], GATED, AT_ONCE)
    await check_paid(service, provider, runs, 10, "QUOTA_EXCEEDED")
    held, spent = await service.books.sums("alice")
    assert held == 0
    assert 0 < spent <= quota


async def test_a_cap_that_pays_for_three_lets_three_of_fifty_through(service: Service, provider: FakeProvider) -> None:
    cap = 3 * held_for(GATED)
    await service.books.cap(project_id(service.alice.caller), cap)
    runs = await started([service.alice, service.bob], GATED, 50)
    await check_paid(service, provider, runs, 3, "AI_BUDGET_EXCEEDED")
    held, spent = await service.books.sums()
    assert held == 0
    assert 0 < spent <= cap


@pytest.mark.parametrize("limit", ["quota", "cap"])
async def test_a_crowd_that_frees_money_as_it_goes_never_passes_the_limit(
    service: Service, provider: FakeProvider, limit: str
) -> None:
    books, project, nano = service.books, project_id(service.alice.caller), 10 * held_for(PLAIN)
    await (books.quota(project, "alice", nano) if limit == "quota" else books.cap(project, nano))
    runs = await started([service.alice], PLAIN, AT_ONCE)
    seen: list[int] = []

    async def are_over() -> bool:
        seen.append(sum(await books.sums("alice")))
        return all(run.is_over for run in runs)

    await eventually(are_over, CROWD_SECONDS)
    assert max(seen) <= nano
    booked = await books.settled()
    assert 10 <= len(provider.calls) == len(booked) == await replies(service)
    code = "QUOTA_EXCEEDED" if limit == "quota" else "AI_BUDGET_EXCEEDED"
    assert refusals(runs) == [code] * (AT_ONCE - len(booked))
    assert sum(entry.cost for entry in booked) <= nano


@pytest.mark.parametrize(
    ("quota", "caps", "paid", "code"),
    [
        ((5, DAY), {DAY: 3, MONTH: 4, TOTAL: 5}, 3, "AI_BUDGET_EXCEEDED"),
        ((5, MONTH), {DAY: 4, MONTH: 2, TOTAL: 3}, 2, "AI_BUDGET_EXCEEDED"),
        ((5, TOTAL), {DAY: 4, MONTH: 3, TOTAL: 1}, 1, "AI_BUDGET_EXCEEDED"),
        ((1, DAY), {DAY: 3, MONTH: 2, TOTAL: 2}, 1, "QUOTA_EXCEEDED"),
        ((2, MONTH), {DAY: 3, TOTAL: 3}, 2, "QUOTA_EXCEEDED"),
        ((2, TOTAL), {MONTH: 2}, 2, "QUOTA_EXCEEDED"),
    ],
)
async def test_the_strictest_of_quota_and_caps_of_all_periods_wins(
    service: Service,
    provider: FakeProvider,
    quota: "tuple[int, Period.ValueType]",
    caps: "dict[Period.ValueType, int]",
    paid: int,
    code: str,
) -> None:
    project, one = project_id(service.alice.caller), held_for(GATED)
    await service.books.quota(project, "alice", quota[0] * one, quota[1])
    for period, pays_for in caps.items():
        await service.books.cap(project, pays_for * one, period)
    await check_paid(service, provider, await started([service.alice], GATED, 6), paid, code)


def tiered(above: int) -> Rates:
    """Ten times the price for all tokens of a call with more input."""
    dear = TokenPrices(input=per_million(10 * INPUT_NANO), output=per_million(10 * OUTPUT_NANO))
    return Rates(base=RATES.base, tiers=[PriceTier(above_input_tokens=above, prices=dear)])


def per_million(nano: int) -> Money:
    """A price from that of a token."""
    return Money(nano_usd=nano * pricing.TOKENS_PER_PRICE)


async def test_a_long_prompt_is_held_and_booked_at_the_price_of_its_tier(
    service: Service, provider: FakeProvider
) -> None:
    long = PLAIN + " word" * 200
    rates = tiered(above=150)
    books, project = service.books, project_id(service.alice.caller)
    await books.price("fake-model", rates)
    needed = held_for(long, rates)
    assert needed == 10 * held_for(long)
    await books.quota(project, "alice", needed - 1)
    (refused,) = await started([service.alice], long, 1)
    await refused.end()
    assert refusals([refused]) == ["QUOTA_EXCEEDED"]
    assert provider.calls == []
    await books.quota(project, "alice", needed)
    (paid,) = await started([service.alice], long, 1)
    await paid.end()
    (short,) = await started([service.bob], PLAIN, 1)
    await short.end()
    dear, cheap = await books.settled()
    assert dear.cost == 10 * (INPUT_NANO * dear.input + OUTPUT_NANO * dear.output)
    assert cheap.cost == INPUT_NANO * cheap.input + OUTPUT_NANO * cheap.output


async def test_a_prompt_that_may_reach_a_tier_is_held_at_its_price_and_booked_at_its_own(
    service: Service, provider: FakeProvider
) -> None:
    # The provider may count up to a tenth more than we do: enough here to pass the border.
    border = TOKENIZER.count_input([{"content": PLAIN}])
    rates = tiered(above=border)
    assert input_bound(PLAIN) > border
    books, project = service.books, project_id(service.alice.caller)
    await books.price("fake-model", rates)
    await books.quota(project, "alice", 10 * held_for(PLAIN) - 1)
    (refused,) = await started([service.alice], PLAIN, 1)
    await refused.end()
    await books.quota(project, "alice", 10 * held_for(PLAIN))
    (paid,) = await started([service.alice], PLAIN, 1)
    await paid.end()
    assert refusals([refused, paid]) == ["QUOTA_EXCEEDED"]
    (booked,) = await books.settled()
    assert booked.cost == INPUT_NANO * booked.input + OUTPUT_NANO * booked.output


async def test_without_a_limit_nothing_is_refused(service: Service, provider: FakeProvider) -> None:
    asked = 0
    for _ in range(3):
        threads = [await service.alice.thread() for _ in range(AT_ONCE)]
        runs = [service.alice.run(thread, PLAIN, max_output_tokens=limits.OUTPUT_TOKENS_MAX) for thread in threads]
        await asyncio.gather(*(run.end(CROWD_SECONDS) for run in runs))
        asked += len(runs)
        assert refusals(runs) == []
    booked = await service.books.settled()
    assert len(provider.calls) == len(booked) == asked == 300
    assert await service.books.sums("alice") == (0, sum(entry.cost for entry in booked))


async def test_stopping_just_before_the_end_is_paid_for_until_the_quota_ends_it(
    service: Service, provider: FakeProvider
) -> None:
    books, text = service.books, "[fake chunks=20 gate=g gate_at=18]"
    await books.quota(project_id(service.alice.caller), "alice", 10 * held_for(text, output=2 * OUTPUT))
    spent, refused = 0, 0
    for _ in range(50):
        thread = await service.alice.thread()
        run = service.alice.run(thread, text, max_output_tokens=2 * OUTPUT, min_output_tokens=2 * OUTPUT)
        made = len(provider.calls)

        async def is_read(run: Reading = run, made: int = made) -> bool:
            found = provider.calls[made:]
            return run.is_over or bool(found and found[0].held and run.text == found[0].text)

        await eventually(is_read)
        if run.is_over:
            refused += 1
            assert refusals([run]) == ["QUOTA_EXCEEDED"]
            continue
        assert refused == 0  # once it is used up it stays so
        assert len(run.text.split()) == 18
        await service.alice.cancel(run.run_id)
        await run.end()
        booked = await books.settled()
        assert booked[-1].estimated
        assert booked[-1].output == TOKENIZER.count(run.text)
        assert sum(entry.cost for entry in booked) > spent
        spent = sum(entry.cost for entry in booked)
    assert 10 <= len(provider.calls) == 50 - refused < 50
    assert await books.sums("alice") == (0, spent)
    assert spent <= 10 * held_for(text, output=2 * OUTPUT)


async def test_a_cancel_at_the_hundredth_of_a_thousand_words_books_what_was_shown(
    service: Service, provider: FakeProvider
) -> None:
    thread = await service.alice.thread()
    run = service.alice.run(thread, "[fake chunks=1000 gate=g gate_at=100]")
    await run.until(lambda reading: len(reading.text.split()) == 100)
    await service.alice.cancel(run.run_id)
    await run.end()
    (booked,) = await service.books.settled()
    assert booked.estimated
    one_word = TOKENIZER.count(run.text.split()[-1] + " ")
    assert abs(booked.output - TOKENIZER.count(run.text)) <= one_word
    assert booked.output < TOKENIZER.count(run.text) * 2
