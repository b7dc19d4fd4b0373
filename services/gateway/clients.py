"""The services the gateway calls, and their stubs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.channels import Replica
from kit.clients import Service
from services.gateway.limits import CALL_SECONDS
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.conversation.v1.conversation_service_pb2_grpc import ConversationServiceStub
from threadloom.conversation.v1.project_service_pb2_grpc import ProjectServiceStub
from threadloom.conversation.v1.relay_service_pb2_grpc import RelayServiceStub
from threadloom.conversation.v1.webhook_service_pb2_grpc import WebhookServiceStub

if TYPE_CHECKING:  # these classes exist in the stubs' types only
    from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceAsyncStub
    from threadloom.conversation.v1.conversation_service_pb2_grpc import ConversationServiceAsyncStub
    from threadloom.conversation.v1.project_service_pb2_grpc import ProjectServiceAsyncStub
    from threadloom.conversation.v1.relay_service_pb2_grpc import RelayServiceAsyncStub
    from threadloom.conversation.v1.webhook_service_pb2_grpc import WebhookServiceAsyncStub


@dataclass(frozen=True)
class ConversationStubs:
    """One replica of the conversation service."""

    replica: Replica
    conversations: "ConversationServiceAsyncStub"
    projects: "ProjectServiceAsyncStub"
    relay: "RelayServiceAsyncStub"
    webhooks: "WebhookServiceAsyncStub"


@dataclass(frozen=True)
class BillingStubs:
    """One replica of the billing service."""

    replica: Replica
    billing: "BillingServiceAsyncStub"


class Clients:
    """The services the gateway calls."""

    def __init__(self, conversation: Sequence[str], billing: Sequence[str], credential: str) -> None:
        self.conversation = Service(conversation, credential, _conversation_stubs, CALL_SECONDS)
        self.billing = Service(billing, credential, _billing_stubs, CALL_SECONDS)

    async def close(self) -> None:
        """Closes every channel."""
        await self.conversation.close()
        await self.billing.close()


def _conversation_stubs(replica: Replica) -> ConversationStubs:
    channel = replica.channel
    return ConversationStubs(
        replica,
        ConversationServiceStub(channel),
        ProjectServiceStub(channel),
        RelayServiceStub(channel),
        WebhookServiceStub(channel),
    )


def _billing_stubs(replica: Replica) -> BillingStubs:
    return BillingStubs(replica, BillingServiceStub(replica.channel))
