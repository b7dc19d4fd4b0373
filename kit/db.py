"""Postgres: addresses, a request's transaction, one task's own connection, and driver errors as ServiceErrors."""

import asyncio
import select
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import psycopg
import psycopg_pool
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from kit.callers import Caller
from kit.errors import ServiceError, unavailable
from kit.telemetry import log

Found = TypeVar("Found")

# A server that only reads (a standby we were sent to during a failover), and a session it ended.
AWAY_STATES = frozenset(("25006", "25P03"))

# A pooled connection not used for so long is tried before it is used.
IDLE_SECONDS = 1.0

# Transaction-local, so a pooled connection forgets its caller at COMMIT (durability.md 28).
SET_CALLER = (
    "SELECT set_config('app.project', %(project)s, true), set_config('app.user', %(user)s, true),"
    " set_config('app.role', %(role)s, true)"
)


def sqlalchemy_url(url: str) -> str:
    """The same address with SQLAlchemy's name of the driver."""
    _, _, rest = url.partition("://")
    return f"postgresql+psycopg://{rest}"


def request_engine(
    url: str, *, pool_size: int, connect_seconds: int, connect_args: dict[str, str | int]
) -> AsyncEngine:
    """A pool for request transactions. A connection is tried before it is used: Postgres may have restarted."""
    return create_async_engine(
        sqlalchemy_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=connect_seconds,
        pool_pre_ping=True,
        hide_parameters=True,  # an error's text goes to the log; what users wrote must not
        connect_args={"connect_timeout": connect_seconds, **connect_args},
    )


class PooledConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A pool's connection that knows when it was used last, so that one in use need not be tried again.

    A server that goes away closes the socket, which is seen without asking it; only one that vanished without a word
    is not, and for that there are tcp_user_timeout and keepalives.
    """

    used_at = float("-inf")

    @classmethod
    async def check(cls, connection: psycopg.AsyncConnection[Any]) -> None:
        """Raises psycopg.OperationalError for a connection that is gone. Asks the server after a while without use."""
        assert isinstance(connection, cls)
        if time.monotonic() - connection.used_at > IDLE_SECONDS or has_news(connection):
            await psycopg_pool.AsyncConnectionPool.check_connection(connection)

    @classmethod
    async def note(cls, connection: psycopg.AsyncConnection[Any]) -> None:
        """Belongs where the connection returns to its pool."""
        assert isinstance(connection, cls)
        connection.used_at = time.monotonic()


def has_news(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Whether an idle connection was closed by the server, or has something unread: then it says that it ends."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


@asynccontextmanager
async def transaction(engine: AsyncEngine, caller: Caller) -> AsyncIterator[AsyncConnection]:
    """One transaction that sees what the caller may see; leaving the block commits."""
    with translated():
        async with engine.begin() as tx:
            await tx.exec_driver_sql(
                SET_CALLER,
                {"project": str(caller.project or ""), "user": caller.user, "role": caller.role.value},
            )
            yield tx


async def commit_as(
    pool: psycopg_pool.AsyncConnectionPool, caller: Caller, statements: Sequence[tuple[str, dict[str, Any]]]
) -> list[tuple[Any, ...]]:
    """Runs the statements as one transaction that sees what the caller may see, in one round trip.

    Returns the rows they returned. The pool is of the request role, its connections on autocommit. Raises
    UNAVAILABLE like `transaction`, and psycopg's errors; after one of these nothing is stored.
    """
    settings = {"project": str(caller.project or ""), "user": caller.user, "role": caller.role.value}
    with translated():
        async with pool.connection() as connection:  # leaving it by an error rolls back
            async with connection.pipeline():
                await connection.execute("BEGIN")
                await connection.execute(SET_CALLER, settings, prepare=True)
                made = [await connection.execute(sql.encode(), found, prepare=True) for sql, found in statements]
                await connection.execute("COMMIT")
            return [row for cursor in made if cursor.description is not None for row in await cursor.fetchall()]


def is_away(error: BaseException) -> bool:
    """Whether Postgres restarts, is gone, fails over or is too slow: the same work may succeed later."""
    kinds = (psycopg.OperationalError, psycopg.InterfaceError, psycopg_pool.PoolTimeout, PoolTimeout, TimeoutError)
    return isinstance(error, kinds) or getattr(error, "sqlstate", None) in AWAY_STATES


class OwnConnection:
    """One connection for one task, so that it never waits behind others; made anew after it broke.

    `seconds` bounds each use: a peer that vanished acknowledges nothing and closes nothing.
    """

    def __init__(self, dsn: str, seconds: float) -> None:
        self._dsn, self._seconds = dsn, seconds
        self._connection: psycopg.AsyncConnection | None = None

    async def use(self, work: Callable[[psycopg.AsyncConnection], Awaitable[Found]]) -> Found:
        """Does the work. What `is_away` calls away is raised after the connection was dropped."""
        try:
            async with asyncio.timeout(self._seconds):
                if self._connection is None or self._connection.closed:
                    self._connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
                return await work(self._connection)
        except Exception as error:
            if is_away(error):
                await self.close()
            raise

    async def close(self) -> None:
        """Drops the connection; the next use makes another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                await connection.close()


@contextmanager
def translated() -> Iterator[None]:
    """Turns a lost or overloaded database into UNAVAILABLE; every other error passes."""
    try:
        yield
    except ServiceError:
        raise
    except DBAPIError as error:
        if error.connection_invalidated or (error.orig is not None and is_away(error.orig)):
            raise _away(error) from error
        raise
    except Exception as error:
        if is_away(error):
            raise _away(error) from error
        raise


def _away(error: Exception) -> ServiceError:
    log.warning("database away", error=type(error).__name__)
    return unavailable("The database does not answer. Nothing was lost; try again in a moment.")
