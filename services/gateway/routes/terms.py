"""What a project agreed to besides prices."""

from msgspec import UNSET
from starlette.types import ASGIApp

from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.routes import admin_render as render
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes.operations import Answer, Operation, json_response
from threadloom.billing.v1.billing_service_pb2 import GetTermsRequest, SetTermsRequest
from threadloom.billing.v1.price_pb2 import Terms

TERMS = "/v1/admin/terms"


async def read(context: Context, incoming: Incoming) -> ASGIApp:
    """The terms in force."""
    answer = await context.call_billing(lambda to: to.billing.GetTerms, GetTermsRequest(), incoming)
    return json_response(render.terms(answer.terms))


async def change(context: Context, incoming: Incoming) -> ASGIApp:
    """Changes the terms that are given."""
    body = incoming.read(shapes.TermsChange)
    terms = Terms(
        credits_per_usd=None if body.credits_per_usd is UNSET else body.credits_per_usd,
        runs_per_minute=None if body.runs_per_minute is UNSET else body.runs_per_minute,
    )
    answer = await context.call_billing(lambda to: to.billing.SetTerms, SetTermsRequest(terms=terms), incoming)
    return json_response(render.terms(answer.terms))


OPERATIONS = (
    Operation(
        "GET",
        TERMS,
        read,
        "Read the project's terms",
        (Answer(200, "The terms in force.", shapes.Terms),),
        is_for_admins=True,
    ),
    Operation(
        "PATCH",
        TERMS,
        change,
        "Change the project's terms",
        (Answer(200, "The terms in force.", shapes.Terms),),
        ("CONTENT_TOO_LARGE",),
        body=shapes.TermsChange,
        is_for_admins=True,
    ),
)
