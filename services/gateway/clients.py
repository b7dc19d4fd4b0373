"""The stubs the gateway uses: one set per replica, and how a unary call finds one that answers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import Counter

from kit.callers import Caller
from kit.channels import Replica, Replicas, call_metadata, is_transport_failure, to_service_error
from services.gateway.limits import CALL_SECONDS, READY_CALL_SECONDS
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.conversation.v1.conversation_service_pb2_grpc import ConversationServiceStub
from threadloom.conversation.v1.project_service_pb2_grpc import ProjectServiceStub

if TYPE_CHECKING:  # these classes exist in the stubs' types only
    from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceAsyncStub
    from threadloom.conversation.v1.conversation_service_pb2_grpc import ConversationServiceAsyncStub
    from threadloom.conversation.v1.project_service_pb2_grpc import ProjectServiceAsyncStub

RETRIES = Counter("threadloom_gateway_retries_total", "Unary calls that went on to another replica.")

Request = TypeVar("Request")
Response = TypeVar("Response")


class OfReplica(Protocol):
    """The stubs of one replica."""

    @property
    def replica(self) -> Replica:
        """The replica they call."""


Stubs = TypeVar("Stubs", bound=OfReplica)


@dataclass(frozen=True)
class ConversationStubs:
    """One replica of the conversation service."""

    replica: Replica
    conversations: "ConversationServiceAsyncStub"
    projects: "ProjectServiceAsyncStub"


@dataclass(frozen=True)
class BillingStubs:
    """One replica of the billing service."""

    replica: Replica
    billing: "BillingServiceAsyncStub"


class Service(Generic[Stubs]):
    """All replicas of one service. Made and closed inside the running loop."""

    def __init__(self, addresses: Sequence[str], credential: str, make_stubs: Callable[[Replica], Stubs]) -> None:
        self._replicas = Replicas(addresses)
        self._credential = credential
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
        seconds: float = CALL_SECONDS,
    ) -> Response:
        """Makes a unary call with `seconds` for each try; raises ServiceError.

        A replica that cannot be reached, or says that it cannot serve now, is passed
        over for the next one, but only when the call is `repeatable`: the first try may
        have been carried out though its answer was lost.
        """
        metadata = self.metadata(caller, request_id)
        candidates = list(self.in_order())
        for stubs in candidates if repeatable else candidates[:1]:
            try:
                return await method(stubs)(request, timeout=seconds, metadata=metadata)
            except aio.AioRpcError as error:
                failure = to_service_error(error)
                if is_transport_failure(error):
                    stubs.replica.suspect()
                elif failure.reason != "UNAVAILABLE":
                    raise failure from None
                RETRIES.inc()
        raise failure

    async def is_ready(self) -> bool:
        """Whether at least one replica says that it serves."""
        for stubs in self.in_order():
            health = health_pb2_grpc.HealthStub(stubs.replica.channel)
            try:
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=READY_CALL_SECONDS)
            except aio.AioRpcError:
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
        return False

    async def close(self) -> None:
        """Closes every channel."""
        await self._replicas.close()


class Clients:
    """The services the gateway calls."""

    def __init__(self, conversation: Sequence[str], billing: Sequence[str], credential: str) -> None:
        self.conversation = Service(conversation, credential, _conversation_stubs)
        self.billing = Service(billing, credential, _billing_stubs)

    async def close(self) -> None:
        """Closes every channel."""
        await self.conversation.close()
        await self.billing.close()


def _conversation_stubs(replica: Replica) -> ConversationStubs:
    return ConversationStubs(replica, ConversationServiceStub(replica.channel), ProjectServiceStub(replica.channel))


def _billing_stubs(replica: Replica) -> BillingStubs:
    return BillingStubs(replica, BillingServiceStub(replica.channel))
