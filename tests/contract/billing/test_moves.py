"""What moves money is one round trip to Postgres, and what it is decided with may be out of date."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from services.billing import limits
from tests.contract.billing.harness import MODEL, NANO, RATES, Service, outcomes, reasons
from tests.contract.billing.wire_counter import WireCounter
from tests.support import databases
from tests.support.databases import Database
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.hold_pb2 import Hold, HoldState

HOLD = 20 * NANO
LEAST = 11 * NANO  # 10 tokens in and 1 out
TIMES = 8
KILL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'threadloom_billing'"


@pytest_asyncio.fixture
async def wire(books: Database) -> AsyncIterator[WireCounter]:
    port = urlsplit(books.billing_request_url).port
    assert port is not None
    found = WireCounter(port)
    server = await found.start()
    yield found
    server.close()


@pytest.fixture
def request_url(books: Database, url: str, wire: WireCounter) -> str:
    """Postgres, by way of the counter."""
    return databases.at_port(books.billing_request_url, wire.port)


async def warm(service: Service) -> None:
    """Every connection has each statement prepared, and the price is known."""
    for _ in range(2 * limits.KEPT_CONNECTIONS):
        request = service.ask()
        await service.place(request)
        await service.settle(request.api_call_id, 1, 1)
        await service.release(service.ask())


@pytest.mark.parametrize("move", ["place", "settle", "release", "bar", "place again", "settle again", "refuse"])
async def test_a_move_is_one_round_trip(service: Service, wire: WireCounter, move: str) -> None:
    await warm(service)
    requests = [service.ask() for _ in range(TIMES)]
    for request in requests:  # one by one, on the connections that are warm
        if move not in ("place", "bar", "refuse"):
            await service.place(request)
        if move == "settle again":
            await service.settle(request.api_call_id, 1, 1)
    if move == "refuse":
        await service.quota(0)
        assert reasons(await outcomes(service, [service.ask()])) == ["QUOTA_EXCEEDED"]
    before = wire.trips
    for request in requests:
        match move:
            case "settle" | "settle again":
                await service.settle(request.api_call_id, 1, 1)
            case "release" | "bar":
                await service.release(request)
            case "refuse":
                assert reasons(await outcomes(service, [request])) == ["QUOTA_EXCEEDED"]
            case _:
                await service.place(request)
    assert wire.trips - before == TIMES


@pytest.mark.parametrize("tries", [1, limits.PLACE_TRIES])
async def test_many_at_once_share_what_is_left_to_the_last_token(
    service: Service, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    monkeypatch.setattr(limits, "PLACE_TRIES", tries)
    money = 5 * HOLD + 15 * NANO
    await service.quota(money)
    found = await outcomes(service, [service.ask(min_output_tokens=1) for _ in range(50)])
    amounts = [one.amount.nano_usd for one in found if isinstance(one, Hold)]
    assert set(reasons(found)) == {"QUOTA_EXCEEDED"}
    assert sum(amounts) == (await service.sums())[0]
    assert money - LEAST < sum(amounts) <= money


@pytest.mark.parametrize("tries", [1, limits.PLACE_TRIES])
async def test_money_that_goes_between_two_tries_is_not_granted_twice(
    service: Service, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    monkeypatch.setattr(limits, "PLACE_TRIES", tries)
    for _ in range(10):
        (_, before) = await service.sums()
        await service.cap(before + 15 * NANO)
        requests = [service.ask(min_output_tokens=least) for least in (1, 2, 3, 4, 5)]
        found = await outcomes(service, requests)
        assert [one.amount.nano_usd for one in found if isinstance(one, Hold)] == [15 * NANO]
        assert reasons(found) == ["AI_BUDGET_EXCEEDED"] * 4
        for request in requests:
            await service.release(request)


async def test_a_price_another_process_set_counts_for_the_next_hold(service: Service) -> None:
    await service.place(service.ask())
    dearer = type(RATES)()
    dearer.CopyFrom(RATES)
    dearer.base.output.nano_usd *= 9
    await service.rows("UPDATE billing.model_prices SET rates = %s WHERE model = %s", dearer.SerializeToString(), MODEL)
    assert (await service.place(service.ask())).amount.nano_usd == 100 * NANO


async def test_a_settle_knows_the_rates_of_a_hold_that_nobody_remembers(service: Service) -> None:
    first = service.ask()
    await service.place(first)
    for number in range(limits.RATES_GUESSED + 1):
        rates = type(RATES)()
        rates.CopyFrom(RATES)
        rates.request_fee.nano_usd = number + 1
        await service.role.call(service.role.billing.SetPrice, api.SetPriceRequest(model="other", rates=rates))
        request = service.ask(model="other")
        await service.place(request)
    assert (await service.settle(first.api_call_id, 2, 3)).cost.nano_usd == 5 * NANO


async def test_connections_that_died_are_no_error(service: Service) -> None:
    await warm(service)
    held = [service.ask() for _ in range(TIMES)]
    for request in held:
        await service.place(request)
    await service.rows(KILL)
    settled = await asyncio.gather(*(service.settle(request.api_call_id, 1, 1) for request in held))
    assert [entry.cost.nano_usd for entry in settled] == [2 * NANO] * TIMES
    await service.rows(KILL)
    again = service.ask()
    assert (await service.place(again)).state == HoldState.HOLD_STATE_OPEN
    await service.rows(KILL)
    assert await service.release(again) == HoldState.HOLD_STATE_RELEASED
