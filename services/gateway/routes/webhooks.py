"""A project's webhooks. A signing secret goes out once, in the answer that made it."""

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import ASGIApp

from kit.ids import new_id
from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.routes import admin_render as render
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes.operations import CURSOR, LIMIT, Answer, Operation, json_response
from threadloom.conversation.v1 import webhook_service_pb2 as api

WEBHOOKS = "/v1/admin/webhooks"
ONE = WEBHOOKS + "/{webhook_id}"
DELIVERIES = ONE + "/deliveries"
AGAIN = "/v1/admin/webhook-deliveries/{delivery_id}/redeliver"


async def list_all(context: Context, incoming: Incoming) -> ASGIApp:
    """Lists webhooks."""
    answer = await context.call(lambda to: to.webhooks.ListWebhooks, api.ListWebhooksRequest(), incoming)
    return json_response(shapes.Webhooks([render.webhook(found) for found in answer.webhooks]))


async def create(context: Context, incoming: Incoming) -> ASGIApp:
    """Makes a webhook. Its id is made here: the call may be made twice and leaves one."""
    body = incoming.read(shapes.NewWebhook)
    request = api.CreateWebhookRequest(id=str(new_id()), url=body.url, events=body.events)
    answer = await context.call(lambda to: to.webhooks.CreateWebhook, request, incoming)
    return json_response(shapes.CreatedWebhook(render.webhook(answer.webhook), answer.secret), 201)


async def change(context: Context, incoming: Incoming) -> ASGIApp:
    """Changes a webhook."""
    body = incoming.read(shapes.WebhookChange)
    request = api.UpdateWebhookRequest(webhook_id=incoming.path["webhook_id"])
    if body.url is not UNSET:
        request.url = body.url
    if body.events is not UNSET:
        request.events.extend(body.events)
    if body.enabled is not UNSET:
        request.enabled = body.enabled
    answer = await context.call(lambda to: to.webhooks.UpdateWebhook, request, incoming)
    return json_response(render.webhook(answer.webhook))


async def delete(context: Context, incoming: Incoming) -> ASGIApp:
    """Removes a webhook; that there was none is fine."""
    request = api.DeleteWebhookRequest(webhook_id=incoming.path["webhook_id"])
    await context.call(lambda to: to.webhooks.DeleteWebhook, request, incoming)
    return Response(status_code=204)


async def rotate(context: Context, incoming: Incoming) -> ASGIApp:
    """Replaces the secret."""
    request = api.RotateWebhookSecretRequest(webhook_id=incoming.path["webhook_id"])
    answer = await context.call(lambda to: to.webhooks.RotateWebhookSecret, request, incoming)
    return json_response(shapes.WebhookSecret(answer.secret))


async def test(context: Context, incoming: Incoming) -> ASGIApp:
    """Sends a ping."""
    request = api.SendTestWebhookRequest(webhook_id=incoming.path["webhook_id"])
    answer = await context.call(lambda to: to.webhooks.SendTestWebhook, request, incoming)
    return json_response(render.webhook_delivery(answer.delivery), 202)


async def deliveries(context: Context, incoming: Incoming) -> ASGIApp:
    """Lists deliveries."""
    request = api.ListWebhookDeliveriesRequest(
        webhook_id=incoming.path["webhook_id"], page_size=incoming.limit, page_token=incoming.query.get("cursor", "")
    )
    answer = await context.call(lambda to: to.webhooks.ListWebhookDeliveries, request, incoming)
    found = [render.webhook_delivery(one) for one in answer.deliveries]
    return json_response(shapes.WebhookDeliveryPage(found, answer.next_page_token or None))


async def redeliver(context: Context, incoming: Incoming) -> ASGIApp:
    """Sends a delivery again."""
    request = api.RedeliverWebhookDeliveryRequest(delivery_id=incoming.path["delivery_id"])
    answer = await context.call(lambda to: to.webhooks.RedeliverWebhookDelivery, request, incoming)
    return json_response(render.webhook_delivery(answer.delivery), 202)


OPERATIONS = (
    Operation(
        "GET",
        WEBHOOKS,
        list_all,
        "List the project's webhooks",
        (Answer(200, "All, without their secrets.", shapes.Webhooks),),
        is_for_admins=True,
    ),
    Operation(
        "POST",
        WEBHOOKS,
        create,
        "Make a webhook",
        (Answer(201, "The webhook, and its secret this once.", shapes.CreatedWebhook),),
        ("CONTENT_TOO_LARGE",),
        body=shapes.NewWebhook,
        is_for_admins=True,
    ),
    Operation(
        "PATCH",
        ONE,
        change,
        "Change a webhook",
        (Answer(200, "As kept.", shapes.Webhook),),
        ("NOT_FOUND", "CONTENT_TOO_LARGE"),
        body=shapes.WebhookChange,
        is_for_admins=True,
    ),
    Operation(
        "DELETE",
        ONE,
        delete,
        "Remove a webhook and what still waited for it",
        (Answer(204, "It is gone."),),
        is_for_admins=True,
    ),
    Operation(
        "POST",
        ONE + "/secret",
        rotate,
        "Replace a webhook's signing secret, at once",
        (Answer(200, "The new secret, this once.", shapes.WebhookSecret),),
        ("NOT_FOUND",),
        is_for_admins=True,
    ),
    Operation(
        "POST",
        ONE + "/test",
        test,
        "Send a webhook an event of type `ping`",
        (Answer(202, "It will be sent.", shapes.WebhookDelivery),),
        ("NOT_FOUND",),
        is_for_admins=True,
    ),
    Operation(
        "GET",
        DELIVERIES,
        deliveries,
        "List a webhook's deliveries, newest first",
        (Answer(200, "A page.", shapes.WebhookDeliveryPage),),
        ("NOT_FOUND",),
        query=(LIMIT, CURSOR),
        is_for_admins=True,
    ),
    Operation(
        "POST",
        AGAIN,
        redeliver,
        "Send a delivery again, under the same id",
        (Answer(202, "It will be sent.", shapes.WebhookDelivery),),
        ("NOT_FOUND",),
        is_for_admins=True,
    ),
)
