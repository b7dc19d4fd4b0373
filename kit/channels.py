"""gRPC channels to another service's replicas, and its errors as ServiceErrors.

One channel a replica, not one balanced channel: a frozen process keeps a
healthy-looking connection, so the caller must be able to leave a replica by its
own judgement (durability.md 16).
"""

import itertools
import time
from collections.abc import Iterable, Sequence

import grpc
from grpc import aio
from grpc_status import rpc_status

from kit import callers
from kit.callers import Caller
from kit.errors import ServiceError, from_status, internal, unavailable
from kit.serving import MESSAGE_BYTES

# A replica that failed or fell silent is asked last for this long.
SUSPECT_SECONDS = 10.0

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted replica is found again quickly.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two channels to the same address must not share a connection that froze.
    ("grpc.use_local_subchannel_pool", 1),
]


class Replica:
    """One process of a service and the channel to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._suspect_until = 0.0

    def suspect(self) -> None:
        """Asks this replica last for a while."""
        self._suspect_until = time.monotonic() + SUSPECT_SECONDS

    @property
    def is_suspect(self) -> bool:
        """Whether it failed or fell silent lately."""
        return time.monotonic() < self._suspect_until


class Replicas:
    """The known replicas of a service, asked in turn."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.all = [Replica(address) for address in addresses]
        self._turn = itertools.count()

    def in_order(self) -> Iterable[Replica]:
        """Every replica once: the healthy ones in turn, then those under suspicion."""
        start = next(self._turn) % len(self.all)
        turned = self.all[start:] + self.all[:start]
        return sorted(turned, key=lambda replica: replica.is_suspect)

    async def close(self) -> None:
        """Closes every channel."""
        for replica in self.all:
            await replica.channel.close()


def call_metadata(credential: str, caller: Caller, request_id: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call on behalf of a caller."""
    return (
        (callers.CREDENTIAL_KEY, credential),
        (callers.REQUEST_ID_KEY, request_id),
        *callers.to_metadata(caller),
    )


def to_service_error(error: aio.AioRpcError) -> ServiceError:
    """The ServiceError a failed call stands for; transport failures become UNAVAILABLE."""
    status = rpc_status.from_call(error)
    found = from_status(status) if status is not None else None
    if found is not None:
        return found
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return unavailable("A part of the service does not answer. Try again in a moment.")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return unavailable("The service is busy. Try again in a moment.")
    return internal()


def is_transport_failure(error: aio.AioRpcError) -> bool:
    """Whether the call failed on its way, so that another replica may answer it."""
    return rpc_status.from_call(error) is None and error.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
