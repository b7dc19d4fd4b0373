"""Conversations: create, list, read, change, delete."""

from uuid import uuid4

from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import ASGIApp

from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.limits import ENDING_CALL_SECONDS
from services.gateway.routes import render, shapes
from services.gateway.routes.operations import CURSOR, IDEMPOTENCY_KEY, LIMIT, Answer, Operation, json_response
from threadloom.conversation.v1.conversation_service_pb2 import (
    CreateThreadRequest,
    DeleteThreadRequest,
    GetThreadRequest,
    ListThreadsRequest,
    UpdateThreadRequest,
)

COLLECTION = "/v1/conversations"
ONE = "/v1/conversations/{conversation_id}"


async def create(context: Context, incoming: Incoming) -> ASGIApp:
    """Creates a conversation."""
    body = incoming.read(shapes.NewConversation)
    request = CreateThreadRequest(
        title=body.title or "",
        system_prompt=body.system_prompt or "",
        default_model=body.default_model_slug or "",
        user_id=body.user_id or "",
        # Our own key makes our own retry on another replica safe.
        request_id=incoming.idempotency_key or str(uuid4()),
    )
    answer = await context.call(lambda to: to.conversations.CreateThread, request, incoming)
    return json_response(render.conversation(answer.thread), 201)


async def list_all(context: Context, incoming: Incoming) -> ASGIApp:
    """A page of the caller's conversations."""
    request = ListThreadsRequest(page_size=incoming.limit, page_token=incoming.query.get("cursor", ""))
    answer = await context.call(lambda to: to.conversations.ListThreads, request, incoming)
    found = [render.conversation(thread) for thread in answer.threads]
    return json_response(shapes.ConversationPage(found, answer.next_page_token or None))


async def read(context: Context, incoming: Incoming) -> ASGIApp:
    """One conversation."""
    request = GetThreadRequest(thread_id=incoming.conversation_id)
    answer = await context.call(lambda to: to.conversations.GetThread, request, incoming)
    return json_response(render.conversation(answer.thread))


async def change(context: Context, incoming: Incoming) -> ASGIApp:
    """Changes the fields that are given."""
    body = incoming.read(shapes.ConversationChange)
    request = UpdateThreadRequest(
        thread_id=incoming.conversation_id,
        title=_given(body.title),
        system_prompt=_given(body.system_prompt),
        default_model=_given(body.default_model_slug),
    )
    answer = await context.call(lambda to: to.conversations.UpdateThread, request, incoming)
    return json_response(render.conversation(answer.thread))


def _given(value: str | UnsetType | None) -> str | None:
    """None leaves the field as it is; empty clears it."""
    return None if value is UNSET else value or ""


async def delete(context: Context, incoming: Incoming) -> ASGIApp:
    """Deletes a conversation with all it holds."""
    request = DeleteThreadRequest(thread_id=incoming.conversation_id)
    # A retry after a lost answer says 404: what the caller wanted gone is gone.
    await context.call(lambda to: to.conversations.DeleteThread, request, incoming, ENDING_CALL_SECONDS)
    return Response(status_code=204)


OPERATIONS = (
    Operation(
        "POST",
        COLLECTION,
        create,
        "Create a conversation",
        (Answer(201, "The conversation.", shapes.Conversation),),
        ("IDEMPOTENCY_KEY_REUSED", "CONTENT_TOO_LARGE"),
        body=shapes.NewConversation,
        body_is_optional=True,
        headers=(IDEMPOTENCY_KEY,),
    ),
    Operation(
        "GET",
        COLLECTION,
        list_all,
        "List conversations, newest change first",
        (Answer(200, "A page.", shapes.ConversationPage),),
        query=(LIMIT, CURSOR),
    ),
    Operation(
        "GET",
        ONE,
        read,
        "Read a conversation",
        (Answer(200, "The conversation.", shapes.Conversation),),
        ("THREAD_NOT_FOUND",),
    ),
    Operation(
        "PATCH",
        ONE,
        change,
        "Change a conversation",
        (Answer(200, "The conversation after the change.", shapes.Conversation),),
        ("THREAD_NOT_FOUND", "CONTENT_TOO_LARGE"),
        body=shapes.ConversationChange,
    ),
    Operation(
        "DELETE",
        ONE,
        delete,
        "Delete a conversation with all it holds",
        (Answer(204, "It is gone."),),
        ("THREAD_NOT_FOUND",),
    ),
)
