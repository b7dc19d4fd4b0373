"""A conversation's runs: resuming a stream, cancelling, and tickets for clients that cannot send headers."""

from starlette.types import ASGIApp

from kit.errors import ServiceError, invalid, not_found
from kit.ids import parse_id
from services.gateway.context import Context
from services.gateway.following import Target
from services.gateway.incoming import Incoming
from services.gateway.limits import ENDING_CALL_SECONDS
from services.gateway.routes import render, shapes
from services.gateway.routes.conversations import ONE
from services.gateway.routes.messages import STREAM
from services.gateway.routes.operations import Answer, Operation, Parameter, json_response
from services.gateway.wire.frames import Cursor, parse_cursor
from threadloom.conversation.v1.conversation_service_pb2 import CancelRunRequest
from threadloom.conversation.v1.project_service_pb2 import CreateStreamTicketRequest

AFTER = Parameter("after", "A frame's id, or a message's `cursor`: the stream goes on behind it.")
TICKET = Parameter("ticket", "Instead of the credential headers: from POST /v1/stream-tickets, works once.")
LAST_EVENT_ID = Parameter("Last-Event-ID", "As `after`, which it overrides.")


async def follow(context: Context, incoming: Incoming) -> ASGIApp:
    """Resumes a stream at a cursor, or attaches to the active run from its beginning."""
    cursor = _cursor(incoming)
    target = Target(
        incoming.caller,
        incoming.request_id,
        incoming.conversation_id,
        run_id=cursor.run_id if cursor else "",
        # The cursor's own event is read again: not all of its frames may have been seen.
        after_seq=max(cursor.seq - 1, 0) if cursor else 0,
    )
    return context.stream(target, cursor=cursor)


def _cursor(incoming: Incoming) -> Cursor | None:
    """The cursor given; the header wins, for an EventSource cannot change its URL. Raises INVALID_OPTIONS."""
    name, text = "Last-Event-ID", incoming.headers.get("last-event-id", "")
    if not text:
        name, text = "after", incoming.query.get("after", "")
    if not text:
        return None
    found = parse_cursor(text)
    if found is None:
        raise invalid(name, f"{name} must be the id of a frame of this stream, as in <run id>:12.1.")
    return found


async def cancel(context: Context, incoming: Incoming) -> ASGIApp:
    """Cancels a run. With none in progress that is a success: a stop button never shows an error."""
    body = incoming.read(shapes.Cancel)
    run_id = body.run_id or ""
    if run_id and body.queued:
        raise invalid("queued", "queued cancels all answers of a conversation: leave run_id out.")
    if run_id and parse_id(run_id) is None:
        raise not_found("run")
    request = CancelRunRequest(thread_id=incoming.conversation_id, run_id=run_id, include_queued=body.queued)
    try:
        answer = await context.call(lambda to: to.conversations.CancelRun, request, incoming, ENDING_CALL_SECONDS)
    except ServiceError as error:
        if error.reason != "NOT_FOUND" or run_id:
            raise
        return json_response(shapes.CancelledRun(None, "idle"))
    return json_response(render.cancelled(answer.run))


async def create_ticket(context: Context, incoming: Incoming) -> ASGIApp:
    """A ticket that stands for the caller on one GET …/stream."""
    request = CreateStreamTicketRequest()
    answer = await context.call(lambda to: to.projects.CreateStreamTicket, request, incoming)
    return json_response(shapes.Ticket(answer.ticket, render.time(answer.expire_time)), 201)


OPERATIONS = (
    Operation(
        "GET",
        ONE + "/stream",
        follow,
        "Resume a stream, or attach to the run in progress",
        (STREAM, Answer(204, "No run is in progress, and no cursor was given.")),
        ("THREAD_NOT_FOUND", "NOT_FOUND", "CURSOR_EXPIRED"),
        query=(AFTER, TICKET),
        headers=(LAST_EVENT_ID,),
        takes_ticket=True,
    ),
    Operation(
        "POST",
        ONE + "/cancel",
        cancel,
        "Cancel the run in progress",
        (Answer(200, "The run, or `idle` when none was in progress.", shapes.CancelledRun),),
        ("THREAD_NOT_FOUND", "NOT_FOUND"),
        body=shapes.Cancel,
        body_is_optional=True,
    ),
    Operation(
        "POST",
        "/v1/stream-tickets",
        create_ticket,
        "Get a ticket for one event stream, good for 60 seconds",
        (Answer(201, "The ticket.", shapes.Ticket),),
        body=shapes.NewTicket,
        body_is_optional=True,
    ),
)
