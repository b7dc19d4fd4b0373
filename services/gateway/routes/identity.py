"""A project's identity: whose tokens of its users are taken besides those that its secret signs."""

from starlette.responses import Response
from starlette.types import ASGIApp

from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.routes import admin_render as render
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes.operations import Answer, Operation, json_response
from threadloom.conversation.v1.project_service_pb2 import (
    DeleteIdentityRequest,
    GetIdentityRequest,
    SetIdentityRequest,
)

IDENTITY = "/v1/admin/identity"


async def get(context: Context, incoming: Incoming) -> ASGIApp:
    """What is set."""
    answer = await context.call(lambda to: to.projects.GetIdentity, GetIdentityRequest(), incoming)
    return json_response(render.identity(answer.identity))


async def put(context: Context, incoming: Incoming) -> ASGIApp:
    """Keeps it in place of what was set before."""
    request = SetIdentityRequest(identity=render.identity_in(incoming.read(shapes.NewIdentity)))
    answer = await context.call(lambda to: to.projects.SetIdentity, request, incoming)
    return json_response(render.identity(answer.identity))


async def delete(context: Context, incoming: Incoming) -> ASGIApp:
    """Removes it; that there was none is fine."""
    await context.call(lambda to: to.projects.DeleteIdentity, DeleteIdentityRequest(), incoming)
    return Response(status_code=204)


OPERATIONS = (
    Operation(
        "GET",
        IDENTITY,
        get,
        "Read how tokens of the project's identity provider are verified",
        (Answer(200, "As kept.", shapes.Identity),),
        ("NOT_FOUND",),
        is_for_admins=True,
    ),
    Operation(
        "PUT",
        IDENTITY,
        put,
        "Set how tokens of the project's identity provider are verified",
        (Answer(200, "It is kept, and counts within 10 seconds.", shapes.Identity),),
        ("CONTENT_TOO_LARGE",),
        body=shapes.NewIdentity,
        is_for_admins=True,
    ),
    Operation(
        "DELETE",
        IDENTITY,
        delete,
        "Take tokens that the project's secret signs only",
        (Answer(204, "It is gone."),),
        is_for_admins=True,
    ),
)
