"""The RPC of RelayService."""

from collections.abc import AsyncIterator

from grpc import aio

from kit.callers import require_system
from services.conversation.relaying import RelaySession
from services.conversation.servicer import ConversationServicer
from threadloom.conversation.v1 import relay_service_pb2 as api
from threadloom.conversation.v1 import relay_service_pb2_grpc as api_grpc

Context = aio.ServicerContext[object, object]


class RelayServicer(api_grpc.RelayServiceServicer):
    """See relay_service.proto."""

    def __init__(self, conversations: ConversationServicer) -> None:
        self._conversations = conversations

    async def Relay(
        self, request_iterator: AsyncIterator[api.RelayRequest], context: Context
    ) -> AsyncIterator[api.RelayResponse]:
        """Starts and follows runs for many callers."""
        require_system()
        session = RelaySession(self._conversations.start, self._conversations.follow)
        context.add_done_callback(lambda _: session.close())  # type: ignore[arg-type]  # the stubs name another context
        async for response in session.serve(request_iterator):
            yield response
