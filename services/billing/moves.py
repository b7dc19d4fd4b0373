"""Moves money: decides in Python what a call costs and is granted, and lets Postgres verify it under its locks.

The one source of the rules is `domain.granting` and `kit.pricing`. What they are decided with
is a guess at first (the newest price seen, no limit that binds) and is never believed: the
statement books only what is right by the price in force and within every limit, and else
answers with both, by which it is decided again. So the usual case is one round trip, and
no lock is held while a client thinks (docs/decisions/0018-one-statement-moves.md).
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar
from uuid import UUID

import psycopg
import psycopg_pool
from psycopg import AsyncConnection

from kit.db import translated
from kit.errors import ServiceError, not_found, unavailable
from kit.pricing import Usage, cost
from kit.rates import to_message
from services.billing import limits
from services.billing.catalogue import published_rates
from services.billing.domain import closing
from services.billing.domain.calls import Call
from services.billing.domain.granting import Grant, Limit, Wish, grant
from services.billing.domain.terms import Terms
from services.billing.store import holds, ledger
from services.billing.store.guesses import Guesses, rates_of
from services.billing.store.holds import HoldRow
from services.billing.store.ledger import LedgerEntry, check_same, reused
from services.billing.translate import not_priced

Found = TypeVar("Found")


class Booked(NamedTuple):
    """A call's entry, and whether it was booked just now."""

    entry: LedgerEntry
    is_new: bool


class Moves:
    """Places, settles and releases over connections in autocommit, of the request role."""

    def __init__(self, pool: psycopg_pool.AsyncConnectionPool, defaults: Terms) -> None:
        self._pool, self._defaults, self._guesses = pool, defaults, Guesses()

    async def place(self, call: Call, wish: Wish) -> HoldRow:
        """Sets money aside for a call, or finds what is set aside for it.

        Raises MODEL_NOT_PRICED, AI_RATE_LIMITED, QUOTA_EXCEEDED, AI_BUDGET_EXCEEDED and IDEMPOTENCY_KEY_REUSED.
        """
        placing = _Placing(self._guesses, call, wish, self._defaults)
        found = await self._use(lambda connection: placing.run(connection, limits.PLACE_TRIES))
        return found if found is not None else await self._use(placing.run_locked)

    async def settle(self, project: UUID, id: UUID, usage: Usage, *, estimated: bool, reported: int) -> Booked:
        """Books a call once, whatever became of its hold.

        Raises NOT_FOUND, MODEL_NOT_PRICED and IDEMPOTENCY_KEY_REUSED.
        """

        async def work(connection: AsyncConnection) -> Booked:
            candidates, published = self._guesses.used(), None
            for _ in range(limits.SETTLE_TRIES):
                costs = {stored: cost(rates_of(stored), usage) for stored in candidates}
                found = await holds.settle(
                    connection, project, id, usage,
                    estimated=estimated, reported=reported, costs=costs, published=published,
                )  # fmt: skip
                if found.entry is not None:
                    if found.outcome == "found":
                        check_same(found.entry, usage, estimated=estimated, reported=reported)
                    elif found.rates is not None:
                        self._guesses.learn_used(found.rates)
                    return Booked(found.entry, found.outcome == "booked")
                if found.outcome == "missing":
                    raise not_found("hold")
                if found.outcome == "reused":
                    raise reused()
                published = None if found.rates is not None else _published(found.model)
                if found.rates is None and published is None:
                    raise not_priced(found.model)
                candidates = [stored for stored in (found.rates, published) if stored is not None]
            raise unavailable("The price changes too fast. Nothing was lost; try again in a moment.")

        return await self._use(work)

    async def release(self, call: Call) -> str:
        """Frees a call's hold or bars the call; the status afterwards. Raises IDEMPOTENCY_KEY_REUSED."""
        status = await self._use(lambda connection: holds.release(connection, call, self._defaults))
        if status is None:
            raise reused()
        return status

    async def _use(self, work: Callable[[AsyncConnection], Awaitable[Found]]) -> Found:
        """Does the work; again when the connection turns out to be dead, for all of it may be done twice."""
        with translated():
            async with self._pool.connection() as connection:
                try:
                    return await work(connection)
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    if not connection.closed:
                        raise
            # Instead of a look before every use: Postgres restarted or failed over, so the others are dead too.
            await self._pool.check()
            async with self._pool.connection() as connection:
                return await work(connection)


