"""An operation: one method of one path, with all that the router and the OpenAPI document need to know."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

if TYPE_CHECKING:
    from services.gateway.context import Context
    from services.gateway.incoming import Incoming

Handler = Callable[["Context", "Incoming"], Awaitable[ASGIApp]]
OpenHandler = Callable[["Context"], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Parameter:
    """A query parameter or a header, for the document and for refusing unknown ones."""

    name: str
    about: str
    is_number: bool = False
    one_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A response: its status and the struct of its JSON, or the media type of something else."""

    status: int
    about: str
    shape: type[msgspec.Struct] | None = None
    media_type: str = "application/json"


@dataclass(frozen=True)
class Operation:
    """One method of one path that needs a caller."""

    method: str
    path: str
    handler: Handler
    summary: str
    answers: tuple[Answer, ...]
    errors: tuple[str, ...] = ()
    body: type[msgspec.Struct] | None = None
    body_is_optional: bool = False
    query: tuple[Parameter, ...] = ()
    headers: tuple[Parameter, ...] = ()
    # Whether `?ticket=` may stand in for the credential headers.
    takes_ticket: bool = False
    # Whether only a project's admins may call it, as the project's service role.
    is_for_admins: bool = False


@dataclass(frozen=True)
class OpenOperation:
    """A GET that anybody may call."""

    path: str
    handler: OpenHandler
    summary: str
    answers: tuple[Answer, ...]
    method: str = "GET"


LIMIT = Parameter("limit", "How many at most; large values are clamped.", is_number=True)
CURSOR = Parameter("cursor", "`next_cursor` of the page before.")
IDEMPOTENCY_KEY = Parameter(
    "Idempotency-Key", "1 to 255 printable ASCII characters: the same key again gets the first outcome, for 48 hours."
)
# What any operation with a caller can answer.
COMMON_ERRORS = ("UNAUTHENTICATED", "INVALID_OPTIONS", "UNAVAILABLE", "INTERNAL")
ADMIN_ERRORS = ("FORBIDDEN",)


def json_response(shape: msgspec.Struct, status: int = 200) -> Response:
    """A struct as a JSON response. Never cached: it is one user's."""
    body = msgspec.json.encode(shape)
    return Response(body, status, {"cache-control": "no-store"}, media_type="application/json")
