"""SQL for what admins set: prices, quotas, caps and terms."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing.domain.terms import Terms

# The project whose prices hold for all; no real one has this id.
EVERY_PROJECT = UUID(int=0)
# Whose quota holds for every user who has none; no user has an empty id.
EVERY_USER = ""


@dataclass(frozen=True)
class PriceRow:
    """A price as stored; `rates` is a billing.v1.Rates."""

    project_id: UUID
    model: str
    rates: bytes
    updated_at: datetime


SET_PRICE = text(
    "INSERT INTO billing.model_prices (project_id, model, rates) VALUES (:project, :model, :rates)"
    " ON CONFLICT (project_id, model) DO UPDATE SET rates = excluded.rates, updated_at = clock_timestamp()"
    " RETURNING project_id, model, rates, updated_at"
)
LIST_PRICES = text(
    "SELECT project_id, model, rates, updated_at FROM billing.model_prices WHERE project_id IN (:project, :every)"
    " AND (model, project_id) > (:after, :after_project) ORDER BY model, project_id LIMIT :limit"
)
SET_QUOTA = text(
    "INSERT INTO billing.quotas (project_id, user_id, period, limit_nano) VALUES (:project, :user, :period, :limit)"
    " ON CONFLICT (project_id, user_id) DO UPDATE SET period = excluded.period, limit_nano = excluded.limit_nano"
)
DELETE_QUOTA = text("DELETE FROM billing.quotas WHERE project_id = :project AND user_id = :user")
# A user's own before the default.
GET_QUOTA = text(
    "SELECT period, limit_nano FROM billing.quotas WHERE project_id = :project AND user_id IN (:user, :every)"
    " ORDER BY user_id = :every LIMIT 1"
)
SET_CAP = text(
    "INSERT INTO billing.spend_caps (project_id, period, limit_nano) VALUES (:project, :period, :limit)"
    " ON CONFLICT (project_id, period) DO UPDATE SET limit_nano = excluded.limit_nano"
)
DELETE_CAP = text("DELETE FROM billing.spend_caps WHERE project_id = :project AND period = :period")
GET_CAPS = text("SELECT period, limit_nano FROM billing.spend_caps WHERE project_id = :project ORDER BY period")
SET_TERMS = text(
    "INSERT INTO billing.project_terms AS t (project_id, credits_per_usd, runs_per_minute)"
    " VALUES (:project, :credits, :runs) ON CONFLICT (project_id) DO UPDATE SET"
    " credits_per_usd = coalesce(excluded.credits_per_usd, t.credits_per_usd),"
    " runs_per_minute = coalesce(excluded.runs_per_minute, t.runs_per_minute)"
)
GET_TERMS = text("SELECT credits_per_usd, runs_per_minute FROM billing.project_terms WHERE project_id = :project")


async def set_price(tx: AsyncConnection, project: UUID, model: str, rates: bytes) -> PriceRow:
    """Keeps a price."""
    row = (await tx.execute(SET_PRICE, {"project": project, "model": model, "rates": rates})).one()
    return PriceRow(*row)


async def list_prices(
    tx: AsyncConnection, project: UUID, *, after: tuple[str, UUID] | None, limit: int
) -> list[PriceRow]:
    """At most `limit` prices that hold for the project, by model, after the given place."""
    model, last = after or ("", EVERY_PROJECT)
    values = {"project": project, "every": EVERY_PROJECT, "after": model, "after_project": last, "limit": limit}
    return [PriceRow(*row) for row in await tx.execute(LIST_PRICES, values)]


async def set_quota(tx: AsyncConnection, project: UUID, user: str, period: str, limit: int | None) -> None:
    """Keeps the quota of a user, or of EVERY_USER, in nano-USD; None removes it."""
    values = {"project": project, "user": user, "period": period, "limit": limit}
    if limit is None:
        await tx.execute(DELETE_QUOTA, values)
    else:
        await tx.execute(SET_QUOTA, values)


async def get_quota(tx: AsyncConnection, project: UUID, user: str) -> tuple[str, int] | None:
    """(period, limit) that binds a user: its own, or that of EVERY_USER."""
    values = {"project": project, "user": user, "every": EVERY_USER}
    row = (await tx.execute(GET_QUOTA, values)).one_or_none()
    return None if row is None else (row.period, row.limit_nano)


async def set_cap(tx: AsyncConnection, project: UUID, period: str, limit: int | None) -> None:
    """Keeps a project's cap in nano-USD; None removes it."""
    values = {"project": project, "period": period, "limit": limit}
    if limit is None:
        await tx.execute(DELETE_CAP, values)
    else:
        await tx.execute(SET_CAP, values)


async def get_caps(tx: AsyncConnection, project: UUID) -> list[tuple[str, int]]:
    """(period, limit) of each cap."""
    return [(period, limit) for period, limit in await tx.execute(GET_CAPS, {"project": project})]


async def set_terms(
    tx: AsyncConnection, project: UUID, credits_per_usd: int | None, runs_per_minute: int | None
) -> None:
    """Keeps what is given of a project's terms."""
    await tx.execute(SET_TERMS, {"project": project, "credits": credits_per_usd, "runs": runs_per_minute})


async def get_terms(tx: AsyncConnection, project: UUID, defaults: Terms) -> Terms:
    """The terms in force: the project's own, else the defaults."""
    row = (await tx.execute(GET_TERMS, {"project": project})).one_or_none()
    credits, runs = (None, None) if row is None else row
    return Terms(
        defaults.credits_per_usd if credits is None else credits,
        defaults.runs_per_minute if runs is None else runs,
    )
