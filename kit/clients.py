"""Another service as its callers see it: stubs for each replica, and a unary call that finds one that answers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import Counter

from kit.callers import Caller
from kit.channels import Replica, Replicas, call_metadata, is_transport_failure, to_service_error

RETRIES = Counter("threadloom_call_retries_total", "Unary calls that went on to another replica.")

Request = TypeVar("Request")
Response = TypeVar("Response")


class OfReplica(Protocol):
    """The stubs of one replica."""

    @property
    def replica(self) -> Replica:
        """The replica they call."""


Stubs = TypeVar("Stubs", bound=OfReplica)


class Service(Generic[Stubs]):
    """All replicas of one service. Made and closed inside the running loop."""

    def __init__(
        self, addresses: Sequence[str], credential: str, make_stubs: Callable[[Replica], Stubs], call_seconds: float
    ) -> None:
        """`call_seconds`: what one try of a unary call may take, where the caller does not say."""
        self._replicas = Replicas(addresses)
        self._credential, self._call_seconds = credential, call_seconds
        self._stubs = {replica.address: make_stubs(replica) for replica in self._replicas.all}

    def __len__(self) -> int:
        return len(self._replicas.all)

    def in_order(self) -> Iterable[Stubs]:
        """Every replica once: healthy ones in turn, suspect ones last."""
        return [self._stubs[replica.address] for replica in self._replicas.in_order()]

    def metadata(self, caller: Caller, request_id: str) -> tuple[tuple[str, str], ...]:
        """The metadata of a call."""
        return call_metadata(self._credential, caller, request_id)

    async def call(
        self,
        method: Callable[[Stubs], aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        caller: Caller,
        request_id: str,
        *,
        repeatable: bool = True,
        seconds: float | None = None,
    ) -> Response:
        """Makes a unary call, with `seconds` for each try; raises ServiceError.

        A replica that cannot be reached, or says that it cannot serve now, is passed
        over for the next one, but only when the call is `repeatable`: the first try may
        have been carried out though its answer was lost.
        """
        metadata = self.metadata(caller, request_id)
        candidates = list(self.in_order())
        for stubs in candidates if repeatable else candidates[:1]:
            try:
                return await method(stubs)(request, timeout=seconds or self._call_seconds, metadata=metadata)
            except aio.AioRpcError as error:
                failure = to_service_error(error)
                if is_transport_failure(error):
                    stubs.replica.suspect()
                elif failure.reason != "UNAVAILABLE":
                    raise failure from None
                RETRIES.inc()
        raise failure

    async def is_ready(self, seconds: float) -> bool:
        """Whether at least one replica says, within so many seconds each, that it serves."""
        for stubs in self.in_order():
            health = health_pb2_grpc.HealthStub(stubs.replica.channel)
            try:
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
            except aio.AioRpcError:
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
        return False

    async def close(self) -> None:
        """Closes every channel."""
        await self._replicas.close()
