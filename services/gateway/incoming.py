"""A request, read and checked for shape: what is not JSON, not known or not of its type ends here.

What a value may be beyond its shape (lengths, ranges, control characters) is the
conversation service's to say, for its gRPC callers need the same rules.
"""

import asyncio
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from kit.callers import Caller
from kit.errors import ServiceError, invalid, thread_not_found
from kit.ids import parse_id
from services.gateway.limits import BODY_BYTES, BODY_SECONDS, IDEMPOTENCY_KEY_CHARS, QUERY_PARAMETERS
from services.gateway.middleware import ClientLeft
from services.gateway.problems import HttpError

Body = TypeVar("Body", bound=msgspec.Struct)

# Options of features that are still to come: the refusal says so instead of calling them unknown.
COMING = frozenset(("media", "skill", "tools", "memory", "collections", "preset_id"))

PRINTABLE = re.compile(r"[\x20-\x7e]+")
WHOLE_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
INT32_MAX = 2**31 - 1

# The sentences of msgspec's validation errors.
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
WRONG_VALUE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
# A number where an amount of money, which is text, belongs.
NUMBER_FOR_TEXT = re.compile(r"Expected `str(?: \| null)?`, got `(?:int|float)`")
# A refusal repeats no more than this of what was sent.
REPEATED_CHARS = 80

# Finding where a surrogate stands means parsing again; above this size the sentence must do.
SURROGATE_SEARCH_BYTES = 256 * 1024


@dataclass(frozen=True)
class Incoming:
    """A request as a handler gets it. `query` holds only parameters the route knows."""

    caller: Caller
    request_id: str
    headers: Headers
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: msgspec.Struct | None

    @property
    def conversation_id(self) -> str:
        """The conversation the path names. Raises THREAD_NOT_FOUND for what cannot be an id."""
        text = self.path["conversation_id"]
        if parse_id(text) is None:
            raise thread_not_found()
        return text

    @property
    def limit(self) -> int:
        """The page size asked for, 0 when none is. Raises INVALID_OPTIONS."""
        text = self.query.get("limit")
        if text is None:
            return 0
        if not WHOLE_NUMBER.fullmatch(text) or int(text) == 0:
            raise invalid("limit", "limit must be a whole number from 1.")
        return min(int(text), INT32_MAX)

    @property
    def idempotency_key(self) -> str:
        """The header Idempotency-Key, empty when there is none. Raises INVALID_OPTIONS."""
        key = self.headers.get("idempotency-key")
        if key is None:
            return ""
        if not PRINTABLE.fullmatch(key) or len(key) > IDEMPOTENCY_KEY_CHARS:
            sentence = f"The header Idempotency-Key must hold 1 to {IDEMPOTENCY_KEY_CHARS} printable ASCII characters."
            raise invalid("Idempotency-Key", sentence)
        return key

    def read(self, shape: type[Body]) -> Body:
        """The body, which the route declared to be of this shape."""
        assert isinstance(self.body, shape)
        return self.body


def parse_query(raw: bytes, known: Collection[str]) -> dict[str, str]:
    """The query parameters; raises INVALID_OPTIONS for one that is unknown or given twice."""
    try:
        pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, max_num_fields=QUERY_PARAMETERS)
    except ValueError:
        raise invalid("query", f"There are more than {QUERY_PARAMETERS} query parameters.") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            raise invalid(name[:REPEATED_CHARS], "This query parameter is not known here.")
        if name in found:
            raise invalid(name, "This query parameter is given twice.")
        found[name] = value
    return found


def ticket_of(raw: bytes) -> str:
    """The stream ticket in the query, empty when there is none."""
    pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True)
    return next((value for name, value in pairs if name == "ticket"), "")


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises CONTENT_TOO_LARGE as soon as it is too long, and buffers no more than the limit."""
    declared = Headers(scope=scope).get("content-length", "")
    if WHOLE_NUMBER.fullmatch(declared) and int(declared) > BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _gather(receive)
    except TimeoutError:
        message = f"The body did not arrive within {BODY_SECONDS:.0f} seconds."
        raise HttpError(408, "INVALID_OPTIONS", message, {"Connection": "close"}) from None


async def _gather(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return bytes(body)


def _too_large() -> ServiceError:
    message = f"The body is larger than {BODY_BYTES} bytes."
    return ServiceError("CONTENT_TOO_LARGE", message, {"field": "body", "limit": str(BODY_BYTES), "unit": "bytes"})


def decode(raw: bytes, shape: type[Body]) -> Body:
    """The body as a struct, whatever its content type. Raises INVALID_OPTIONS naming the field."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(raw, error) from None


def _misfit(text: str) -> ServiceError:
    """JSON that is not of the shape: the field and what is wrong with it."""
    if found := UNKNOWN_FIELD.fullmatch(text):
        name = found["name"][:REPEATED_CHARS]
        if name in COMING and not found["path"]:
            return invalid(name, f"The option {name} is not available yet.")
        return invalid(_joined(found["path"], name), f"{name!r} is not an option of this call.")
    if found := MISSING_FIELD.fullmatch(text):
        field = _joined(found["path"], found["name"])
        return invalid(field, f"{field} is missing.")
    found = WRONG_VALUE.fullmatch(text)
    assert found is not None  # every part of the expression may be anything
    field, what = found["path"] or "body", found["what"][:REPEATED_CHARS]
    if field.endswith("_usd") and NUMBER_FOR_TEXT.fullmatch(what):
        return invalid(field, f'{field} must be a string such as "0.15": JSON numbers are floats, which are not exact.')
    return invalid(field, f"{field}: {what}.")


def _malformed(raw: bytes, error: Exception) -> ServiceError:
    """What is not JSON at all, or JSON with text that is no text."""
    if isinstance(error, RecursionError):
        return invalid("body", "The body is nested too deeply.")
    field = _surrogate_field(raw)
    if field is not None:
        return invalid(field, f"{field} holds half of a surrogate pair (such as \\ud800), which is not a character.")
    if "UTF-8" in str(error):
        return invalid("body", "The body is not UTF-8.")
    return invalid("body", "The body is not JSON.")


def _surrogate_field(raw: bytes) -> str | None:
    """The field that holds an unpaired surrogate, None when none does."""
    if b"\\u" not in raw or len(raw) > SURROGATE_SEARCH_BYTES:
        return None
    try:
        document = json.loads(raw)  # unlike msgspec it lets them pass, so that they can be found
        return _find_surrogate(document, "")
    except (ValueError, RecursionError):
        return None


def _find_surrogate(value: Any, path: str) -> str | None:
    match value:
        case str():
            is_text = value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
            return None if is_text else path or "body"
        case dict():
            found = (
                _find_surrogate(item, _joined(path, name)) or _find_surrogate(name, path)
                for name, item in value.items()
            )
        case list():
            found = (_find_surrogate(item, f"{path}[{index}]") for index, item in enumerate(value))
        case _:
            return None
    return next((one for one in found if one), None)


def _joined(path: str | None, name: str) -> str:
    return f"{path}.{name}" if path else name
