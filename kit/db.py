"""Postgres: addresses, a request's transaction, and driver errors as ServiceErrors."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import psycopg
import psycopg_pool
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from kit.callers import Caller
from kit.errors import ServiceError, unavailable
from kit.telemetry import log

# Transaction-local, so a pooled connection forgets its caller at COMMIT (durability.md 28).
SET_CALLER = text(
    "SELECT set_config('app.project', :project, true), set_config('app.user', :user, true),"
    " set_config('app.role', :role, true)"
)


def sqlalchemy_url(url: str) -> str:
    """The same address with SQLAlchemy's name of the driver."""
    _, _, rest = url.partition("://")
    return f"postgresql+psycopg://{rest}"


def request_engine(url: str, *, pool_size: int, connect_seconds: int, session_options: str) -> AsyncEngine:
    """A pool for request transactions. A connection is tried before it is used: Postgres may have restarted."""
    return create_async_engine(
        sqlalchemy_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=connect_seconds,
        pool_pre_ping=True,
        connect_args={"connect_timeout": connect_seconds, "options": session_options},
    )


@asynccontextmanager
async def transaction(engine: AsyncEngine, caller: Caller) -> AsyncIterator[AsyncConnection]:
    """One transaction that sees what the caller may see; leaving the block commits."""
    with translated():
        async with engine.begin() as tx:
            await tx.execute(
                SET_CALLER,
                {"project": str(caller.project or ""), "user": caller.user, "role": caller.role.value},
            )
            yield tx


@contextmanager
def translated() -> Iterator[None]:
    """Turns a lost or overloaded database into UNAVAILABLE; every other error passes."""
    try:
        yield
    except ServiceError:
        raise
    except (PoolTimeout, psycopg_pool.PoolTimeout, psycopg.OperationalError) as error:
        raise _away(error) from error
    except DBAPIError as error:
        if error.connection_invalidated or isinstance(error.orig, psycopg.OperationalError):
            raise _away(error) from error
        raise


def _away(error: Exception) -> ServiceError:
    log.warning("database away", error=type(error).__name__)
    return unavailable("The database does not answer. Nothing was lost; try again in a moment.")