class _Placing:
    """One call's way to its hold."""

    def __init__(self, guesses: Guesses, call: Call, wish: Wish, defaults: Terms) -> None:
        self._guesses, self._call, self._wish, self._defaults = guesses, call, wish, defaults
        self._limits: Sequence[Limit] = ()
        self._assume(guesses.set_price(call.project, call.model))

    async def run(self, connection: AsyncConnection, tries: int) -> HoldRow | None:
        """The hold; None when limits, sums or prices changed under each decision."""
        for _ in range(tries):
            if (row := await self._try(connection)) is not None:
                return row
        return None

    async def run_locked(self, connection: AsyncConnection) -> HoldRow:
        """The same in one transaction: what one try found too little stays locked for the next."""
        async with connection.transaction():
            row = await self.run(connection, limits.LOCKED_TRIES)
        if row is None:
            raise unavailable("The limits change too fast. Nothing was lost; try again in a moment.")
        return row

    async def _try(self, connection: AsyncConnection) -> HoldRow | None:
        call, wish = self._call, self._wish
        found = await holds.place(
            connection, call, wish, self._grant, self._defaults, known=self._known, rates=self._rates
        )
        match found.outcome:
            case "placed":
                if self._rates is not None:
                    self._guesses.learn_used(self._rates)
                return found.hold
            case "found" if found.hold is not None:
                if found.hold.call != call or (found.hold.rates is not None and found.hold.wish != wish):
                    raise reused()
                return found.hold
            case "settled":
                entry = await ledger.of_call(connection, call.project, call.id)
                if entry is None or entry.call != call:
                    raise reused()
                return _remembered(entry, wish, found.credits_per_usd)
            case "priced":
                if self._rates is None and found.rates == self._known:
                    raise not_priced(call.model)
                self._guesses.learn_set_price(call.project, call.model, found.rates)
                self._assume(found.rates)
                return None
            case "full":
                message = "Too many requests in a minute. Wait a moment."
                raise ServiceError("AI_RATE_LIMITED", message, retry_after=max(found.wait, 0.001))
            case "short":
                self._limits = found.limits
                self._decide()  # raises a refusal, which is true at the moment of those sums
                return None
        raise reused()

    def _assume(self, stored: bytes | None) -> None:
        """Goes by the price somebody set, or by the published one where nobody did."""
        self._known = stored
        self._rates = stored if stored is not None else _published(self._call.model)
        self._decide()

    def _decide(self) -> None:
        """Grants by the limits as far as they are known: at first by none, so all that was asked for."""
        self._grant = Grant(0, 0) if self._rates is None else grant(rates_of(self._rates), self._wish, self._limits)


def _published(model: str) -> bytes | None:
    found = published_rates(model, datetime.now(UTC))
    return None if found is None else to_message(found).SerializeToString()


def _remembered(entry: LedgerEntry, wish: Wish, credits_per_usd: int) -> HoldRow:
    """What is left of a hold that was removed: it is settled, and grants nothing any more."""
    return HoldRow(
        *(entry.api_call_id, entry.project_id, entry.user_id, entry.run_id, entry.thread_id, entry.message_id),
        *(entry.model, wish.input_max, wish.output_max, wish.output_min),
        output_granted=0,
        amount_nano=0,
        rates=None,
        credits_per_usd=credits_per_usd,
        status=closing.SETTLED,
        day=entry.booked_at.date(),
        expires_at=entry.booked_at,
    )
