"""SQL of run_watch: until when a run goes on though nobody is known to follow it (durability.md 20).

Only runs that are to be cancelled without followers have a row. All times are the database's.
"""

from collections.abc import Sequence
from uuid import UUID

from psycopg import AsyncConnection
from sqlalchemy.ext.asyncio import AsyncConnection as Transaction

from services.conversation.store.log import Statement
from services.conversation.store.starts import NewRun

INSERT = """
INSERT INTO conversation.run_watch (run_id, project_id, cancel_after_ms, until)
SELECT id, project_id, %(ms)s, clock_timestamp() + make_interval(secs => %(ms)s::float8 / 1000 + %(lease)s)
FROM conversation.ai_runs WHERE id = %(run)s
"""
EXTEND = """
UPDATE conversation.run_watch
SET until = clock_timestamp() + make_interval(secs => cancel_after_ms / 1000.0 + %(lease)s)
WHERE run_id = ANY(%(runs)s)
"""
LEAVE = """
UPDATE conversation.run_watch
SET until = least(until, clock_timestamp() + make_interval(secs => cancel_after_ms / 1000.0 + %(slack)s))
WHERE run_id = ANY(%(runs)s)
"""


def begin(new: NewRun, lease: float) -> Statement:
    """Begins to watch a new run, if it was made, as if a follower had just been there."""
    return Statement(INSERT, {"run": new.run_id, "ms": new.cancel_after_ms, "lease": lease})


async def insert(tx: Transaction, new: NewRun, lease: float) -> None:
    """Begins to watch a new run of this transaction."""
    await tx.exec_driver_sql(*begin(new, lease))


async def extend(connection: AsyncConnection, runs: Sequence[UUID], lease: float) -> None:
    """Followers are there: the runs go on for their time and `lease` seconds more."""
    await connection.execute(EXTEND, {"runs": sorted(runs), "lease": lease}, prepare=True)


async def leave(connection: AsyncConnection, runs: Sequence[UUID], slack: float) -> None:
    """The last follower here has left: what is left is the runs' time, and `slack` seconds for others to say no."""
    await connection.execute(LEAVE, {"runs": sorted(runs), "slack": slack}, prepare=True)


def remove(run: UUID) -> Statement:
    """The run ended."""
    return Statement("DELETE FROM conversation.run_watch WHERE run_id = %(run)s", {"run": run})
