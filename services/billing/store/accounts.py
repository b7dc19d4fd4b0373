"""SQL for accounts: the fixed rows at which everything that moves money queues."""

from collections.abc import Iterable, Sequence
from datetime import date
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing.domain.granting import Limit
from services.billing.domain.periods import PERIODS, WHOLE_PROJECT, AccountKey, accounts, start_of

TODAY = text("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
# Both in the order of the key, so that two transactions never wait for each other.
ENSURE = text(
    "INSERT INTO billing.accounts (project_id, user_id, period, start)"
    " VALUES (:project, :user, :period, :start) ON CONFLICT DO NOTHING"
)
LOCK = text(
    "SELECT user_id, period, start, held_nano, spent_nano FROM billing.accounts WHERE project_id = :project"
    " AND user_id IN ('', :user) AND (period, start) IN (('day', :day), ('month', :month), ('total', :total))"
    ' ORDER BY user_id COLLATE "C", period, start FOR UPDATE'
)
MOVE = text(
    "UPDATE billing.accounts SET held_nano = held_nano + :held, spent_nano = spent_nano + :spent"
    " WHERE project_id = :project AND user_id = :user AND period = :period AND start = :start"
)
# A user's own quota wins over the default of its project (user '') entirely, whatever their periods.
LIMITS = text(
    "(SELECT true, period, limit_nano FROM billing.quotas WHERE project_id = :project AND user_id IN (:user, '')"
    " ORDER BY user_id = '' LIMIT 1)"
    " UNION ALL SELECT false, period, limit_nano FROM billing.spend_caps WHERE project_id = :project"
)
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


async def lock(tx: AsyncConnection, project: UUID, user: str, day: date) -> dict[AccountKey, Sums]:
    """Makes the six accounts of a user's call where they are missing, and holds them until the commit."""
    await tx.execute(ENSURE, [_named(project, key) for key in accounts((WHOLE_PROJECT, user), day)])
    starts = {period: start_of(period, day) for period in PERIODS}
    rows = await tx.execute(LOCK, {"project": project, "user": user, **starts})
    return {AccountKey(*key): (held, spent) for *key, held, spent in rows}


async def move(tx: AsyncConnection, project: UUID, keys: Iterable[AccountKey], *, held: int, spent: int) -> None:
    """Adds to what is held and spent, in accounts that `lock` holds."""
    await tx.execute(MOVE, [{**_named(project, key), "held": held, "spent": spent} for key in keys])


async def limits_of(
    tx: AsyncConnection, project: UUID, user: str, day: date, sums: dict[AccountKey, Sums]
) -> Sequence[Limit]:
    """The user's quota (its own or the default) and the project's caps against the sums that `lock` found."""
    rows = await tx.execute(LIMITS, {"project": project, "user": user})
    found = []
    for is_quota, period, limit in rows:
        key = AccountKey(user if is_quota else WHOLE_PROJECT, period, start_of(period, day))
        found.append(Limit(is_quota, period, limit, sum(sums[key])))
    return found


async def read(tx: AsyncConnection, project: UUID, user: str, period: str, day: date) -> Sums:
    """(held, spent) of one account; zeros where nothing was booked yet."""
    row = (await tx.execute(READ, _named(project, AccountKey(user, period, start_of(period, day))))).one_or_none()
    return (0, 0) if row is None else (row.held_nano, row.spent_nano)


def _named(project: UUID, key: AccountKey) -> dict[str, object]:
    return {"project": project, **key._asdict()}
