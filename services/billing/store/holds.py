"""SQL for what moves money: a hold placed, settled or released, each one statement on a connection in autocommit.

The functions are in migration 0002. They lock, verify and book; what a call costs and what
is granted is decided before, in `services.billing.moves`. A function that finds the decision
out of date (another price, less money) books nothing and answers with what is true.

A call's row is made by whichever comes first, its PlaceHold or its Release, and whoever
comes second finds it: both insert with ON CONFLICT DO NOTHING, which waits for the other's
commit, and then read again. A Release that comes first leaves a row without rates, which
bars the call: nothing is ever set aside for it.
"""

from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.types.numeric import Int8

from kit.pricing import Usage
from services.billing import limits
from services.billing.domain.calls import Call
from services.billing.domain.granting import Grant, Limit, Wish
from services.billing.domain.terms import Terms
from services.billing.store.ledger import ENTRY, LedgerEntry


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


HOLD = list(HoldRow.__dataclass_fields__)
ENTRIES = ENTRY.split(", ")
PLACE = (
    "SELECT o_outcome, o_rates, o_wait, o_is_quota, o_periods, o_limits, o_used, o_credits, "
    + ", ".join(f"(o_hold).{name}" for name in HOLD)
    + " FROM billing.place_hold(%(id)b, %(project)b, %(user)b, %(run)b, %(thread)b, %(message)b, %(model)b,"
    " %(input_max)b, %(output_max)b, %(output_min)b, %(output)b, %(amount)b, %(known)b::bytea, %(rates)b::bytea,"
    " %(credits)b, %(runs)b, %(seconds)b, %(window)b)"
)
SETTLE = (
    "SELECT o_outcome, o_rates, o_model, "
    + ", ".join(f"(o_entry).{name}" for name in ENTRIES)
    + " FROM billing.settle_call(%(id)b, %(project)b, %(input)b, %(cached_input)b, %(cache_write)b, %(output)b,"
    " %(reasoning)b, %(estimated)b, %(reported)b, %(rates)b::bytea[], %(costs)b::bigint[], %(published)b::bytea)"
)
RELEASE = (
    "SELECT billing.release_call(%(id)b, %(project)b, %(user)b, %(run)b, %(thread)b, %(message)b, %(model)b,"
    " %(credits)b)"
)


class Placed(NamedTuple):
    """What a PlaceHold found; which fields count is said with `o_outcome` in the migration."""

    outcome: str
    rates: bytes | None
    wait: float  # seconds
    limits: list[Limit]
    credits_per_usd: int
    hold: HoldRow | None


class Settled(NamedTuple):
    """What a Settle found, likewise."""

    outcome: str
    rates: bytes | None
    model: str
    entry: LedgerEntry | None


async def place(
    connection: AsyncConnection,
    call: Call,
    wish: Wish,
    granted: Grant,
    defaults: Terms,
    *,
    known: bytes | None,
    rates: bytes | None,
) -> Placed:
    """Sets aside what is granted, if `known` is the price somebody set and every limit pays; `rates` are the hold's."""
    values = {
        **vars(call), "input_max": Int8(wish.input_max), "output_max": Int8(wish.output_max),
        "output_min": Int8(wish.output_min), "output": Int8(granted.output), "amount": Int8(granted.amount),
        "known": known, "rates": rates, "credits": Int8(defaults.credits_per_usd),
        "runs": Int8(defaults.runs_per_minute), "seconds": limits.HOLD_SECONDS, "window": limits.WINDOW_SECONDS,
    }  # fmt: skip
    outcome, stored, wait, quotas, periods, most, used, credits, *hold = await _one(connection, PLACE, values)
    found = [] if quotas is None else [Limit(*one) for one in zip(quotas, periods, most, map(int, used), strict=True)]
    return Placed(outcome, stored, wait or 0.0, found, credits or 0, None if hold[0] is None else HoldRow(*hold))


async def settle(
    connection: AsyncConnection,
    project: UUID,
    id: UUID,
    usage: Usage,
    *,
    estimated: bool,
    reported: int,
    costs: dict[bytes, int],
    published: bytes | None,
) -> Settled:
    """Books a call, if the hold's rates (those `published` of a call that was barred) are among `costs`."""
    values = {
        "id": id, "project": project, "input": Int8(usage.input), "cached_input": Int8(usage.cached_input),
        "cache_write": Int8(usage.cache_write), "output": Int8(usage.output), "reasoning": Int8(usage.reasoning),
        "estimated": estimated, "reported": Int8(reported), "rates": list(costs),
        "costs": [Int8(nano) for nano in costs.values()], "published": published,
    }  # fmt: skip
    outcome, stored, model, *entry = await _one(connection, SETTLE, values)
    return Settled(outcome, stored, model or "", None if entry[0] is None else LedgerEntry(*entry))


async def release(connection: AsyncConnection, call: Call, defaults: Terms) -> str | None:
    """Frees a call's hold or bars the call; the status afterwards, None where the id stands for another call."""
    values = {**vars(call), "credits": Int8(defaults.credits_per_usd)}
    (status,) = await _one(connection, RELEASE, values)
    return None if status is None else str(status)


async def _one(connection: AsyncConnection, sql: str, values: dict[str, Any]) -> tuple[Any, ...]:
    cursor = await connection.execute(sql.encode(), values, prepare=True, binary=True)
    row: tuple[Any, ...] | None = await cursor.fetchone()
    assert row is not None  # each is a function's one row
    return row
