"""A released call never gets money, also when its PlaceHold arrives later or at the same moment."""

import asyncio

import pytest

from kit.ids import new_id
from tests.contract.billing.harness import NANO, RATES, Service, outcomes, reasons, release_of
from tests.support.holds import Hold as HeldRow
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.hold_pb2 import HoldState

OPEN, SETTLED, RELEASED = HoldState.HOLD_STATE_OPEN, HoldState.HOLD_STATE_SETTLED, HoldState.HOLD_STATE_RELEASED
BARRED, GRANTED = "NEW.rates IS NULL", "NEW.rates IS NOT NULL"
STATUS = "SELECT status, output_granted, amount_nano FROM billing.holds WHERE api_call_id = %s"
WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = 'transactionid'"


async def held(row: HeldRow) -> None:
    await asyncio.to_thread(row.wait)


async def waiting_for_the_other(service: Service) -> None:
    """Returns once a transaction waits for another's end."""
    async with asyncio.timeout(10):
        while await service.rows(WAITS) == [(0,)]:  # noqa: ASYNC110 - a condition inside Postgres
            await asyncio.sleep(0.01)


async def test_a_hold_that_comes_after_its_release_is_never_granted(service: Service) -> None:
    request = service.ask()
    assert [await service.release(request) for _ in range(2)] == [RELEASED] * 2
    for hold in [await service.place(request), *await outcomes(service, [request] * 5)]:
        assert (hold.state, hold.granted_output_tokens, hold.amount.nano_usd) == (RELEASED, 0, 0)  # type: ignore[union-attr]
    assert await service.sums() == (0, 0)


async def test_a_release_needs_no_price(service: Service) -> None:
    request = service.ask(model="nobodys-model")
    assert await service.release(request) == RELEASED
    assert (await service.place(request)).state == RELEASED


async def test_a_hold_on_its_way_finds_the_release_that_commits_before_it(service: Service, url: str) -> None:
    request = service.ask()
    with HeldRow(url, "holds", GRANTED, schema="billing") as row:  # its accounts are locked, its row is not written
        placing = asyncio.create_task(service.place(request))
        await held(row)
        assert await service.release(request) == RELEASED
        row.release()
        assert (await placing).state == RELEASED
    assert await service.rows(STATUS, request.api_call_id) == [("released", 0, 0)]
    assert await service.sums() == (0, 0)


async def test_a_hold_waits_for_a_release_that_is_about_to_commit(service: Service, url: str) -> None:
    request = service.ask()
    with HeldRow(url, "holds", BARRED, at_commit=True, schema="billing") as row:
        releasing = asyncio.create_task(service.release(request))
        await held(row)
        placing = asyncio.create_task(service.place(request))
        await waiting_for_the_other(service)
        row.release()
        assert (await releasing, (await placing).state) == (RELEASED, RELEASED)
    assert await service.rows(STATUS, request.api_call_id) == [("released", 0, 0)]
    assert await service.sums() == (0, 0)


async def test_a_release_waits_for_a_hold_that_is_about_to_commit_and_frees_it(service: Service, url: str) -> None:
    request = service.ask()
    with HeldRow(url, "holds", GRANTED, at_commit=True, schema="billing") as row:
        placing = asyncio.create_task(service.place(request))
        await held(row)
        releasing = asyncio.create_task(service.release(request))
        await waiting_for_the_other(service)
        row.release()
        assert ((await placing).state, await releasing) == (OPEN, RELEASED)
    assert await service.rows(STATUS, request.api_call_id) == [("released", 10, 20 * NANO)]
    assert await service.sums() == (0, 0)


async def test_holds_and_releases_at_once_leave_no_hold_open(service: Service) -> None:
    requests = [service.ask() for _ in range(25)]
    work = [call(request) for request in requests for call in (service.place, service.release, service.place)]
    found = await asyncio.gather(*work)
    assert found[1::3] == [RELEASED] * len(requests)
    assert await service.sums() == (0, 0)
    assert await service.rows("SELECT DISTINCT status FROM billing.holds") == [("released",)]
    assert [(await service.place(request)).state for request in requests] == [RELEASED] * len(requests)


@pytest.mark.parametrize("runs_per_minute", [1])
async def test_a_barred_call_takes_no_unit_and_is_not_the_runs_first(
    service: Service, url: str, runs_per_minute: int
) -> None:
    barred, raced = service.ask(), service.ask()
    await service.release(barred)
    await service.place(barred)
    with HeldRow(url, "holds", GRANTED, schema="billing") as row:
        placing = asyncio.create_task(service.place(raced))
        await held(row)
        await service.release(raced)
        row.release()
        await placing
    assert await service.rows("SELECT used FROM billing.rate_windows") == []
    assert reasons(await outcomes(service, [service.ask(run_id=barred.run_id)])) == []
    assert reasons(await outcomes(service, [service.ask(run_id=raced.run_id)])) == ["AI_RATE_LIMITED"]


@pytest.mark.parametrize("is_placed", [True, False])
@pytest.mark.parametrize("field", ["user_id", "run_id", "thread_id", "message_id", "model"])
async def test_an_id_is_not_released_for_another_call(service: Service, field: str, is_placed: bool) -> None:
    request = service.ask()
    await (service.place(request) if is_placed else service.release(request))
    other = release_of(request, **{field: str(new_id())})
    error = await service.system.refusal(service.system.billing.Release, other)
    assert error.reason == "IDEMPOTENCY_KEY_REUSED"
    assert (await service.place(request)).state == (OPEN if is_placed else RELEASED)


async def test_a_barred_call_is_not_held_for_another(service: Service) -> None:
    request = service.ask()
    await service.release(request)
    for other in (
        service.ask(api_call_id=request.api_call_id),
        service.ask(api_call_id=request.api_call_id, project_id=str(new_id()), model="gpt-5-mini"),
    ):
        error = await service.system.refusal(service.system.billing.PlaceHold, other)
        assert error.reason == "IDEMPOTENCY_KEY_REUSED"


async def test_a_barred_call_that_was_made_is_booked_late_by_the_price_of_that_moment(service: Service) -> None:
    request = service.ask(model="new-model")
    await service.release(request)
    settle = api.SettleRequest(api_call_id=request.api_call_id, project_id=str(service.project))
    settle.usage.input_tokens, settle.cost.nano_usd = 3, 3 * NANO
    error = await service.system.refusal(service.system.billing.Settle, settle)
    assert error.reason == "MODEL_NOT_PRICED"
    price = api.SetPriceRequest(model="new-model", rates=RATES)
    await service.role.call(service.role.billing.SetPrice, price)
    entries = [await service.settle(request.api_call_id, 3, 0) for _ in range(2)]
    assert entries[0] == entries[1]
    assert (entries[0].cost.nano_usd, entries[0].late, entries[0].message_id) == (3 * NANO, True, request.message_id)
    assert (await service.place(request)).state == await service.release(request) == SETTLED
    assert await service.sums() == (0, 3 * NANO)
