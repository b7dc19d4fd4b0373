"""A project's terms: what is set, what the deployment says, and what a hold carries."""

import pytest

from tests.contract.billing.harness import CREDITS_PER_USD, Service, outcomes, reasons
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.price_pb2 import Terms


async def set_terms(service: Service, **fields: int) -> Terms:
    request = api.SetTermsRequest(terms=Terms(**fields))
    found: Terms = (await service.role.call(service.role.billing.SetTerms, request)).terms
    return found


async def get_terms(service: Service) -> Terms:
    found: Terms = (await service.role.call(service.role.billing.GetTerms, api.GetTermsRequest())).terms
    return found


async def test_a_project_without_terms_has_those_of_the_deployment(service: Service, runs_per_minute: int) -> None:
    usual = Terms(credits_per_usd=CREDITS_PER_USD, runs_per_minute=runs_per_minute)
    assert await get_terms(service) == usual
    assert await set_terms(service) == usual


async def test_only_what_is_given_is_set(service: Service, runs_per_minute: int) -> None:
    assert await set_terms(service, credits_per_usd=7) == Terms(credits_per_usd=7, runs_per_minute=runs_per_minute)
    assert await set_terms(service, runs_per_minute=3) == Terms(credits_per_usd=7, runs_per_minute=3)
    assert await set_terms(service, credits_per_usd=0) == Terms(credits_per_usd=0, runs_per_minute=3)
    assert await get_terms(service) == Terms(credits_per_usd=0, runs_per_minute=3)
    elsewhere = service.people["role elsewhere"]
    other = (await elsewhere.call(elsewhere.billing.GetTerms, api.GetTermsRequest())).terms
    assert other == Terms(credits_per_usd=CREDITS_PER_USD, runs_per_minute=runs_per_minute)


@pytest.mark.parametrize("field", ["credits_per_usd", "runs_per_minute"])
async def test_terms_have_bounds(service: Service, field: str) -> None:
    least, most = {"credits_per_usd": (0, 10**9), "runs_per_minute": (1, 10**6)}[field]
    for value in (least, most):
        assert getattr(await set_terms(service, **{field: value}), field) == value
    for value in (least - 1, most + 1):
        request = api.SetTermsRequest(terms=Terms(**{field: value}))
        error = await service.role.refusal(service.role.billing.SetTerms, request)
        assert (error.reason, error.metadata) == ("INVALID_OPTIONS", {"field": field})
    assert getattr(await get_terms(service), field) == most


@pytest.mark.parametrize("runs_per_minute", [1])
async def test_a_projects_own_rate_limit_holds(service: Service, runs_per_minute: int) -> None:
    await set_terms(service, runs_per_minute=3)
    assert reasons(await outcomes(service, [service.ask() for _ in range(5)])) == ["AI_RATE_LIMITED"] * 2


async def test_a_hold_keeps_the_credit_rate_it_was_placed_with(service: Service) -> None:
    first, second, barred = service.ask(), service.ask(), service.ask()
    assert (await service.place(first)).credits_per_usd == CREDITS_PER_USD
    await service.release(barred)
    await set_terms(service, credits_per_usd=0)
    assert (await service.place(second)).credits_per_usd == 0
    assert (await service.place(first)).credits_per_usd == CREDITS_PER_USD
    assert (await service.place(barred)).credits_per_usd == CREDITS_PER_USD
