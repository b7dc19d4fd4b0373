"""Who may call what: every RPC with every caller. A new RPC fails here until it is in the table."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from kit.errors import ServiceError
from kit.ids import new_id
from tests.contract.billing.harness import RATES, Service, release_of
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.hold_pb2 import HoldState
from threadloom.billing.v1.price_pb2 import Terms
from threadloom.billing.v1.usage_pb2 import Period
from threadloom.common.v1.money_pb2 import Money

LIMIT = Money(nano_usd=5)
DAY = Period.PERIOD_DAY
TERMS = Terms(credits_per_usd=5)
# What is sent about alice of the project, and who of these gets an answer. Everybody else gets FORBIDDEN.
CALLERS = {"alice", "bob", "role", "alice elsewhere", "role elsewhere", "system"}
MOVERS, ADMINS, READERS = {"system"}, {"system", "role"}, {"system", "role", "alice"}
Build = Callable[[Service, str], Message]


def quota_of_alice(service: Service, _: str) -> Message:
    return api.SetQuotaRequest(project_id=str(service.project), user_id="alice", period=DAY, limit=LIMIT)


def price_of_project(service: Service, _: str) -> Message:
    return api.SetPriceRequest(model="m", project_id=str(service.project), rates=RATES)


TABLE: dict[str, tuple[Build, set[str]]] = {
    "PlaceHold": (lambda service, _: service.ask(), MOVERS),
    "Settle": (lambda service, id: api.SettleRequest(api_call_id=id, project_id=str(service.project)), MOVERS),
    "Release": (lambda service, _: release_of(service.ask()), MOVERS),
    "SetPrice": (price_of_project, ADMINS),
    "ListPrices": (lambda service, _: api.ListPricesRequest(project_id=str(service.project)), READERS | {"bob"}),
    "SetQuota": (quota_of_alice, ADMINS),
    "GetQuota": (lambda service, _: api.GetQuotaRequest(project_id=str(service.project), user_id="alice"), READERS),
    "SetCap": (lambda service, _: api.SetCapRequest(project_id=str(service.project), period=DAY, limit=LIMIT), ADMINS),
    "GetCap": (lambda service, _: api.GetCapRequest(project_id=str(service.project)), ADMINS),
    "GetUsage": (lambda service, _: api.GetUsageRequest(project_id=str(service.project), user_id="alice"), READERS),
    "SetTerms": (lambda service, _: api.SetTermsRequest(project_id=str(service.project), terms=TERMS), ADMINS),
    "GetTerms": (lambda service, _: api.GetTermsRequest(project_id=str(service.project)), ADMINS),
    "ListLedger": (lambda service, _: api.ListLedgerRequest(project_id=str(service.project), user_id="alice"), READERS),
}  # fmt: skip


def test_every_rpc_is_in_the_table() -> None:
    assert {method.name for method in api.DESCRIPTOR.services_by_name["BillingService"].methods} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
async def test_only_those_of_the_table_get_an_answer(service: Service, name: str) -> None:
    build, allowed = TABLE[name]
    request = service.ask()
    await service.place(request)
    for who in sorted(CALLERS):
        person = service.people[who]
        method: Any = getattr(person.billing, name)
        try:
            await person.call(method, build(service, request.api_call_id))
            answer = ""
        except ServiceError as error:
            answer = error.reason
        assert answer == ("" if who in allowed else "FORBIDDEN"), who


async def test_others_cannot_settle_under_a_project_of_their_own(service: Service) -> None:
    request = service.ask()
    await service.place(request)
    billing, elsewhere = service.system.billing, str(new_id())
    settle = api.SettleRequest(api_call_id=request.api_call_id, project_id=elsewhere)
    assert (await service.system.refusal(billing.Settle, settle)).reason == "NOT_FOUND"
    release = release_of(request, project_id=elsewhere)
    assert (await service.system.refusal(billing.Release, release)).reason == "IDEMPOTENCY_KEY_REUSED"
    assert (await service.place(request)).state == HoldState.HOLD_STATE_OPEN


async def test_a_user_sees_its_own_entries_and_a_project_all(service: Service) -> None:
    for user in ("alice", "bob", "bob"):
        request = service.ask(user_id=user)
        await service.place(request)
        await service.settle(request.api_call_id, 1, 1)
    counts = {}
    for who, person in service.people.items():
        project = str(service.project) if who == "system" else ""
        found = await person.call(person.billing.ListLedger, api.ListLedgerRequest(project_id=project))
        counts[who] = len(found.entries)
    assert counts == {"alice": 1, "bob": 2, "role": 3, "alice elsewhere": 0, "role elsewhere": 0, "system": 3}


async def test_pages_lead_through_the_whole_ledger_and_all_prices(service: Service) -> None:
    placed = [service.ask() for _ in range(5)]
    for number, request in enumerate(placed):
        await service.place(request)
        await service.settle(request.api_call_id, 1, 1)
        price = api.SetPriceRequest(model=f"a/{number}", rates=RATES)
        await service.role.call(service.role.billing.SetPrice, price)
    seen, models, token = [], [], ""
    while True:
        page = await service.role.call(
            service.role.billing.ListLedger, api.ListLedgerRequest(page_size=2, page_token=token)
        )
        seen += [entry.api_call_id for entry in page.entries]
        if not (token := page.next_page_token):
            break
    assert seen == [request.api_call_id for request in reversed(placed)]
    while True:
        listed = await service.role.call(
            service.role.billing.ListPrices, api.ListPricesRequest(page_size=2, page_token=token)
        )
        models += [price.model for price in listed.prices]
        if not (token := listed.next_page_token):
            break
    assert models == [*(f"a/{number}" for number in range(5)), "test-model"]


async def test_a_removed_limit_is_gone(service: Service) -> None:
    await service.quota(7)
    role = service.role
    quota = (await role.call(role.billing.GetQuota, api.GetQuotaRequest(user_id="alice"))).quota
    assert (quota.period, quota.limit.nano_usd) == (Period.PERIOD_TOTAL, 7)
    await role.call(role.billing.SetQuota, api.SetQuotaRequest(user_id="alice", period=DAY))
    assert not (await role.call(role.billing.GetQuota, api.GetQuotaRequest(user_id="alice"))).HasField("quota")
    await service.cap(9)
    assert len((await role.call(role.billing.GetCap, api.GetCapRequest())).caps) == 1
    await role.call(role.billing.SetCap, api.SetCapRequest(period=Period.PERIOD_TOTAL))
    assert not (await role.call(role.billing.GetCap, api.GetCapRequest())).caps
