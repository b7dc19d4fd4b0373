"""A project's own keys of model providers. A key comes in and never goes out: not in an answer, not in a log."""

from starlette.responses import Response
from starlette.types import ASGIApp

from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.routes import admin_render as render
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes.operations import Answer, Operation, json_response
from threadloom.conversation.v1.project_service_pb2 import (
    DeleteProviderKeyRequest,
    ListProviderKeysRequest,
    SetProviderKeyRequest,
)

KEYS = "/v1/admin/provider-keys"
ONE = KEYS + "/{provider}"


async def list_all(context: Context, incoming: Incoming) -> ASGIApp:
    """Which keys the project has."""
    answer = await context.call(lambda to: to.projects.ListProviderKeys, ListProviderKeysRequest(), incoming)
    return json_response(shapes.ProviderKeys([render.provider_key(key) for key in answer.provider_keys]))


async def put(context: Context, incoming: Incoming) -> ASGIApp:
    """Keeps a key in place of the one before."""
    key = incoming.read(shapes.NewProviderKey).api_key
    request = SetProviderKeyRequest(provider=incoming.path["provider"], api_key=key)
    answer = await context.call(lambda to: to.projects.SetProviderKey, request, incoming)
    return json_response(render.provider_key(answer.provider_key))


async def delete(context: Context, incoming: Incoming) -> ASGIApp:
    """Removes a key; that there was none is fine."""
    request = DeleteProviderKeyRequest(provider=incoming.path["provider"])
    await context.call(lambda to: to.projects.DeleteProviderKey, request, incoming)
    return Response(status_code=204)


OPERATIONS = (
    Operation(
        "GET",
        KEYS,
        list_all,
        "List which provider keys the project has",
        (Answer(200, "The providers, without the keys.", shapes.ProviderKeys),),
        is_for_admins=True,
    ),
    Operation(
        "PUT",
        ONE,
        put,
        "Keep the project's key of a model provider",
        (Answer(200, "It is kept, and never shown again.", shapes.ProviderKey),),
        ("CONTENT_TOO_LARGE", "AI_PROVIDER_NOT_CONFIGURED"),
        body=shapes.NewProviderKey,
        is_for_admins=True,
    ),
    Operation(
        "DELETE",
        ONE,
        delete,
        "Remove the project's key of a model provider",
        (Answer(204, "It is gone."),),
        is_for_admins=True,
    ),
)
