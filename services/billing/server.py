"""The only place where the billing service is wired together."""

import asyncio
from contextlib import AsyncExitStack

import psycopg_pool
from psycopg.conninfo import make_conninfo

from kit.db import request_engine
from kit.serving import Server
from kit.telemetry import log
from services.billing import limits
from services.billing.domain.terms import Terms
from services.billing.moves import Moves
from services.billing.servicer import BillingServicer
from services.billing.settings import Settings
from services.billing.upkeep import Upkeep
from threadloom.billing.v1.billing_service_pb2 import DESCRIPTOR
from threadloom.billing.v1.billing_service_pb2_grpc import add_BillingServiceServicer_to_server

# A frozen process must not keep a project's accounts locked, and what was granted must be on disk.
SESSION = (
    f"-c idle_in_transaction_session_timeout={limits.IDLE_IN_TRANSACTION_MS}"
    f" -c statement_timeout={limits.STATEMENT_MS} -c synchronous_commit=on -c timezone=UTC"
)
# A sweep and a comparison at the same time.
ENGINE_POOL = 2


async def serve(settings: Settings, stopped: asyncio.Event, on_ready: "asyncio.Future[int] | None" = None) -> None:
    """Runs the service until `stopped`. `on_ready` gets the port."""
    async with AsyncExitStack() as stack:
        pool = psycopg_pool.AsyncConnectionPool(
            make_conninfo(settings.engine_database_url, options=SESSION, connect_timeout=limits.CONNECT_SECONDS),
            min_size=1,
            max_size=ENGINE_POOL,
            timeout=limits.POOL_TIMEOUT_SECONDS,
            kwargs={"autocommit": True},
            check=psycopg_pool.AsyncConnectionPool.check_connection,
            open=False,
        )
        await pool.open()
        stack.push_async_callback(pool.close)
        most = int(settings.pool_size)
        money = psycopg_pool.AsyncConnectionPool(
            make_conninfo(settings.database_url, options=SESSION, connect_timeout=limits.CONNECT_SECONDS),
            min_size=min(most, limits.KEPT_CONNECTIONS),
            max_size=most,
            timeout=limits.POOL_TIMEOUT_SECONDS,
            kwargs={"autocommit": True},
            reconnect_timeout=limits.RECONNECT_PAUSE_MAX_SECONDS,
            open=False,
        )
        await money.open()
        stack.push_async_callback(money.close)
        engine = request_engine(
            settings.database_url,
            pool_size=limits.READ_CONNECTIONS,
            connect_seconds=limits.CONNECT_SECONDS,
            connect_args={"options": SESSION},
        )
        stack.push_async_callback(engine.dispose)
        upkeep = Upkeep(pool)
        upkeep.start()
        stack.push_async_callback(upkeep.stop)
        defaults = Terms(settings.credits_per_usd, settings.runs_per_minute)
        server = Server(settings.credential, [service.full_name for service in DESCRIPTOR.services_by_name.values()])
        add_BillingServiceServicer_to_server(BillingServicer(engine, Moves(money, defaults), defaults), server.grpc)
        port = await server.start(settings.listen)
        log.info("ready", port=port)
        if on_ready is not None:
            on_ready.set_result(port)
        await stopped.wait()
        await server.set_serving(False)
        await server.stop(limits.GRACE_SECONDS)
