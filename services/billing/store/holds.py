"""SQL for holds, the ledger and the rate limit. Each call of `place` and `settle` is one transaction's whole work."""

from dataclasses import dataclass
from datetime import date, datetime
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from kit.errors import ServiceError, not_found
from kit.pricing import Rates, Usage, cost
from services.billing import limits
from services.billing.domain import closing
from services.billing.domain.granting import Wish, grant, wait_for_window
from services.billing.store import accounts


@dataclass(frozen=True)
class HoldRow:
    """A hold as stored."""

    api_call_id: UUID
    project_id: UUID
    user_id: str
    run_id: UUID
    thread_id: UUID
    model: str
    input_max: int
    output_max: int
    output_min: int
    output_granted: int
    amount_nano: int
    rates: bytes
    status: str
    day: date
    expires_at: datetime


@dataclass(frozen=True)
class LedgerEntry:
    """A booked call as stored."""

    api_call_id: UUID
    project_id: UUID
    user_id: str
    run_id: UUID
    thread_id: UUID
    model: str
    tokens_in: int
    cached_tokens: int
    cache_write_tokens: int
    tokens_out: int
    thinking_tokens: int
    cost_nano: int
    reported_nano: int
    estimated: bool
    above_hold: bool
    late: bool
    booked_at: datetime


@dataclass(frozen=True)
class Call:
    """A call somebody wants to make."""

    id: UUID
    project: UUID
    user: str
    run: UUID
    thread: UUID
    model: str
    wish: Wish


HOLD = ", ".join(HoldRow.__dataclass_fields__)
ENTRY = ", ".join(LedgerEntry.__dataclass_fields__)
GET = text(f"SELECT {HOLD} FROM billing.holds WHERE api_call_id = :id AND project_id = :project")
LOCK = text(f"SELECT {HOLD} FROM billing.holds WHERE api_call_id = :id AND project_id = :project FOR UPDATE")
INSERT = text(
    "INSERT INTO billing.holds (api_call_id, project_id, user_id, run_id, thread_id, model, input_max, output_max,"
    " output_min, output_granted, amount_nano, rates, day, expires_at) VALUES (:id, :project, :user, :run, :thread,"
    " :model, :input_max, :output_max, :output_min, :granted, :amount, :rates, :day,"
    f" clock_timestamp() + make_interval(secs => :seconds)) RETURNING {HOLD}"
)
SET_STATUS = text("UPDATE billing.holds SET status = :status WHERE api_call_id = :id")
IS_COUNTED = text("SELECT EXISTS (SELECT FROM billing.holds WHERE project_id = :project AND run_id = :run)")
ENSURE_WINDOW = text(
    "INSERT INTO billing.rate_windows (project_id, user_id) VALUES (:project, :user) ON CONFLICT DO NOTHING"
)
# A window that has passed is read as empty; the user's accounts are locked, so nobody else counts meanwhile.
WINDOW = text(
    "SELECT CASE WHEN past THEN 0 ELSE used END, CASE WHEN past THEN 0 ELSE :seconds - age END FROM ("
    " SELECT used, age, age >= :seconds AS past FROM (SELECT used,"
    " extract(epoch FROM clock_timestamp() - started_at)::float8 AS age FROM billing.rate_windows"
    " WHERE project_id = :project AND user_id = :user) aged) found"
)
COUNT = text(
    "UPDATE billing.rate_windows SET used = CASE WHEN :used = 0 THEN 1 ELSE used + 1 END,"
    " started_at = CASE WHEN :used = 0 THEN clock_timestamp() ELSE started_at END"
    " WHERE project_id = :project AND user_id = :user"
)
GET_ENTRY = text(f"SELECT {ENTRY} FROM billing.cost_ledger WHERE api_call_id = :id AND project_id = :project")
BOOK = text(
    "INSERT INTO billing.cost_ledger (api_call_id, project_id, user_id, run_id, thread_id, model, tokens_in,"
    " cached_tokens, cache_write_tokens, tokens_out, thinking_tokens, cost_nano, reported_nano, estimated, above_hold,"
    " late, day) VALUES (:id, :project, :user, :run, :thread, :model, :input, :cached_input, :cache_write, :output,"
    f" :reasoning, :cost, :reported, :estimated, :above_hold, :late, :day) RETURNING {ENTRY}"
)
LIST = text(
    f"SELECT {ENTRY} FROM billing.cost_ledger WHERE project_id = :project"
    " AND (CAST(:user AS text) = '' OR user_id = :user) AND (CAST(:before AS timestamptz) IS NULL"
    " OR (booked_at, api_call_id) < (CAST(:before AS timestamptz), CAST(:before_id AS uuid)))"
    " ORDER BY booked_at DESC, api_call_id DESC LIMIT :limit"
)


async def get(tx: AsyncConnection, call: Call) -> HoldRow | None:
    """The hold this call has already. Raises IDEMPOTENCY_KEY_REUSED when the id was used for another."""
    row = (await tx.execute(GET, {"id": call.id, "project": call.project})).one_or_none()
    if row is None:
        return None
    found = HoldRow(**row._mapping)
    asked = Wish(found.input_max, found.output_max, found.output_min)
    was = Call(found.api_call_id, found.project_id, found.user_id, found.run_id, found.thread_id, found.model, asked)
    if was != call:
        raise _reused()
    return found


