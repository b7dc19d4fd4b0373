"""The RPCs of WebhookService. No rules, no SQL."""

import secrets
from datetime import UTC, datetime
from uuid import UUID

from grpc import aio
from sqlalchemy.ext.asyncio import AsyncEngine

from kit import pages
from kit.callers import Caller, Role, current_caller
from kit.db import transaction
from kit.errors import ServiceError, not_found
from kit.ids import new_id, parse_id
from kit.outbound import Outbound
from kit.sealing import KeyRing
from services.conversation import limits, translate
from services.conversation.domain import webhooks as rules
from services.conversation.store import webhooks
from services.conversation.store.webhooks import DeliveryRow, Sealed, WebhookRow
from services.conversation.webhooks import Deliverer, place
from threadloom.conversation.v1 import webhook_service_pb2 as api
from threadloom.conversation.v1 import webhook_service_pb2_grpc as api_grpc

Context = aio.ServicerContext[object, object]

STATES = {
    "pending": api.DELIVERY_STATE_PENDING,
    "delivered": api.DELIVERY_STATE_DELIVERED,
    "failed": api.DELIVERY_STATE_FAILED,
}


class WebhookServicer(api_grpc.WebhookServiceServicer):
    """See webhook_service.proto."""

    def __init__(self, engine: AsyncEngine, ring: KeyRing, outbound: Outbound, deliverer: Deliverer) -> None:
        self._engine, self._ring, self._outbound, self._deliverer = engine, ring, outbound, deliverer

    async def CreateWebhook(self, request: api.CreateWebhookRequest, context: Context) -> api.CreateWebhookResponse:
        """Makes a webhook."""
        who, project = _caller()
        id = parse_id(request.id) if request.id else new_id()
        if id is None:
            raise not_found("webhook")
        events = rules.check_events(request.events)
        secret, sealed = self._new_secret(project, id)
        await self._outbound.check(request.url)
        async with transaction(self._engine, who) as tx:
            row = await webhooks.put(
                tx, id=id, project=project, url=request.url, events=events, secret=sealed, most=limits.WEBHOOKS
            )
        if row is None:
            raise ServiceError(
                "INVALID_OPTIONS", f"A project may have at most {limits.WEBHOOKS} webhooks.", {"field": "url"}
            )
        return api.CreateWebhookResponse(webhook=_webhook(row), secret=secret)

    async def ListWebhooks(self, request: api.ListWebhooksRequest, context: Context) -> api.ListWebhooksResponse:
        """Lists webhooks."""
        who, _ = _caller()
        async with transaction(self._engine, who) as tx:
            rows = await webhooks.list_all(tx)
        return api.ListWebhooksResponse(webhooks=map(_webhook, rows))

    async def UpdateWebhook(self, request: api.UpdateWebhookRequest, context: Context) -> api.UpdateWebhookResponse:
        """Changes a webhook."""
        who, _ = _caller()
        id = _id(request.webhook_id, "webhook")
        url = request.url if request.HasField("url") else None
        events = rules.check_events(request.events) if request.events else None
        enabled = request.enabled if request.HasField("enabled") else None
        if url is not None:
            await self._outbound.check(url)
        async with transaction(self._engine, who) as tx:
            row = await webhooks.update(tx, id, url=url, events=events, enabled=enabled)
        if row is None:
            raise not_found("webhook")
        return api.UpdateWebhookResponse(webhook=_webhook(row))

    async def RotateWebhookSecret(
        self, request: api.RotateWebhookSecretRequest, context: Context
    ) -> api.RotateWebhookSecretResponse:
        """Puts a new secret in place."""
        who, project = _caller()
        id = _id(request.webhook_id, "webhook")
        secret, sealed = self._new_secret(project, id)
        async with transaction(self._engine, who) as tx:
            if not await webhooks.rotate(tx, id, sealed):
                raise not_found("webhook")
        return api.RotateWebhookSecretResponse(secret=secret)

    async def DeleteWebhook(self, request: api.DeleteWebhookRequest, context: Context) -> api.DeleteWebhookResponse:
        """Removes a webhook."""
        who, _ = _caller()
        id = parse_id(request.webhook_id)
        if id is not None:
            async with transaction(self._engine, who) as tx:
                await webhooks.delete(tx, id)
        return api.DeleteWebhookResponse()

    async def SendTestWebhook(
        self, request: api.SendTestWebhookRequest, context: Context
    ) -> api.SendTestWebhookResponse:
        """Sends a ping."""
        who, _ = _caller()
        id = _id(request.webhook_id, "webhook")
        payload = rules.envelope(rules.PING, {}, datetime.now(UTC))
        async with transaction(self._engine, who) as tx:
            row = await webhooks.tell(tx, id, delivery=new_id(), type=rules.PING, payload=payload)
        if row is None:
            raise not_found("webhook")
        self._deliverer.wake()
        return api.SendTestWebhookResponse(delivery=_delivery(row))

    async def ListWebhookDeliveries(
        self, request: api.ListWebhookDeliveriesRequest, context: Context
    ) -> api.ListWebhookDeliveriesResponse:
        """Lists deliveries."""
        who, _ = _caller()
        id = _id(request.webhook_id, "webhook")
        before = pages.decode_time(request.page_token)
        size = min(max(request.page_size, 0) or limits.DELIVERIES_PAGE, limits.DELIVERIES_PAGE_MAX)
        async with transaction(self._engine, who) as tx:
            if not await webhooks.exists(tx, id):
                raise not_found("webhook")
            rows = await webhooks.list_deliveries(tx, id, before=before, limit=size + 1)
        shown = rows[:size]
        token = pages.encode_time(shown[-1].created_at, shown[-1].id) if len(rows) > size else ""
        return api.ListWebhookDeliveriesResponse(deliveries=map(_delivery, shown), next_page_token=token)

    async def RedeliverWebhookDelivery(
        self, request: api.RedeliverWebhookDeliveryRequest, context: Context
    ) -> api.RedeliverWebhookDeliveryResponse:
        """Sends a delivery again."""
        who, _ = _caller()
        id = _id(request.delivery_id, "delivery")
        async with transaction(self._engine, who) as tx:
            row = await webhooks.redeliver(tx, id, limits.WEBHOOK_LEASE_SECONDS)
        if row is None:
            raise not_found("delivery")
        self._deliverer.wake()
        return api.RedeliverWebhookDeliveryResponse(delivery=_delivery(row))

    def _new_secret(self, project: UUID, webhook: UUID) -> tuple[str, Sealed]:
        if not self._ring:
            raise ServiceError(
                "FORBIDDEN",
                "Webhooks cannot be kept here: THREADLOOM_SECRET_KEYS, which encrypts their secrets, is not set.",
            )
        secret = rules.new_secret(secrets.token_bytes(limits.WEBHOOK_SECRET_BYTES))
        return secret, Sealed(self._ring.seal(secret, place(project, webhook)), self._ring.first_id)


def _caller() -> tuple[Caller, UUID]:
    who = current_caller.get()
    if who.role is not Role.SERVICE or who.project is None:
        raise ServiceError("FORBIDDEN", "Only the project's service role may manage webhooks.")
    return who, who.project


def _id(text: str, kind: str) -> UUID:
    id = parse_id(text)
    if id is None:
        raise not_found(kind)
    return id


def _webhook(row: WebhookRow) -> api.Webhook:
    return api.Webhook(
        id=str(row.id),
        url=row.url,
        events=row.events,
        enabled=row.enabled,
        disabled_reason=row.disabled_reason,
        create_time=translate.timestamp(row.created_at),
        update_time=translate.timestamp(row.updated_at),
    )


def _delivery(row: DeliveryRow) -> api.WebhookDelivery:
    return api.WebhookDelivery(
        id=str(row.id),
        webhook_id=str(row.webhook_id),
        type=row.type,
        run_id=str(row.run_id) if row.run_id is not None else "",
        state=STATES[row.state],
        attempts=row.attempts,
        last_status=row.last_status,
        last_error=row.last_error,
        next_attempt_time=translate.timestamp(row.due_at) if row.state == "pending" else None,
        create_time=translate.timestamp(row.created_at),
    )
