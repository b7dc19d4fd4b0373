"""Page tokens: opaque to callers, a place in an order to us."""

import base64
import binascii
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

from kit.errors import ServiceError, invalid
from kit.ids import parse_id

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def encode(*parts: object) -> str:
    """A token of these parts."""
    return base64.urlsafe_b64encode("/".join(map(str, parts)).encode()).decode().rstrip("=")


def decode(token: str, count: int) -> list[str]:
    """The token's parts; raises INVALID_OPTIONS when it is not one of ours."""
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise _bad() from None
    parts = text.split("/")
    if len(parts) != count:
        raise _bad()
    return parts


def encode_time(at: datetime, id: UUID) -> str:
    """A place in an order by time, then id."""
    return encode((at - EPOCH) // (EPOCH.resolution), id)


def decode_time(token: str) -> tuple[datetime, UUID] | None:
    """The place, or None for the first page."""
    if not token:
        return None
    micros, text = decode(token, 2)
    id = parse_id(text)
    if id is None:
        raise _bad()
    try:
        return EPOCH + number(micros) * EPOCH.resolution, id
    except OverflowError:
        raise _bad() from None


def decode_numbers(token: str, count: int) -> list[int]:
    """Numbers of a place; zeros for the first page."""
    return [number(part) for part in decode(token, count)] if token else [0] * count


def fitting(sizes: Sequence[int], most: int, max_bytes: int) -> int:
    """How many of these entries make a page: at most `most`, about `max_bytes`, and at least one."""
    total = 0
    for count, size in enumerate(sizes[:most]):
        total += size
        if count and total > max_bytes:
            return count
    return min(len(sizes), most)


def number(text: str) -> int:
    """A number that fits Postgres's bigint, not negative."""
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise _bad()
    return int(text)


def _bad() -> ServiceError:
    return invalid("page_token", "This page token is not one we gave out.")
