"""What a whole project may spend."""

from starlette.responses import Response
from starlette.types import ASGIApp

from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.routes import admin_render as render
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes.operations import Answer, Operation, json_response
from threadloom.billing.v1.billing_service_pb2 import GetCapRequest, SetCapRequest

CAPS = "/v1/admin/caps"
ONE = CAPS + "/{period}"


async def list_all(context: Context, incoming: Incoming) -> ASGIApp:
    """The caps and what of them is used."""
    answer = await context.call_billing(lambda to: to.billing.GetCap, GetCapRequest(), incoming)
    return json_response(shapes.Caps([render.spend_limit(cap) for cap in answer.caps]))


async def put(context: Context, incoming: Incoming) -> ASGIApp:
    """Sets the cap of a period."""
    limit = render.money_in("limit_usd", incoming.read(shapes.NewCap).limit_usd)
    request = SetCapRequest(period=render.period_in(incoming.path["period"]), limit=limit)
    answer = await context.call_billing(lambda to: to.billing.SetCap, request, incoming)
    return json_response(render.spend_limit(answer.cap))


async def delete(context: Context, incoming: Incoming) -> ASGIApp:
    """Removes the cap of a period; that there was none is fine."""
    request = SetCapRequest(period=render.period_in(incoming.path["period"]))
    await context.call_billing(lambda to: to.billing.SetCap, request, incoming)
    return Response(status_code=204)


OPERATIONS = (
    Operation(
        "GET",
        CAPS,
        list_all,
        "List the project's caps",
        (Answer(200, "The caps and what of them is used.", shapes.Caps),),
        is_for_admins=True,
    ),
    Operation(
        "PUT",
        ONE,
        put,
        "Set the project's cap for a day, a month or all time",
        (Answer(200, "The cap and what of it is used.", shapes.SpendLimit),),
        ("CONTENT_TOO_LARGE",),
        body=shapes.NewCap,
        is_for_admins=True,
    ),
    Operation(
        "DELETE",
        ONE,
        delete,
        "Remove the project's cap for a period",
        (Answer(204, "There is none now."),),
        is_for_admins=True,
    ),
)
