"""What a user may spend, and what every user may who has no quota of its own."""

from starlette.responses import Response
from starlette.types import ASGIApp

from kit.errors import not_found
from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.routes import admin_render as render
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes.operations import Answer, Operation, json_response
from threadloom.billing.v1.billing_service_pb2 import GetQuotaRequest, SetQuotaRequest
from threadloom.billing.v1.usage_pb2 import PERIOD_TOTAL

# Without a user it is the quota of everybody who has none of its own.
DEFAULT = "/v1/admin/quotas"
ONE = DEFAULT + "/{user_id}"


async def read(context: Context, incoming: Incoming) -> ASGIApp:
    """A quota and what of it is used. Raises NOT_FOUND."""
    request = GetQuotaRequest(user_id=_user(incoming))
    answer = await context.call_billing(lambda to: to.billing.GetQuota, request, incoming)
    if not answer.HasField("quota"):
        raise not_found("quota")
    return json_response(render.spend_limit(answer.quota))


async def put(context: Context, incoming: Incoming) -> ASGIApp:
    """Sets a quota in place of the one before, whatever that one's period was."""
    body = incoming.read(shapes.NewQuota)
    request = SetQuotaRequest(
        user_id=_user(incoming),
        period=render.period_in(body.period),
        limit=render.money_in("limit_usd", body.limit_usd),
    )
    answer = await context.call_billing(lambda to: to.billing.SetQuota, request, incoming)
    return json_response(render.spend_limit(answer.quota))


async def delete(context: Context, incoming: Incoming) -> ASGIApp:
    """Removes a quota; that there was none is fine."""
    # A user has one quota at most, so its period need not be known to remove it; but one must be named.
    request = SetQuotaRequest(user_id=_user(incoming), period=PERIOD_TOTAL)
    await context.call_billing(lambda to: to.billing.SetQuota, request, incoming)
    return Response(status_code=204)


def _user(incoming: Incoming) -> str:
    return incoming.path.get("user_id", "")


def _operations(path: str, whose: str) -> tuple[Operation, ...]:
    return (
        Operation(
            "GET",
            path,
            read,
            f"Read the quota of {whose}",
            (Answer(200, "The quota and what of it is used.", shapes.SpendLimit),),
            ("NOT_FOUND",),
            is_for_admins=True,
        ),
        Operation(
            "PUT",
            path,
            put,
            f"Set the quota of {whose}",
            (Answer(200, "The quota and what of it is used.", shapes.SpendLimit),),
            ("CONTENT_TOO_LARGE",),
            body=shapes.NewQuota,
            is_for_admins=True,
        ),
        Operation(
            "DELETE",
            path,
            delete,
            f"Remove the quota of {whose}",
            (Answer(204, "There is none now."),),
            is_for_admins=True,
        ),
    )


OPERATIONS = (*_operations(DEFAULT, "every user who has none of its own"), *_operations(ONE, "a user"))
