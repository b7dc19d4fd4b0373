"""The only place where the conversation service is wired together."""

import asyncio
from contextlib import AsyncExitStack

import psycopg_pool
from psycopg.conninfo import make_conninfo

from kit.bus import Bus
from kit.db import PooledConnection, request_engine
from kit.outbound import Outbound
from kit.serving import Server
from kit.telemetry import log
from services.conversation import limits
from services.conversation.admission import Admission
from services.conversation.answers import Answering
from services.conversation.billing import Billing, senders
from services.conversation.cancelling import Cancelling
from services.conversation.domain import tokens
from services.conversation.following import Hub
from services.conversation.journal import Journal
from services.conversation.outbox import Outbox
from services.conversation.ownership import Ownership
from services.conversation.projects_servicer import ProjectServicer
from services.conversation.provider_keys import ProviderKeys
from services.conversation.providers.openai_chat import OpenAIChat
from services.conversation.relay_servicer import RelayServicer
from services.conversation.runner import Runner
from services.conversation.servicer import ConversationServicer
from services.conversation.settings import Settings
from services.conversation.snapshots import Snapshots
from services.conversation.sweeper import Sweeper
from services.conversation.watching import Watching
from services.conversation.webhooks import Deliverer
from services.conversation.webhooks_servicer import WebhookServicer
from threadloom.conversation.v1.conversation_service_pb2 import DESCRIPTOR as CONVERSATION
from threadloom.conversation.v1.conversation_service_pb2_grpc import add_ConversationServiceServicer_to_server
from threadloom.conversation.v1.project_service_pb2 import DESCRIPTOR as PROJECTS
from threadloom.conversation.v1.project_service_pb2_grpc import add_ProjectServiceServicer_to_server
from threadloom.conversation.v1.relay_service_pb2 import DESCRIPTOR as RELAY
from threadloom.conversation.v1.relay_service_pb2_grpc import add_RelayServiceServicer_to_server
from threadloom.conversation.v1.webhook_service_pb2 import DESCRIPTOR as WEBHOOKS
from threadloom.conversation.v1.webhook_service_pb2_grpc import add_WebhookServiceServicer_to_server

# Durability.md 5 and 8. What is shown must be on disk; a frozen owner must not hold a lock.
SESSION = (
    f"-c idle_in_transaction_session_timeout={limits.IDLE_IN_TRANSACTION_MS}"
    f" -c statement_timeout={limits.STATEMENT_MS} -c transaction_timeout={limits.TRANSACTION_MS}"
    " -c synchronous_commit=on -c timezone=UTC"
    # Every statement goes by ids: planning it anew for its values costs more than running it.
    " -c plan_cache_mode=force_generic_plan"
)
KEEPALIVES = {
    "keepalives_idle": limits.KEEPALIVES_IDLE_SECONDS,
    "keepalives_interval": limits.KEEPALIVES_INTERVAL_SECONDS,
    "keepalives_count": limits.KEEPALIVES_COUNT,
}
# From its first use on, on each connection.
PREPARED = 0
# Streams that are still attached when everything is drained are moved by the gateway.
STREAM_GRACE_SECONDS = 0.5


