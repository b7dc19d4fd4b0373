"""Random schedules of holds, settles, releases and expiries: never overspent, never a hold lost."""

import asyncio
import random

import pytest

from kit.errors import ServiceError
from tests.contract.billing.harness import NANO, Service
from threadloom.billing.v1 import billing_service_pb2 as api

SCHEDULES = 150
BATCH = 15  # schedules a test, each of which checks the books at its end
CALLS = 8
EXPIRE = "UPDATE billing.holds SET expires_at = clock_timestamp() WHERE api_call_id = %s"


async def live(service: Service, seed: int, request: api.PlaceHoldRequest, spent: list[int]) -> None:
    """One call's life, with repeats, pauses and every kind of end. Tokens stay within the hold."""
    dice = random.Random(seed)
    id = request.api_call_id
    for _ in range(dice.choice([1, 1, 2])):
        try:
            hold = await service.place(request)
        except ServiceError as error:
            if error.reason == "AI_BUDGET_EXCEEDED":
                return
            raise
    tokens = request.input_tokens_max, dice.randint(0, hold.granted_output_tokens)
    settle = [service.settle] * dice.choice([1, 2])
    match dice.choice(["settle", "settle", "release", "release then settle", "both", "expire"]):
        case "settle":
            await asyncio.gather(*(once(id, *tokens) for once in settle))
        case "release":
            await asyncio.gather(service.release(id), service.release(id))
            return
        case "release then settle":
            await service.release(id)
            await service.settle(id, *tokens)
        case "both":
            await asyncio.gather(service.release(id), service.settle(id, *tokens))
        case "expire":
            await service.rows(EXPIRE, id)
            await service.upkeep.sweep()
            return
    spent.append(NANO * sum(tokens))


async def late_spending(service: Service) -> int:
    """Nano-USD booked after their hold was freed."""
    ((found,),) = await service.rows("SELECT coalesce(sum(cost_nano), 0)::bigint FROM billing.cost_ledger WHERE late")
    return int(found)


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
async def test_no_schedule_overspends_or_leaks(service: Service, first: int) -> None:
    spent: list[int] = []
    for seed in range(first, first + BATCH):
        dice = random.Random(seed)
        before = await service.sums()
        limit = before[1] + dice.randint(0, 6) * 20 * NANO
        await service.cap(limit)
        requests = [
            service.ask(
                user_id=dice.choice(["alice", "bob"]),
                max_output_tokens=(most := dice.randint(1, 20)),
                min_output_tokens=dice.randint(1, most),
            )
            for _ in range(CALLS)
        ]
        earlier, late_before = sum(spent), await late_spending(service)
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                group.create_task(live(service, seed * 1000 + number, request, spent))
        assert await service.sums() == (0, sum(spent)), f"seed {seed}"
        # A call that was made after its hold was freed is booked all the same: only those may pass the cap.
        timely = sum(spent) - earlier - (await late_spending(service) - late_before)
        assert timely <= limit - before[1], f"seed {seed}"
        assert await service.rows("SELECT sum(cost_nano) FROM billing.cost_ledger") == [(sum(spent) or None,)]
        assert await service.upkeep.reconcile() == [], f"seed {seed}"
