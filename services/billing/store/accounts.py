"""SQL that reads accounts: the fixed rows at which everything that moves money queues (migration 0002)."""

from datetime import date
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing.domain.periods import start_of

TODAY = text("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
READ = text(
    "SELECT held_nano, spent_nano FROM billing.accounts WHERE project_id = :project AND user_id = :user"
    " AND period = :period AND start = :start"
)

# (held, spent) in nano-USD.
Sums = tuple[int, int]


async def today(tx: AsyncConnection) -> date:
    """The day in UTC, by the database's clock."""
    found: date = (await tx.execute(TODAY)).scalar_one()
    return found


async def read(tx: AsyncConnection, project: UUID, user: str, period: str, day: date) -> Sums:
    """(held, spent) of one account; zeros where nothing was booked yet."""
    row = (
        await tx.execute(READ, {"project": project, "user": user, "period": period, "start": start_of(period, day)})
    ).one_or_none()
    return (0, 0) if row is None else (row.held_nano, row.spent_nano)
