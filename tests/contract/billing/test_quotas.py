"""The quota of every user who has none of its own."""

import pytest

from tests.contract.billing.harness import NANO, Person, Service, outcomes, reasons
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.usage_pb2 import Period, PeriodUsage
from threadloom.common.v1.money_pb2 import Money

HOLD = 20 * NANO
DAY, MONTH, TOTAL = Period.PERIOD_DAY, Period.PERIOD_MONTH, Period.PERIOD_TOTAL


async def quota_of(person: Person, user: str = "") -> PeriodUsage | None:
    answer = await person.call(person.billing.GetQuota, api.GetQuotaRequest(user_id=user))
    return answer.quota if answer.HasField("quota") else None


async def test_the_default_binds_each_user_by_its_own_account(service: Service) -> None:
    await service.quota(HOLD, "")
    found = await outcomes(service, [service.ask(user_id=user) for user in ("alice", "bob") for _ in range(10)])
    assert reasons(found) == ["QUOTA_EXCEEDED"] * 18
    assert await service.sums() == (2 * HOLD, 0)


async def test_a_users_own_quota_wins_entirely(service: Service) -> None:
    await service.quota(0, "", period=DAY)
    await service.quota(3 * HOLD, "alice", period=TOTAL)
    assert reasons(await outcomes(service, [service.ask() for _ in range(5)])) == ["QUOTA_EXCEEDED"] * 2
    assert reasons(await outcomes(service, [service.ask(user_id="bob")])) == ["QUOTA_EXCEEDED"]
    remove = api.SetQuotaRequest(user_id="alice", period=TOTAL)
    assert not (await service.role.call(service.role.billing.SetQuota, remove)).HasField("quota")
    error = await service.system.refusal(service.system.billing.PlaceHold, service.ask())
    assert (error.reason, error.metadata) == ("QUOTA_EXCEEDED", {"period": "day"})


async def test_a_stricter_own_quota_wins_too(service: Service) -> None:
    await service.quota(100 * HOLD, "")
    await service.quota(0, "alice")
    assert reasons(await outcomes(service, [service.ask(), service.ask(user_id="bob")])) == ["QUOTA_EXCEEDED"]


async def test_the_default_is_shown_to_those_it_binds(service: Service) -> None:
    people = service.people
    await service.quota(5 * HOLD, "", period=MONTH)
    await service.quota(7 * HOLD, "alice")
    await service.place(service.ask(user_id="bob"))
    default = PeriodUsage(period=MONTH, limit=Money(nano_usd=5 * HOLD))
    assert await quota_of(service.role) == default
    bobs = PeriodUsage(period=MONTH, limit=default.limit, held=Money(nano_usd=HOLD), spent=Money())
    assert await quota_of(people["bob"]) == await quota_of(service.role, "bob") == bobs
    alices = await quota_of(people["alice"])
    assert alices is not None
    assert (alices.period, alices.limit.nano_usd) == (TOTAL, 7 * HOLD)
    usage = await people["bob"].call(people["bob"].billing.GetUsage, api.GetUsageRequest())
    assert [period.HasField("limit") for period in usage.periods] == [False, True, False]
    assert usage.periods[1] == bobs
    whole = await service.role.call(service.role.billing.GetUsage, api.GetUsageRequest())
    assert [period.HasField("limit") for period in whole.periods] == [False] * 3
    assert await quota_of(people["role elsewhere"]) is None
    assert await quota_of(people["alice elsewhere"]) is None


async def test_the_default_answers_without_sums_and_is_removed(service: Service) -> None:
    await service.place(service.ask())
    request = api.SetQuotaRequest(project_id=str(service.project), period=DAY, limit=Money(nano_usd=3))
    answer = await service.system.call(service.system.billing.SetQuota, request)
    assert answer.quota == PeriodUsage(period=DAY, limit=Money(nano_usd=3))
    request.ClearField("limit")
    assert not (await service.system.call(service.system.billing.SetQuota, request)).HasField("quota")
    assert await quota_of(service.role) is None


@pytest.mark.parametrize("who", ["alice", "alice elsewhere", "role elsewhere"])
async def test_nobody_else_sets_the_default(service: Service, who: str) -> None:
    person = service.people[who]
    request = api.SetQuotaRequest(project_id=str(service.project), period=DAY, limit=Money(nano_usd=3))
    assert (await person.refusal(person.billing.SetQuota, request)).reason == "FORBIDDEN"


async def test_a_user_reads_no_other_users_quota(service: Service) -> None:
    bob = service.people["bob"]
    await service.quota(1, "")
    request = api.GetQuotaRequest(user_id="alice")
    assert (await bob.refusal(bob.billing.GetQuota, request)).reason == "FORBIDDEN"