async def place(tx: AsyncConnection, call: Call, rates: Rates, stored_rates: bytes, *, runs_per_minute: int) -> HoldRow:
    """Checks and books in one: the accounts are locked first, and stay so until the commit."""
    day = await accounts.today(tx)
    sums = await accounts.lock(tx, call.project, call.user, day)
    if (found := await get(tx, call)) is not None:  # its twin was faster
        return found
    await _count_run(tx, call, runs_per_minute)
    limits_now = await accounts.limits_of(tx, call.project, call.user, day, sums)
    granted = grant(rates, call.wish, limits_now)
    values = {
        "id": call.id, "project": call.project, "user": call.user, "run": call.run, "thread": call.thread,
        "model": call.model, "input_max": call.wish.input_max, "output_max": call.wish.output_max,
        "output_min": call.wish.output_min, "granted": granted.output, "amount": granted.amount,
        "rates": stored_rates, "day": day, "seconds": limits.HOLD_SECONDS,
    }  # fmt: skip
    try:
        row = (await tx.execute(INSERT, values)).one()
    except IntegrityError:  # another project's call, which this one must not see
        raise _reused() from None
    await accounts.move(tx, call.project, sums, held=granted.amount, spent=0)
    return HoldRow(**row._mapping)


async def lock(tx: AsyncConnection, project: UUID, id: UUID) -> HoldRow:
    """The hold, which nobody else closes until the commit. Raises NOT_FOUND."""
    row = (await tx.execute(LOCK, {"id": id, "project": project})).one_or_none()
    if row is None:
        raise not_found("hold")
    return HoldRow(**row._mapping)


async def settle(
    tx: AsyncConnection, hold: HoldRow, rates: Rates, usage: Usage, *, estimated: bool, reported: int
) -> tuple[LedgerEntry, bool]:
    """Books a call whose hold `lock` found. (The entry, whether it is new.) Raises IDEMPOTENCY_KEY_REUSED."""
    if row := (await tx.execute(GET_ENTRY, {"id": hold.api_call_id, "project": hold.project_id})).one_or_none():
        booked = LedgerEntry(**row._mapping)
        if (usage_of(booked), booked.estimated, booked.reported_nano) != (usage, estimated, reported):
            raise _reused()
        return booked, False
    total = cost(rates, usage)
    change = closing.settle(hold.status, hold.amount_nano, total)
    values = {
        "id": hold.api_call_id, "project": hold.project_id, "user": hold.user_id, "run": hold.run_id,
        "thread": hold.thread_id, "model": hold.model, **vars(usage), "cost": total, "reported": reported,
        "estimated": estimated, "above_hold": change.above_hold, "late": change.late, "day": hold.day,
    }  # fmt: skip
    row = (await tx.execute(BOOK, values)).one()
    await _close(tx, hold, change)
    return LedgerEntry(**row._mapping), True


async def release(tx: AsyncConnection, hold: HoldRow) -> str:
    """Frees a hold that `lock` found; its status afterwards."""
    change = closing.release(hold.status, hold.amount_nano)
    if change.status != hold.status:
        await _close(tx, hold, change)
    return change.status


async def list_entries(
    tx: AsyncConnection, project: UUID, user: str, *, before: tuple[datetime, UUID] | None, limit: int
) -> list[LedgerEntry]:
    """At most `limit` entries, newest first, of one user or, with '', of all that the transaction sees."""
    at, id = before or (None, None)
    values = {"project": project, "user": user, "before": at, "before_id": id, "limit": limit}
    return [LedgerEntry(**row._mapping) for row in await tx.execute(LIST, values)]


def usage_of(entry: LedgerEntry) -> Usage:
    """The tokens of an entry."""
    return Usage(
        entry.tokens_in, entry.tokens_out, entry.cached_tokens, entry.cache_write_tokens, entry.thinking_tokens
    )


async def _close(tx: AsyncConnection, hold: HoldRow, change: closing.Closing) -> None:
    sums = await accounts.lock(tx, hold.project_id, hold.user_id, hold.day)
    await accounts.move(tx, hold.project_id, sums, held=change.held, spent=change.spent)
    await tx.execute(SET_STATUS, {"status": change.status, "id": hold.api_call_id})


async def _count_run(tx: AsyncConnection, call: Call, allowed: int) -> None:
    """Takes the run's one unit with its first hold (R134). A hold that is refused gives it back by rolling back."""
    if (await tx.execute(IS_COUNTED, {"project": call.project, "run": call.run})).scalar_one():
        return
    named = {"project": call.project, "user": call.user}
    await tx.execute(ENSURE_WINDOW, named)
    used, left = (await tx.execute(WINDOW, {**named, "seconds": limits.WINDOW_SECONDS})).one()
    wait = wait_for_window(used, allowed, left)
    if wait is not None:
        raise ServiceError("AI_RATE_LIMITED", "Too many requests in a minute. Wait a moment.", retry_after=wait)
    await tx.execute(COUNT, {**named, "used": used})


def _reused() -> ServiceError:
    return ServiceError("IDEMPOTENCY_KEY_REUSED", "This api_call_id was used for another call or other numbers.")
