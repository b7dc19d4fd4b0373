"""What a webhook is told, how it is signed, and when it is tried again. Pure."""

import base64
import hashlib
import hmac
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from kit.errors import invalid
from kit.money import format_usd
from services.conversation import limits
from services.conversation.domain.fold import RunState

FINISHED, FAILED, PING = "run.finished", "run.failed", "ping"
EVENTS = (FINISHED, FAILED)
SECRET_PREFIX = "whsec_"


def check_events(events: Sequence[str]) -> list[str]:
    """The events a webhook wants, each once. Raises INVALID_OPTIONS."""
    wanted = [event for event in EVENTS if event in events]
    if not wanted or set(events) - set(EVENTS):
        raise invalid("events", f"events must name at least one of {', '.join(EVENTS)}, and nothing else.")
    return wanted


def type_of(status: str) -> str:
    """The event that a run's end is. `status`: succeeded, cancelled or failed."""
    return FAILED if status == "failed" else FINISHED


def envelope(type: str, data: dict[str, Any], at: datetime) -> str:
    """A payload."""
    stamp = at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return json.dumps({"type": type, "timestamp": stamp, "data": data}, ensure_ascii=False, separators=(",", ":"))


def run_data(
    *, run: str, thread: str, message: str, user: str, model: str, status: str, state: RunState
) -> dict[str, Any]:
    """How a run ended, without a word of what was said: that is read over the API, by whom it belongs to."""
    usage, error = state.usage, state.error
    return {
        "run_id": run,
        "conversation_id": thread,
        "message_id": None if state.failed_before_reply else f"msg_{message}",
        "user_id": user,
        "status": status,
        "finish_reason": state.finish_reason or None,
        "model": state.model or model,
        "usage": {
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "thinking_tokens": usage.thinking_tokens,
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
            "estimated": usage.estimated,
        },
        "cost_usd": format_usd(usage.cost.nano_usd),
        "error": None if error is None else {"code": error.code, "message": error.message},
    }


def new_secret(raw: bytes) -> str:
    """A signing secret as receivers are given it."""
    return SECRET_PREFIX + base64.b64encode(raw).decode()


def sign(secret: str, id: str, seconds: int, body: bytes) -> dict[str, str]:
    """The headers of a try (Standard Webhooks): who may have sent it, when, and that nothing was changed."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    digest = hmac.new(key, b"%s.%d.%s" % (id.encode(), seconds, body), hashlib.sha256).digest()
    return {
        "webhook-id": id,
        "webhook-timestamp": str(seconds),
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }


def pause_after(failures: int, pauses: Sequence[float], asked: float | None = None) -> float | None:
    """Seconds until the next try after so many that failed; None to give up. `asked`: the receiver's Retry-After."""
    if failures > len(pauses):
        return None
    return max(pauses[failures - 1], min(asked or 0.0, limits.WEBHOOK_RETRY_AFTER_MAX))


def retry_after(header: str | None, now: datetime) -> float | None:
    """Seconds that a Retry-After asks for, as a number or a date; None when it asks for nothing we understand."""
    if not header:
        return None
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        at = parsedate_to_datetime(header)
        return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds())
    except (ValueError, OverflowError):
        return None