async def serve(settings: Settings, stopped: asyncio.Event, on_ready: "asyncio.Future[int] | None" = None) -> None:
    """Runs the service until `stopped`; then drains. `on_ready` gets the port."""
    async with AsyncExitStack() as stack:
        reading = asyncio.create_task(asyncio.to_thread(tokens.load))
        dsn = _dsn(settings.engine_database_url)
        pool = await stack.enter_async_context(_pool(dsn, settings))
        request_pool = await stack.enter_async_context(_pool(_dsn(settings.database_url), settings))
        engine = request_engine(
            settings.database_url,
            pool_size=int(settings.pool_size),
            connect_seconds=limits.CONNECT_SECONDS,
            connect_args={
                "options": SESSION,
                "tcp_user_timeout": limits.TCP_USER_TIMEOUT_MS,
                "prepare_threshold": PREPARED,
                **KEEPALIVES,
            },
        )
        stack.push_async_callback(engine.dispose)
        bus = Bus(settings.nats_url)
        bus.start()
        stack.push_async_callback(bus.close)

        hub = Hub(pool, bus)
        hub.start()
        stack.push_async_callback(hub.stop)
        watching = Watching(pool)
        watching.start()
        stack.push_async_callback(watching.stop)
        journal = Journal(dsn, pool, hub.publish)
        journal.start()
        stack.push_async_callback(journal.stop)
        snapshots = Snapshots(journal, pool)
        snapshots.start()
        stack.push_async_callback(snapshots.stop)
        ownership = Ownership(dsn, pool, journal, bus)
        client = OpenAIChat(settings.openai_base_url, settings.call_seconds)
        stack.push_async_callback(client.close)
        billing = Billing(settings.billing, settings.credential)
        stack.push_async_callback(billing.close)
        outbox = Outbox(pool, senders(billing))
        outbox.start()
        stack.push_async_callback(outbox.stop)
        outbound = Outbound(settings.allowed_hosts)
        stack.push_async_callback(outbound.close)
        deliverer = Deliverer(pool, outbound, settings.secret_keys)
        deliverer.start()
        stack.push_async_callback(deliverer.stop)
        runner = Runner(
            Answering(
                pool=pool,
                journal=journal,
                publish=hub.publish,
                ownership=ownership,
                client=client,
                keys=ProviderKeys(settings.secret_keys, settings.own_provider_keys),
                billing=billing,
                outbox=outbox,
                deliverer=deliverer,
                turn=settings.turn,
                output=settings.output,
            )
        )
        ownership.on_claimed = runner.take_over
        await ownership.start()
        stack.push_async_callback(ownership.stop)
        sweeper = Sweeper(pool, settings.event_kept_seconds, settings.event_kept_bytes, settings.secret_keys)
        sweeper.start()
        stack.push_async_callback(sweeper.stop)

        cancelling = Cancelling(engine, pool, hub, runner, ownership, deliverer)
        admission = Admission(engine, request_pool, runner, ownership, cancelling, settings.model)
        files = (CONVERSATION, PROJECTS, RELAY, WEBHOOKS)
        names = [service.full_name for file in files for service in file.services_by_name.values()]
        server = Server(settings.credential, names)
        conversation = ConversationServicer(engine, admission, cancelling, hub, watching, runner, ownership)
        add_ConversationServiceServicer_to_server(conversation, server.grpc)
        add_RelayServiceServicer_to_server(RelayServicer(conversation), server.grpc)
        projects = ProjectServicer(engine, settings.secret_keys, settings.allowed_hosts)
        add_ProjectServiceServicer_to_server(projects, server.grpc)
        webhooks = WebhookServicer(engine, settings.secret_keys, outbound, deliverer)
        add_WebhookServiceServicer_to_server(webhooks, server.grpc)
        await reading  # or the first run would wait for it
        port = await server.start(settings.listen)
        log.info("ready", port=port, worker_id=str(ownership.worker_id))
        if on_ready is not None:
            on_ready.set_result(port)

        await stopped.wait()
        log.info("draining", seconds=settings.drain_seconds)
        await server.set_serving(False)
        ownership.stop_claiming()
        await runner.drain(settings.drain_seconds)
        await outbox.drain(limits.OUTBOX_DRAIN_SECONDS)  # there may be no other process, and no start for long
        await server.stop(STREAM_GRACE_SECONDS)


def _dsn(url: str) -> str:
    return make_conninfo(
        url,
        options=SESSION,
        tcp_user_timeout=limits.TCP_USER_TIMEOUT_MS,
        connect_timeout=limits.CONNECT_SECONDS,
        **KEEPALIVES,
    )


def _pool(dsn: str, settings: Settings) -> psycopg_pool.AsyncConnectionPool:
    return psycopg_pool.AsyncConnectionPool(
        dsn,
        min_size=1,
        max_size=int(settings.pool_size),
        timeout=limits.POOL_TIMEOUT_SECONDS,
        kwargs={"autocommit": True, "prepare_threshold": PREPARED},
        connection_class=PooledConnection,
        check=PooledConnection.check,
        reset=PooledConnection.note,
        reconnect_timeout=limits.RECONNECT_PAUSE_MAX_SECONDS,
        open=False,
    )
