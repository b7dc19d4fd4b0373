"""SQL for holds. Each call of `place`, `settle` and `release` is one transaction's whole work.

A call's row is made by whichever comes first, its PlaceHold or its Release, and whoever
comes second finds it: both insert with ON CONFLICT DO NOTHING, which waits for the other's
commit, and then read again. A Release that comes first leaves a row without rates, which
bars the call: nothing is ever set aside for it.
"""

from dataclasses import dataclass
from datetime import date, datetime
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from kit.pricing import Rates, Usage, cost
from services.billing import limits
from services.billing.domain import closing
from services.billing.domain.calls import Call
from services.billing.domain.granting import Wish, grant
from services.billing.domain.terms import Terms
from services.billing.store import accounts, ledger, rate_limit
from services.billing.store.ledger import LedgerEntry, reused


@dataclass(frozen=True)
class HoldRow:
    """A hold as stored. `rates` is a billing.v1.Rates; None: the call was barred before it had a hold."""

    api_call_id: UUID
    project_id: UUID
    user_id: str
    run_id: UUID
    thread_id: UUID
    message_id: UUID
    model: str
    input_max: int
    output_max: int
    output_min: int
    output_granted: int
    amount_nano: int
    rates: bytes | None
    credits_per_usd: int
    status: str
    day: date
    expires_at: datetime

    @property
    def call(self) -> Call:
        """Whose it is."""
        return Call(
            self.api_call_id,
            self.project_id,
            self.user_id,
            self.run_id,
            self.thread_id,
            self.message_id,
            self.model,
        )

    @property
    def wish(self) -> Wish:
        """What was asked for; of a barred call nothing was."""
        return Wish(self.input_max, self.output_max, self.output_min)


HOLD = ", ".join(HoldRow.__dataclass_fields__)
GET = text(f"SELECT {HOLD} FROM billing.holds WHERE api_call_id = :id AND project_id = :project")
LOCK = text(f"SELECT {HOLD} FROM billing.holds WHERE api_call_id = :id AND project_id = :project FOR UPDATE")
PLACE = text(
    "INSERT INTO billing.holds (api_call_id, project_id, user_id, run_id, thread_id, message_id, model, input_max,"
    " output_max, output_min, output_granted, amount_nano, rates, credits_per_usd, day, expires_at)"
    " VALUES (:id, :project, :user, :run, :thread, :message, :model, :input_max, :output_max, :output_min, :granted,"
    " :amount, :rates, :credits, :day, clock_timestamp() + make_interval(secs => :seconds))"
    f" ON CONFLICT DO NOTHING RETURNING {HOLD}"
)
BAR = text(
    "INSERT INTO billing.holds (api_call_id, project_id, user_id, run_id, thread_id, message_id, model, input_max,"
    " output_max, output_min, output_granted, amount_nano, credits_per_usd, status, day, expires_at, closed_at)"
    " VALUES (:id, :project, :user, :run, :thread, :message, :model, 0, 0, 0, 0, 0, :credits, :status, :day,"
    " clock_timestamp(), clock_timestamp()) ON CONFLICT DO NOTHING"
)
CLOSE = text("UPDATE billing.holds SET status = :status, closed_at = clock_timestamp() WHERE api_call_id = :id")


async def get(tx: AsyncConnection, call: Call, wish: Wish) -> HoldRow | None:
    """What this call has already. Raises IDEMPOTENCY_KEY_REUSED when the id was used for another."""
    row = (await tx.execute(GET, {"id": call.id, "project": call.project})).one_or_none()
    if row is None:
        return None
    found = HoldRow(**row._mapping)
    if found.call != call or (found.rates is not None and found.wish != wish):
        raise reused()
    return found


