"""Errors as HTTP: status, headers and the one JSON shape."""

import math

import msgspec
from starlette.responses import Response

from kit.errors import ServiceError
from services.gateway.wire.conversations import code_of, seconds

# Metadata values travel as text; these are numbers.
NUMBERS = frozenset(("limit", "limit_seconds", "status"))


# The services name fields by their protos, clients by these dialects.
FIELDS = {
    "parts": "content",
    "page_size": "limit",
    "page_token": "cursor",
    "default_model": "default_model_slug",
    "after_seq": "after",
    "request_id": "Idempotency-Key",
    # Each price is checked here, under its own name: what billing can find wrong with rates is their tiers.
    "rates": "tiers",
}


class Problem(msgspec.Struct, omit_defaults=True):
    """What went wrong. Branch on `code`; `message` is a sentence for a human."""

    code: str
    message: str
    request_id: str
    # Seconds to wait before trying again.
    retry_after: int | float | None = None
    # The part of the request that is wrong.
    field: str | None = None
    # The kind of thing that does not exist or exists already.
    kind: str | None = None
    # The run in progress.
    run_id: str | None = None
    # Where the whole text can be read.
    messages_url: str | None = None
    # The limit that was passed, and what it counts.
    limit: int | None = None
    unit: str | None = None
    limit_seconds: int | None = None
    # The provider that failed, and its HTTP status.
    provider: str | None = None
    status: int | None = None


class HttpError(ServiceError):
    """A failure that exists only in HTTP: it never crosses gRPC, so its reason is not in error_reason.proto."""

    def __init__(self, http: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason, message)
        self.http = http
        self.headers = headers or {}


def method_not_allowed(allowed: str) -> HttpError:
    """405; `allowed` is the value of the header Allow."""
    return HttpError(405, "METHOD_NOT_ALLOWED", f"This path knows only {allowed}.", {"Allow": allowed})


def in_dialect(error: ServiceError, conversation_id: str) -> ServiceError:
    """The error with this dialect's field names and addresses."""
    field = error.metadata.get("field")
    if field is not None:
        # `options.temperature`, `terms.credits_per_usd`, `parts[3].text`: what follows the name stays.
        name = field.removeprefix("options.").removeprefix("terms.")
        head = name.split("[")[0].split(".")[0]
        error.metadata["field"] = FIELDS.get(head, head) + name[len(head) :]
    if error.reason == "CURSOR_EXPIRED":
        error.metadata["messages_url"] = f"/v1/conversations/{conversation_id}/messages"
    return error


def to_problem(error: ServiceError, request_id: str) -> Problem:
    """The JSON shape of an error. Metadata the shape does not know stays inside."""
    known = {name: value for name, value in error.metadata.items() if name in METADATA}
    return Problem(
        code_of(error.reason),
        error.message,
        request_id,
        retry_after=None if error.retry_after is None else seconds(error.retry_after),
        **{name: _number(value) if name in NUMBERS else value for name, value in known.items()},  # type: ignore[arg-type]
    )


METADATA = frozenset(Problem.__struct_fields__) - {"code", "message", "request_id", "retry_after"}


def to_response(error: ServiceError, request_id: str) -> Response:
    """The response that tells of an error."""
    status, headers = error.kind.http, {}
    if isinstance(error, HttpError):
        status, headers = error.http, dict(error.headers)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    body = msgspec.json.encode(to_problem(error, request_id))
    return Response(body, status, headers, media_type="application/json")


def _number(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdigit() else None
