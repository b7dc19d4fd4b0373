"""What handlers work with: made once per process, handed to each of them."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from grpc import aio
from starlette.types import ASGIApp

from services.gateway.auth import Auth
from services.gateway.clients import BillingStubs, Clients, ConversationStubs
from services.gateway.following import Follower, Target
from services.gateway.incoming import Incoming
from services.gateway.jwks import JwksCache
from services.gateway.limits import CALL_SECONDS, READY_CALL_SECONDS, READY_SECONDS, Patience
from services.gateway.relays import Relays
from services.gateway.streaming import ActiveRunStream, EventStream
from services.gateway.transfers import Streams
from services.gateway.wire.conversations import ConversationsEncoder
from services.gateway.wire.frames import Cursor

Request = TypeVar("Request")
Response = TypeVar("Response")


class Context:
    """The gateway's parts and its state."""

    def __init__(self, clients: Clients, patience: Patience, document: dict[str, Any], jwks: JwksCache) -> None:
        self.auth = Auth(clients.conversation, jwks)
        self.jwks = jwks
        self.streams = Streams()
        self.document = document
        self.is_draining = False
        self.patience = patience
        self._clients, self._relays = clients, Relays(clients.conversation)
        self._ready_until, self._ready = 0.0, False

    async def call(
        self,
        method: Callable[[ConversationStubs], aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        incoming: Incoming,
        seconds: float = CALL_SECONDS,
    ) -> Response:
        """A unary call of the conversation service for the caller; safe to make twice. Raises ServiceError."""
        service = self._clients.conversation
        return await service.call(method, request, incoming.caller, incoming.request_id, seconds=seconds)

    async def call_billing(
        self,
        method: Callable[[BillingStubs], aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        incoming: Incoming,
    ) -> Response:
        """A unary call of the billing service for the caller; safe to make twice. Raises ServiceError."""
        return await self._clients.billing.call(method, request, incoming.caller, incoming.request_id)

    def stream(self, target: Target, cursor: Cursor | None = None, holds_head: bool = False) -> ASGIApp:
        """The response that follows a run."""
        kind = EventStream if target.run or target.run_id else ActiveRunStream
        return kind(
            Follower(self._relays, target, self.patience),
            ConversationsEncoder,
            self.streams,
            self.patience,
            cursor,
            holds_head,
        )

    async def is_ready(self) -> bool:
        """Whether the conversation service serves; asked about once a second at most.

        Billing is not asked: without it only the money routes answer 503. Conversations are read and streams
        resumed as ever, and a gateway that called itself unready would take those away as well.
        """
        if time.monotonic() >= self._ready_until:
            self._ready = await self._clients.conversation.is_ready(READY_CALL_SECONDS)
            self._ready_until = time.monotonic() + READY_SECONDS
        return self._ready
