"""A grpc.aio server as all services run it: health, reflection, limits, drain on SIGTERM."""

import asyncio
import signal
from collections.abc import Iterable

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kit.interceptors import Guard

# Event batches are 1 MiB at most and a message 8 MiB; the rest is headroom (durability.md 31).
MESSAGE_BYTES = 16 * 1024 * 1024
# Beyond this many calls at once a server answers RESOURCE_EXHAUSTED instead of growing without bound.
CONCURRENT_CALLS = 10_000

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # A peer that vanished without a word is noticed; clients may ping as often as channels.py does.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Connections are renewed so that load spreads over new replicas; the grace exceeds the longest turn.
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 300_000),
    ("grpc.so_reuseport", 0),
]


class Server:
    """A gRPC server with health and reflection. `services` are full service names."""

    def __init__(self, credential: str, services: Iterable[str]) -> None:
        self.grpc = aio.server(
            interceptors=[Guard(credential)],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=CONCURRENT_CALLS,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._services = ["", *services]
        names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)

    async def start(self, address: str) -> int:
        """Listens on host:port and returns the port taken (asked for as 0, any free one)."""
        port = self.grpc.add_insecure_port(address)
        await self.grpc.start()
        await self.set_serving(True)
        return port

    async def set_serving(self, serving: bool) -> None:
        """What health answers from now on."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._services:
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, lets those under way end within the grace, then cancels them."""
        await self.grpc.stop(grace_seconds)


def stop_signal() -> asyncio.Event:
    """Set when SIGTERM or SIGINT arrives."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped
