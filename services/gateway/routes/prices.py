"""What models cost in a project."""

from starlette.types import ASGIApp

from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.routes import admin_render as render
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes.operations import CURSOR, LIMIT, Answer, Operation, json_response
from threadloom.billing.v1.billing_service_pb2 import ListPricesRequest, SetPriceRequest

PRICES = "/v1/admin/prices"


async def list_all(context: Context, incoming: Incoming) -> ASGIApp:
    """A page of the prices that were set."""
    request = ListPricesRequest(page_size=incoming.limit, page_token=incoming.query.get("cursor", ""))
    answer = await context.call_billing(lambda to: to.billing.ListPrices, request, incoming)
    found = [render.price(price) for price in answer.prices]
    return json_response(shapes.PricePage(found, answer.next_page_token or None))


async def put(context: Context, incoming: Incoming) -> ASGIApp:
    """Sets the project's price of a model."""
    body = incoming.read(shapes.NewPrice)
    request = SetPriceRequest(model=body.model, rates=render.rates_in(body))
    answer = await context.call_billing(lambda to: to.billing.SetPrice, request, incoming)
    return json_response(render.price(answer.price))


OPERATIONS = (
    Operation(
        "GET",
        PRICES,
        list_all,
        "List the prices that were set, by model",
        (Answer(200, "A page. Published prices, which hold where none was set, are not in it.", shapes.PricePage),),
        query=(LIMIT, CURSOR),
        is_for_admins=True,
    ),
    Operation(
        "PUT",
        PRICES,
        put,
        "Set the project's price of a model, for calls made from now on",
        (Answer(200, "The price as kept.", shapes.Price),),
        ("CONTENT_TOO_LARGE",),
        body=shapes.NewPrice,
        is_for_admins=True,
    ),
)
