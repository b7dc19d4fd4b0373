"""Made-up schedules of holds, settles, releases and expiries: never overspent, never a hold lost."""

import asyncio
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.errors import ServiceError
from tests.contract.billing.harness import NANO, Service
from threadloom.billing.v1 import billing_service_pb2 as api

EXPIRE = "UPDATE billing.holds SET expires_at = clock_timestamp() WHERE api_call_id = %s"
ENDS = (
    *("settle", "release", "release then settle", "both at once", "expire", "expire then settle"),
    *("release while it is placed", "barred", "barred then settle"),
)


@dataclass(frozen=True)
class Life:
    """What becomes of one call. `times` is how often each of its requests is sent, at once."""

    user: str
    most: int
    least: int
    used: int  # output tokens; cut to what was granted
    end: str
    times: int


LIVES = st.builds(
    Life,
    st.sampled_from(["alice", "bob"]),
    st.integers(10, 20),
    st.integers(1, 10),
    st.integers(0, 20),
    st.sampled_from(ENDS),
    st.sampled_from([1, 1, 2]),
)


async def live(service: Service, life: Life, spent: list[int]) -> None:
    """One call's life; adds what it cost. Its tokens stay within the hold."""
    request = service.ask(user_id=life.user, max_output_tokens=life.most, min_output_tokens=life.least)
    id = request.api_call_id
    if life.end.startswith("barred"):
        await asyncio.gather(*(service.release(request) for _ in range(life.times)))
    work = [placed(service, request, life.times)]
    if life.end == "release while it is placed":
        work.append(service.release(request))
    granted = (await asyncio.gather(*work))[0]
    if granted is None:
        return
    tokens = request.input_tokens_max, min(life.used, granted)
    match life.end:
        case "release" | "release then settle":
            await asyncio.gather(*(service.release(request) for _ in range(life.times)))
        case "expire" | "expire then settle":
            await service.rows(EXPIRE, id)
            await service.upkeep.sweep()
    if life.end in ("release", "expire", "release while it is placed", "barred"):
        return
    work = [service.settle(id, *tokens) for _ in range(life.times)]
    if life.end == "both at once":
        work.append(service.release(request))
    await asyncio.gather(*work)
    spent.append(NANO * sum(tokens))


async def placed(service: Service, request: api.PlaceHoldRequest, times: int) -> int | None:
    """Output tokens granted; None when no money was left. A twin may find money that was freed meanwhile."""
    found = await asyncio.gather(*(service.place(request) for _ in range(times)), return_exceptions=True)
    grants = {one.granted_output_tokens for one in found if not isinstance(one, BaseException)}
    refusals = {one.reason for one in found if isinstance(one, ServiceError)}
    assert refusals <= {"AI_BUDGET_EXCEEDED"}, refusals
    assert len(grants) <= 1, grants
    return grants.pop() if grants else None


async def late_spending(service: Service) -> int:
    """Nano-USD booked after their hold was freed."""
    ((found,),) = await service.rows("SELECT coalesce(sum(cost_nano), 0)::bigint FROM billing.cost_ledger WHERE late")
    return int(found)


@given(lives=st.lists(LIVES, min_size=1, max_size=8), money=st.integers(0, 120 * NANO))
@settings(
    derandomize=True,
    max_examples=100,
    deadline=None,
    # One service for all schedules: each begins with the books the one before it left, and looks at the difference.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_no_schedule_overspends_or_leaks(service: Service, lives: list[Life], money: int) -> None:
    _, before = await service.sums()
    late_before, spent = await late_spending(service), list[int]()
    await service.cap(before + money)
    async with asyncio.TaskGroup() as group:
        for life in lives:
            group.create_task(live(service, life, spent))
    assert await service.sums() == (0, before + sum(spent))
    # A call that was made after its hold was freed is booked all the same: only those may pass the cap.
    assert sum(spent) - (await late_spending(service) - late_before) <= money
    ((booked,),) = await service.rows("SELECT coalesce(sum(cost_nano), 0)::bigint FROM billing.cost_ledger")
    assert booked == before + sum(spent)
    assert await service.upkeep.reconcile() == []
