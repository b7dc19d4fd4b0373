"""The ledger: what every model call cost, as pages or as one file."""

from collections.abc import AsyncGenerator

from starlette.types import ASGIApp

from kit.errors import invalid
from services.gateway.context import Context
from services.gateway.exports import Export
from services.gateway.incoming import Incoming
from services.gateway.limits import EXPORT_PAGE
from services.gateway.routes import admin_render as render
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes import ledger_csv
from services.gateway.routes.operations import CURSOR, LIMIT, Answer, Operation, Parameter, json_response
from services.gateway.routes.usage import USER_ID, asked_user
from threadloom.billing.v1.billing_service_pb2 import ListLedgerRequest, ListLedgerResponse

FORMATS = ("json", "csv")
FORMAT = Parameter(
    "format", "`csv` is the whole ledger as one file; the header `Accept: text/csv` asks for the same.", one_of=FORMATS
)
FILE = "ledger.csv"


async def read(context: Context, incoming: Incoming) -> ASGIApp:
    """A page of the ledger, or all of it as CSV."""
    if _wants_csv(incoming):
        return await _export(context, incoming)
    page = await _page(context, incoming, incoming.limit, incoming.query.get("cursor", ""))
    return json_response(shapes.LedgerPage(_entries(page), page.next_page_token or None))


def _wants_csv(incoming: Incoming) -> bool:
    """The parameter counts before the header, which a link cannot set. Raises INVALID_OPTIONS."""
    chosen = incoming.query.get("format")
    if chosen is None:
        return ledger_csv.is_preferred(incoming.headers.get("accept", ""))
    if chosen not in FORMATS:
        raise invalid("format", f"format must be one of {', '.join(FORMATS)}.")
    return chosen == "csv"


async def _export(context: Context, incoming: Incoming) -> ASGIApp:
    """The whole ledger. The first page is read before the head, so that a failure is a status."""
    for name in ("limit", "cursor"):
        if name in incoming.query:
            raise invalid(name, f"{name} is for pages; the CSV is the whole ledger.")
    first = await _page(context, incoming, EXPORT_PAGE, "")
    headers = {
        "content-type": f"{ledger_csv.MEDIA_TYPE}; charset=utf-8; header=present",
        "content-disposition": f'attachment; filename="{FILE}"',
        "cache-control": "no-store",
    }
    return Export(context.streams, _lines(context, incoming, first), headers, context.patience.reader_stall)


async def _lines(context: Context, incoming: Incoming, page: ListLedgerResponse) -> AsyncGenerator[bytes, None]:
    """The file, a page at a time. A call booked meanwhile is newer than all of it, so no page shifts."""
    yield ledger_csv.header()
    while True:
        yield ledger_csv.rows(_entries(page))
        if not page.next_page_token:
            return
        page = await _page(context, incoming, EXPORT_PAGE, page.next_page_token)


async def _page(context: Context, incoming: Incoming, size: int, token: str) -> ListLedgerResponse:
    request = ListLedgerRequest(user_id=asked_user(incoming), page_size=size, page_token=token)
    return await context.call_billing(lambda to: to.billing.ListLedger, request, incoming)


def _entries(page: ListLedgerResponse) -> list[shapes.LedgerEntry]:
    return [render.ledger_entry(entry) for entry in page.entries]


OPERATIONS = (
    Operation(
        "GET",
        "/v1/admin/ledger",
        read,
        "Read the ledger, newest call first",
        (
            Answer(200, "A page.", shapes.LedgerPage),
            Answer(200, "As `text/csv` all of it, a line for each entry behind a header line.", media_type="text/csv"),
        ),
        query=(USER_ID, LIMIT, CURSOR, FORMAT),
        is_for_admins=True,
    ),
)
