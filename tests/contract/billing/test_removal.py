"""Holds that were closed long ago are removed, and what they stood for stays true."""

import pytest

from kit.ids import new_id
from services.billing import limits, upkeep
from tests.contract.billing.harness import NANO, Service, release_of
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.hold_pb2 import HoldState

WEEK, FIVE_WEEKS = limits.SETTLED_HOLDS_KEPT_SECONDS, limits.UNBOOKED_HOLDS_KEPT_SECONDS
AGE = "UPDATE billing.holds SET closed_at = clock_timestamp() - make_interval(secs => %s) WHERE api_call_id = %s"
EXPIRE = "UPDATE billing.holds SET expires_at = clock_timestamp() WHERE api_call_id = %s"
SECOND = 1.0
SLACK = 30.0  # what a test may take between ageing a hold and looking


async def closed(service: Service, how: str) -> api.PlaceHoldRequest:
    """A call whose hold was closed now."""
    request = service.ask()
    if how != "barred":
        await service.place(request)
    match how:
        case "settled":
            await service.settle(request.api_call_id, 1, 1)
        case "expired":
            await service.rows(EXPIRE, request.api_call_id)
            await service.upkeep.sweep()
        case _:
            await service.release(request)
    return request


@pytest.mark.parametrize(
    ("how", "kept"),
    [("settled", WEEK), ("released", FIVE_WEEKS), ("expired", FIVE_WEEKS), ("barred", FIVE_WEEKS)],
)
async def test_a_closed_hold_is_kept_its_time(service: Service, how: str, kept: float) -> None:
    request = await closed(service, how)
    await service.rows(AGE, kept - SLACK, request.api_call_id)
    assert await service.upkeep.remove() == 0
    await service.rows(AGE, kept + SECOND, request.api_call_id)
    assert await service.upkeep.remove() == 1
    assert await service.rows("SELECT FROM billing.holds") == []


async def test_an_open_hold_is_never_removed(service: Service) -> None:
    request = service.ask()
    await service.place(request)
    await service.rows(AGE, 10 * FIVE_WEEKS, request.api_call_id)
    assert await service.upkeep.remove() == 0


async def test_a_settled_call_answers_as_before_once_its_hold_is_removed(service: Service) -> None:
    request = await closed(service, "settled")
    first = await service.settle(request.api_call_id, 1, 1)
    await service.rows(AGE, WEEK + SECOND, request.api_call_id)
    assert await service.upkeep.remove() == 1
    assert await service.settle(request.api_call_id, 1, 1) == first
    with pytest.raises(Exception, match="IDEMPOTENCY_KEY_REUSED"):
        await service.settle(request.api_call_id, 2, 1)
    hold = await service.place(request)
    assert (hold.state, hold.granted_output_tokens, hold.amount.nano_usd) == (HoldState.HOLD_STATE_SETTLED, 0, 0)
    assert await service.release(request) == HoldState.HOLD_STATE_SETTLED
    assert await service.sums() == (0, 2 * NANO)


async def test_the_id_of_a_removed_hold_is_not_used_for_another_call(service: Service) -> None:
    request = await closed(service, "settled")
    await service.rows(AGE, WEEK + SECOND, request.api_call_id)
    await service.upkeep.remove()
    billing = service.system.billing
    other = service.ask(api_call_id=request.api_call_id)
    for method, message in ((billing.PlaceHold, other), (billing.Release, release_of(other))):
        assert (await service.system.refusal(method, message)).reason == "IDEMPOTENCY_KEY_REUSED"
    # Another project cannot see that it is used, but never books under it.
    elsewhere = service.ask(api_call_id=request.api_call_id, project_id=str(new_id()), model="gpt-5-mini")
    await service.place(elsewhere)
    settle = api.SettleRequest(api_call_id=elsewhere.api_call_id, project_id=elsewhere.project_id)
    assert (await service.system.refusal(billing.Settle, settle)).reason == "IDEMPOTENCY_KEY_REUSED"


async def test_an_expired_call_is_still_settled_after_weeks(service: Service) -> None:
    request = await closed(service, "expired")
    await service.rows(AGE, FIVE_WEEKS - SLACK, request.api_call_id)
    await service.upkeep.remove()
    entry = await service.settle(request.api_call_id, 1, 1)
    assert (entry.cost.nano_usd, entry.late) == (2 * NANO, True)


async def test_a_round_of_removal_ends(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep.limits, "REMOVED_HOLDS", 2)
    monkeypatch.setattr(upkeep.limits, "REMOVALS", 2)
    for _ in range(7):
        request = await closed(service, "barred")
        await service.rows(AGE, FIVE_WEEKS + SECOND, request.api_call_id)
    assert [await service.upkeep.remove() for _ in range(3)] == [4, 3, 0]
