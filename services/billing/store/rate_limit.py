"""SQL for the rate limit: the runs a user began in the minute that runs now (R134).

Whoever looks or takes holds the user's accounts, so nobody else counts meanwhile.
"""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from kit.errors import ServiceError
from services.billing import limits
from services.billing.domain.calls import Call
from services.billing.domain.granting import wait_for_window

# A barred call never had a hold: it took no unit, so the run's next call does.
IS_COUNTED = text(
    "SELECT EXISTS (SELECT FROM billing.holds WHERE project_id = :project AND run_id = :run AND rates IS NOT NULL)"
)
# A window that has passed is read as empty.
WINDOW = text(
    "SELECT CASE WHEN past THEN 0 ELSE used END, CASE WHEN past THEN 0 ELSE :seconds - age END FROM ("
    " SELECT used, age, age >= :seconds AS past FROM (SELECT used,"
    " extract(epoch FROM clock_timestamp() - started_at)::float8 AS age FROM billing.rate_windows"
    " WHERE project_id = :project AND user_id = :user) aged) found"
)
TAKE = text(
    "INSERT INTO billing.rate_windows AS w (project_id, user_id, used) VALUES (:project, :user, 1)"
    " ON CONFLICT (project_id, user_id) DO UPDATE SET used = CASE WHEN :used = 0 THEN 1 ELSE w.used + 1 END,"
    " started_at = CASE WHEN :used = 0 THEN clock_timestamp() ELSE w.started_at END"
)


async def look(tx: AsyncConnection, call: Call, allowed: int) -> int | None:
    """How many runs the window has; None when this one is among them. Raises AI_RATE_LIMITED when it is full."""
    if (await tx.execute(IS_COUNTED, {"project": call.project, "run": call.run})).scalar_one():
        return None
    values = {"project": call.project, "user": call.user, "seconds": limits.WINDOW_SECONDS}
    row = (await tx.execute(WINDOW, values)).one_or_none()
    used, left = (0, 0.0) if row is None else row
    wait = wait_for_window(used, allowed, left)
    if wait is not None:
        raise ServiceError("AI_RATE_LIMITED", "Too many requests in a minute. Wait a moment.", retry_after=wait)
    return int(used)


async def take(tx: AsyncConnection, call: Call, used: int) -> None:
    """Takes one unit for a run's first hold, where `look` found so many."""
    await tx.execute(TAKE, {"project": call.project, "user": call.user, "used": used})
