"""What was spent: a user's own, any user's and the project's for admins."""

from starlette.types import ASGIApp

from kit.callers import Role
from kit.errors import ServiceError, invalid
from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.routes import admin_render as render
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes.operations import Answer, Operation, Parameter, json_response
from threadloom.billing.v1.billing_service_pb2 import GetQuotaRequest, GetUsageRequest

USER_ID = Parameter("user_id", "Only this user's; without it the whole project's.")


async def read_own(context: Context, incoming: Incoming) -> ASGIApp:
    """The calling user's usage and quota. Raises FORBIDDEN for a service key, which is no user."""
    if incoming.caller.role is not Role.USER:
        raise ServiceError("FORBIDDEN", "This is for users. With a service key ask GET /v1/admin/usage?user_id=….")
    usage = await context.call_billing(lambda to: to.billing.GetUsage, GetUsageRequest(), incoming)
    found = await context.call_billing(lambda to: to.billing.GetQuota, GetQuotaRequest(), incoming)
    periods = [render.period_spend(period) for period in usage.periods]
    quota = render.spend_limit(found.quota) if found.HasField("quota") else None
    return json_response(shapes.OwnUsage(incoming.caller.user, periods, quota))


def asked_user(incoming: Incoming) -> str:
    """The user that is asked about; '' for the whole project. A value that is empty must not widen the view."""
    user = incoming.query.get("user_id")
    if user == "":
        raise invalid("user_id", "user_id is empty. Name a user, or leave it out for the whole project.")
    return user or ""


async def read(context: Context, incoming: Incoming) -> ASGIApp:
    """A user's usage, or the project's."""
    user = asked_user(incoming)
    answer = await context.call_billing(lambda to: to.billing.GetUsage, GetUsageRequest(user_id=user), incoming)
    return json_response(shapes.Usage(user or None, [render.period_spend(period) for period in answer.periods]))


OPERATIONS = (
    Operation(
        "GET",
        "/v1/usage",
        read_own,
        "Read what you spent, and your quota",
        (Answer(200, "Day, month and total.", shapes.OwnUsage),),
        ("FORBIDDEN",),
    ),
    Operation(
        "GET",
        "/v1/admin/usage",
        read,
        "Read what a user or the project spent",
        (Answer(200, "Day, month and total.", shapes.Usage),),
        query=(USER_ID,),
        is_for_admins=True,
    ),
)
