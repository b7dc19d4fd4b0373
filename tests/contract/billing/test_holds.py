"""Holds never overspend, and every call is booked once, in whatever order things arrive."""

import asyncio
import random

import pytest

from kit.ids import new_id
from tests.contract.billing.harness import MODEL, NANO, Service, outcomes, reasons, release_of
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.hold_pb2 import Hold, HoldState
from threadloom.common.v1.money_pb2 import Money

IDENTITY = ["api_call_id", "project_id", "run_id", "thread_id", "message_id", "user_id", "model"]
HOLD = 20 * NANO  # what `Service.ask` sets aside
SETTLED, RELEASED, EXPIRED = HoldState.HOLD_STATE_SETTLED, HoldState.HOLD_STATE_RELEASED, HoldState.HOLD_STATE_EXPIRED


async def test_of_a_hundred_at_once_exactly_those_that_are_paid_are_granted(service: Service) -> None:
    await service.quota(7 * HOLD + HOLD // 2)
    found = await outcomes(service, [service.ask() for _ in range(100)])
    assert reasons(found) == ["QUOTA_EXCEEDED"] * 93
    assert await service.sums() == (7 * HOLD, 0)


async def test_a_cap_binds_all_users_together(service: Service) -> None:
    await service.cap(3 * HOLD)
    await service.quota(2 * HOLD, "alice")
    found = await outcomes(service, [service.ask(user_id=f"user-{number}") for number in range(50)])
    assert reasons(found) == ["AI_BUDGET_EXCEEDED"] * 47


async def test_the_same_call_twice_at_once_is_one_hold(service: Service) -> None:
    request = service.ask()
    found = await outcomes(service, [request] * 20)
    assert [one for one in found if one != found[0]] == []
    assert isinstance(found[0], Hold)
    assert await service.sums() == (HOLD, 0)


async def test_a_call_id_is_not_used_for_another_call(service: Service) -> None:
    request = service.ask()
    await service.place(request)
    for field in ("run_id", "thread_id", "message_id", "user_id", "model", "input_tokens_max", "max_output_tokens"):
        other = service.ask()
        other.CopyFrom(request)
        setattr(other, field, getattr(request, field) + 1 if "tokens" in field else str(new_id()))
        error = await service.system.refusal(service.system.billing.PlaceHold, other)
        assert error.reason == "IDEMPOTENCY_KEY_REUSED", field
    elsewhere = service.ask(api_call_id=request.api_call_id, project_id=str(new_id()))
    error = await service.system.refusal(service.system.billing.PlaceHold, elsewhere)
    assert error.reason == "IDEMPOTENCY_KEY_REUSED"


async def test_the_grant_is_what_the_money_left_pays(service: Service) -> None:
    await service.quota(15 * NANO)
    hold = await service.place(service.ask(min_output_tokens=1))
    assert (hold.granted_output_tokens, hold.amount.nano_usd) == (5, 15 * NANO)


async def test_without_a_limit_nothing_is_refused(service: Service) -> None:
    assert reasons(await outcomes(service, [service.ask() for _ in range(30)])) == []


async def test_a_limit_set_later_knows_what_was_spent_before(service: Service) -> None:
    request = service.ask()
    await service.place(request)
    await service.settle(request.api_call_id, 10, 10)
    await service.cap(HOLD)
    error = await service.system.refusal(service.system.billing.PlaceHold, service.ask())
    assert (error.reason, error.kind.http, error.metadata) == ("AI_BUDGET_EXCEEDED", 402, {"period": "total"})


async def test_a_model_without_a_price_is_refused_with_what_to_do(service: Service) -> None:
    error = await service.system.refusal(service.system.billing.PlaceHold, service.ask(model="nobodys-model"))
    assert (error.reason, error.message) == (
        "MODEL_NOT_PRICED",
        "No price is known for the model nobodys-model. Set one: make price MODEL=nobodys-model"
        " IN=<USD per million input tokens> OUT=<USD per million output tokens>",
    )


@pytest.mark.parametrize("model", ["my model", "$(shell true)", "a;b", "m`id`", "größe", "'", "=x"])
async def test_a_slug_that_a_shell_would_read_is_not_in_the_line_to_type(service: Service, model: str) -> None:
    error = await service.system.refusal(service.system.billing.PlaceHold, service.ask(model=model))
    assert error.metadata == {"model": model}
    assert "make price MODEL=<model> IN=" in error.message


async def test_a_published_model_needs_no_price_of_ours(service: Service) -> None:
    hold = await service.place(service.ask(model="gpt-5-mini"))
    assert hold.rates.base.cached_input.nano_usd == 25_000_000


async def test_a_settle_takes_the_holds_place_once(service: Service) -> None:
    request = service.ask()
    await service.place(request)
    found = await asyncio.gather(*(service.settle(request.api_call_id, 7, 3) for _ in range(10)))
    assert [one for one in found if one != found[0]] == []
    assert (found[0].cost.nano_usd, found[0].late, found[0].above_hold) == (10 * NANO, False, False)
    assert await service.sums() == (0, 10 * NANO)
    with pytest.raises(Exception, match="IDEMPOTENCY_KEY_REUSED"):
        await service.settle(request.api_call_id, 8, 3)
    assert (await service.place(request)).state == SETTLED


async def test_a_cost_above_its_hold_is_booked_whole_and_flagged(service: Service) -> None:
    await service.quota(HOLD)
    request = service.ask()
    await service.place(request)
    entry = await service.settle(request.api_call_id, 30, 30)
    assert (entry.cost.nano_usd, entry.above_hold) == (60 * NANO, True)
    assert reasons(await outcomes(service, [service.ask()])) == ["QUOTA_EXCEEDED"]


async def test_a_wrong_cost_of_the_caller_is_not_booked(service: Service) -> None:
    request = service.ask()
    await service.place(request)
    assert (await service.settle(request.api_call_id, 1, 1, cost=5)).cost.nano_usd == 2 * NANO


async def test_a_price_change_does_not_reach_an_open_hold(service: Service) -> None:
    request = service.ask()
    hold = await service.place(request)
    hold.rates.base.output.nano_usd *= 9
    change = api.SetPriceRequest(model=MODEL, rates=hold.rates)
    await service.role.call(service.role.billing.SetPrice, change)
    assert (await service.settle(request.api_call_id, 1, 1)).cost.nano_usd == 2 * NANO
    assert (await service.place(service.ask())).amount == Money(nano_usd=100 * NANO)


async def test_a_settle_after_a_release_is_booked_and_flagged_and_the_reverse_changes_nothing(
    service: Service,
) -> None:
    request = service.ask()
    await service.place(request)
    assert [await service.release(request) for _ in range(2)] == [RELEASED] * 2
    assert await service.sums() == (0, 0)
    assert (await service.settle(request.api_call_id, 1, 1)).late
    assert await service.release(request) == SETTLED
    assert await service.sums() == (0, 2 * NANO)


async def test_settles_and_releases_at_once_leave_the_call_booked_once(service: Service) -> None:
    requests = [service.ask() for _ in range(15)]
    await outcomes(service, requests)
    work = [service.settle(request.api_call_id, 1, 1) for request in requests]
    work += [service.release(request) for request in requests]
    random.Random(1).shuffle(work)
    await asyncio.gather(*work)
    assert await service.sums() == (0, 15 * 2 * NANO)


async def test_an_expired_hold_is_released_once(service: Service) -> None:
    request, kept = service.ask(), service.ask()
    await service.place(request)
    await service.place(kept)
    await service.rows(
        "UPDATE billing.holds SET expires_at = clock_timestamp() WHERE api_call_id = %s", request.api_call_id
    )
    assert await service.upkeep.sweep() == 1
    assert await service.upkeep.sweep() == 0
    assert await service.sums() == (HOLD, 0)
    assert await service.release(request) == EXPIRED
    assert (await service.settle(request.api_call_id, 1, 1)).late


async def test_a_settle_without_a_hold_is_not_found(service: Service) -> None:
    unknown = api.SettleRequest(api_call_id=str(new_id()), project_id=str(service.project))
    error = await service.system.refusal(service.system.billing.Settle, unknown)
    assert (error.reason, error.metadata) == ("NOT_FOUND", {"kind": "hold"})


async def test_reconciliation_finds_a_cent_that_is_wrong(service: Service) -> None:
    await service.place(service.ask())
    change = "UPDATE billing.accounts SET spent_nano = spent_nano + %s WHERE user_id = 'alice' AND period = 'month'"
    await service.rows(change, 1)
    (breach,) = await service.upkeep.reconcile()
    assert (breach.period, breach.spent, breach.spent_in_ledger) == ("month", 1, 0)
    await service.rows(change, -1)


@pytest.mark.parametrize("runs_per_minute", [2])
async def test_a_run_counts_once_against_the_rate_limit(service: Service) -> None:
    run = str(new_id())
    assert reasons(await outcomes(service, [service.ask(run_id=run) for _ in range(5)])) == []
    found = await outcomes(service, [service.ask() for _ in range(5)])
    assert reasons(found) == ["AI_RATE_LIMITED"] * 4
    waits = [one.retry_after for one in found if not isinstance(one, Hold)]
    assert all(wait is not None and 0 < wait <= 60 for wait in waits)
    assert reasons(await outcomes(service, [service.ask(user_id="bob")])) == []


@pytest.mark.parametrize("runs_per_minute", [1])
async def test_a_hold_that_is_refused_takes_no_unit(service: Service) -> None:
    await service.quota(0)
    assert reasons(await outcomes(service, [service.ask()])) == ["QUOTA_EXCEEDED"]
    await service.quota(HOLD)
    assert reasons(await outcomes(service, [service.ask()])) == []


@pytest.mark.parametrize("field", IDENTITY)
async def test_a_request_with_a_part_missing_is_refused(service: Service, field: str) -> None:
    billing = service.system.billing
    error = await service.system.refusal(billing.PlaceHold, service.ask(**{field: ""}))
    assert (error.reason, error.metadata) == ("INVALID_OPTIONS", {"field": field})
    error = await service.system.refusal(billing.Release, release_of(service.ask(), **{field: ""}))
    assert (error.reason, error.metadata) == ("INVALID_OPTIONS", {"field": field})


@pytest.mark.parametrize("field", [field for field in IDENTITY if field.endswith("_id") and field != "user_id"])
async def test_an_id_that_is_no_uuid_is_refused(service: Service, field: str) -> None:
    billing = service.system.billing
    for request, method in (
        (service.ask(**{field: "7"}), billing.PlaceHold),
        (release_of(service.ask(), **{field: "7"}), billing.Release),
    ):
        error = await service.system.refusal(method, request)
        assert (error.reason, error.metadata) == ("INVALID_OPTIONS", {"field": field})


async def test_an_entry_tells_the_message_its_call_was_made_for(service: Service) -> None:
    request = service.ask()
    await service.place(request)
    assert (await service.settle(request.api_call_id, 1, 1)).message_id == request.message_id