async def place(
    tx: AsyncConnection, call: Call, wish: Wish, rates: Rates, stored_rates: bytes, terms: Terms
) -> HoldRow:
    """Checks and books in one: the accounts are locked first, and stay so until the commit."""
    day = await accounts.today(tx)
    sums = await accounts.lock(tx, call.project, call.user, day)
    if (found := await get(tx, call, wish)) is not None:  # its twin was faster
        return found
    # After the hold: where that is removed, it was settled long ago.
    if (entry := await ledger.get(tx, call.project, call.id)) is not None:
        return _remembered(entry, call, wish, terms)
    used = await rate_limit.look(tx, call, terms.runs_per_minute)
    limits_now = await accounts.limits_of(tx, call.project, call.user, day, sums)
    granted = grant(rates, wish, limits_now)
    values = {
        **vars(call), **vars(wish), "granted": granted.output, "amount": granted.amount, "rates": stored_rates,
        "credits": terms.credits_per_usd, "day": day, "seconds": limits.HOLD_SECONDS,
    }  # fmt: skip
    row = (await tx.execute(PLACE, values)).one_or_none()
    if row is None:  # barred meanwhile, or another project's call, which this one must not see
        if (found := await get(tx, call, wish)) is None:
            raise reused()
        return found
    if used is not None:
        await rate_limit.take(tx, call, used)
    await accounts.move(tx, call.project, sums, held=granted.amount, spent=0)
    return HoldRow(**row._mapping)


async def lock(tx: AsyncConnection, project: UUID, id: UUID) -> HoldRow | None:
    """The hold, which nobody else closes until the commit; None when there is none, or it was removed."""
    row = (await tx.execute(LOCK, {"id": id, "project": project})).one_or_none()
    return None if row is None else HoldRow(**row._mapping)


async def settle(
    tx: AsyncConnection, hold: HoldRow, rates: Rates, usage: Usage, *, estimated: bool, reported: int
) -> LedgerEntry:
    """Books a call that is not in the ledger, and whose hold `lock` found."""
    change = closing.settle(hold.status, hold.amount_nano, cost(rates, usage))
    entry = await ledger.book(tx, hold.call, usage, change, estimated=estimated, reported=reported, day=hold.day)
    await _close(tx, hold, change)
    return entry


async def release(tx: AsyncConnection, call: Call, credits_per_usd: int) -> str:
    """Frees a call's hold or bars the call; the status afterwards. Raises IDEMPOTENCY_KEY_REUSED."""
    hold = await lock(tx, call.project, call.id)
    if hold is None:
        if (entry := await ledger.get(tx, call.project, call.id)) is not None:  # settled and removed
            if entry.call != call:
                raise reused()
            return closing.SETTLED
        if await _bar(tx, call, credits_per_usd):
            return closing.RELEASED
        hold = await lock(tx, call.project, call.id)
    if hold is None or hold.call != call:  # None: another project's call, which this one must not see
        raise reused()
    change = closing.release(hold.status, hold.amount_nano)
    if change.status != hold.status:
        await _close(tx, hold, change)
    return change.status


async def _bar(tx: AsyncConnection, call: Call, credits_per_usd: int) -> bool:
    """Leaves a row that bars the call; False when its id has a row by now."""
    values = {
        **vars(call), "credits": credits_per_usd, "status": closing.RELEASED, "day": await accounts.today(tx),
    }  # fmt: skip
    return bool((await tx.execute(BAR, values)).rowcount)


async def _close(tx: AsyncConnection, hold: HoldRow, change: closing.Closing) -> None:
    sums = await accounts.lock(tx, hold.project_id, hold.user_id, hold.day)
    await accounts.move(tx, hold.project_id, sums, held=change.held, spent=change.spent)
    await tx.execute(CLOSE, {"status": change.status, "id": hold.api_call_id})


def _remembered(entry: LedgerEntry, call: Call, wish: Wish, terms: Terms) -> HoldRow:
    """What is left of a hold that was removed: it is settled, and grants nothing any more."""
    if entry.call != call:
        raise reused()
    return HoldRow(
        *(entry.api_call_id, entry.project_id, entry.user_id, entry.run_id, entry.thread_id, entry.message_id),
        *(entry.model, wish.input_max, wish.output_max, wish.output_min),
        output_granted=0,
        amount_nano=0,
        rates=None,
        credits_per_usd=terms.credits_per_usd,
        status=closing.SETTLED,
        day=entry.booked_at.date(),
        expires_at=entry.booked_at,
    )
