"""Messages and traces of a conversation; posting a message streams its answer."""

from uuid import uuid4

from google.protobuf.duration_pb2 import Duration
from starlette.types import ASGIApp

from kit.errors import invalid, seconds
from services.gateway.context import Context
from services.gateway.following import Target
from services.gateway.incoming import Incoming
from services.gateway.limits import START_CALL_SECONDS
from services.gateway.routes import render, shapes
from services.gateway.routes.conversations import ONE
from services.gateway.routes.operations import (
    CURSOR,
    IDEMPOTENCY_KEY,
    LIMIT,
    Answer,
    Operation,
    Parameter,
    json_response,
)
from threadloom.conversation.v1.conversation_service_pb2 import (
    ListMessagesRequest,
    ListTracesRequest,
    RunRequest,
    StartRunRequest,
)
from threadloom.conversation.v1.message_pb2 import ContentPart
from threadloom.conversation.v1.run_pb2 import IfRunning, RunOptions

MESSAGES = ONE + "/messages"
TRACES = ONE + "/traces"

IF_RUNNING = {
    "reject": IfRunning.IF_RUNNING_REJECT,
    "enqueue": IfRunning.IF_RUNNING_ENQUEUE,
    "interrupt": IfRunning.IF_RUNNING_INTERRUPT,
}
MOST_SECONDS = 1e9  # what a Duration surely takes; the bounds that count are the service's

STREAM = Answer(
    200,
    "Named events: `trace_start`, `trace_delta`, `trace_end`, `delta`, `withdraw`; at the end one `done` or `error`.",
    media_type="text/event-stream",
)


async def post(context: Context, incoming: Incoming) -> ASGIApp:
    """Saves the message and streams the answer."""
    body = incoming.read(shapes.NewMessage)
    conversation_id = incoming.conversation_id
    request = RunRequest(
        thread_id=conversation_id,
        parts=_parts(body.content),
        options=_options(body),
        # Our own key makes our own retry on another replica safe.
        request_id=incoming.idempotency_key or str(uuid4()),
    )
    if body.background:
        if body.on_disconnect != "continue":
            raise invalid("on_disconnect", "on_disconnect must be 'continue' with background: nobody has to follow it.")
        asked = StartRunRequest(run=request)
        started = await context.call(lambda to: to.conversations.StartRun, asked, incoming, START_CALL_SECONDS)
        return json_response(render.accepted(started.run), 202)
    target = Target(incoming.caller, incoming.request_id, conversation_id, run=request)
    return context.stream(target, holds_head=True)


def _parts(content: str | list[shapes.TextPart]) -> list[ContentPart]:
    if isinstance(content, str):
        return [ContentPart(text=content)]
    return [ContentPart(text=part.text) for part in content]


def _options(body: shapes.NewMessage) -> RunOptions:
    return RunOptions(
        model=body.model or "",
        system=body.system or "",
        temperature=body.temperature,
        max_output_tokens=body.max_output_tokens,
        min_output_tokens=body.min_output_tokens,
        reasoning_effort=body.reasoning_effort or "",
        fallback_models=body.fallback_models,
        if_running=IF_RUNNING[body.if_running],
        cancel_after_disconnect=_cancel_after(body.on_disconnect),
    )


def _cancel_after(wish: str | shapes.CancelAfter) -> Duration | None:
    if not isinstance(wish, shapes.CancelAfter):
        return None
    if not 0 <= wish.cancel_after_s <= MOST_SECONDS:
        raise invalid("on_disconnect", "on_disconnect must cancel after 1 to 3600 seconds.")
    return seconds(wish.cancel_after_s)


async def list_all(context: Context, incoming: Incoming) -> ASGIApp:
    """A page of messages."""
    request = ListMessagesRequest(
        thread_id=incoming.conversation_id, page_size=incoming.limit, page_token=incoming.query.get("cursor", "")
    )
    answer = await context.call(lambda to: to.conversations.ListMessages, request, incoming)
    found = [render.message(message) for message in answer.messages]
    return json_response(shapes.MessagePage(found, answer.next_page_token or None))


async def list_traces(context: Context, incoming: Incoming) -> ASGIApp:
    """A page of traces."""
    request = ListTracesRequest(
        thread_id=incoming.conversation_id,
        message_id=incoming.query.get("message_id", "").removeprefix("msg_"),
        page_size=incoming.limit,
        page_token=incoming.query.get("cursor", ""),
    )
    answer = await context.call(lambda to: to.conversations.ListTraces, request, incoming)
    found = [render.trace(trace) for trace in answer.traces]
    return json_response(shapes.TracePage(found, answer.next_page_token or None))


OPERATIONS = (
    Operation(
        "GET",
        MESSAGES,
        list_all,
        "List messages, oldest first",
        (Answer(200, "A page.", shapes.MessagePage),),
        ("THREAD_NOT_FOUND",),
        query=(LIMIT, CURSOR),
    ),
    Operation(
        "POST",
        MESSAGES,
        post,
        "Post a message and stream its answer",
        (STREAM, Answer(202, "The run, with `background`.", shapes.AcceptedRun)),
        (
            "THREAD_NOT_FOUND",
            "CONTENT_TOO_LARGE",
            "CONTEXT_TOO_LARGE",
            "RUN_IN_PROGRESS",
            "IDEMPOTENCY_KEY_REUSED",
            "AI_PROVIDER_NOT_CONFIGURED",
            "AI_PROVIDER_ERROR",
            "AI_PROVIDER_TIMEOUT",
            "AI_RATE_LIMITED",
            "TURN_TIMEOUT",
        ),
        body=shapes.NewMessage,
        headers=(IDEMPOTENCY_KEY,),
    ),
    Operation(
        "GET",
        TRACES,
        list_traces,
        "List traces in the order they were opened",
        (Answer(200, "A page.", shapes.TracePage),),
        ("THREAD_NOT_FOUND",),
        query=(LIMIT, CURSOR, Parameter("message_id", "Only the traces of this message.")),
    ),
)
