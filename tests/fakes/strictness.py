"""Refuses what a strict provider refuses, so that a poisoned history shows in the test that made it.

Only the shape of the request is judged here; what is answered is not known to this module.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from typing import Any

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
PARTS = frozenset({"text", "image_url", "input_audio", "file", "refusal"})
# The bytes each accepted image type begins with, as a pattern.
IMAGE_STARTS = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class RefusedRequest(ValueError):
    """A request the provider answers with 400. `param` names the offending place."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def read_request(raw: bytes) -> dict[str, Any]:
    """Decode and check the body of a completion request."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise RefusedRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedRequest("the body is not a JSON object")
    # A lone half can only come from an escape, as UTF-8 itself refuses it; most bodies have none.
    if _SURROGATE_ESCAPE.search(raw) and any(_SURROGATE.search(text) for text in _strings(body)):
        raise RefusedRequest("the body holds half a surrogate pair")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise RefusedRequest("a model is required", "model")
    check_messages(body.get("messages"))
    return body


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def check_messages(messages: Any) -> None:
    """Each message by itself, then that calls and results stand together."""
    if not isinstance(messages, list) or not messages:
        raise RefusedRequest("at least one message is required", "messages")
    unanswered: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages.[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise RefusedRequest(f"unknown role {role!r}", f"{where}.role")
        if role == "tool":
            _take_result(message, unanswered, where)
        elif unanswered:
            raise RefusedRequest(f"tool calls without a result: {', '.join(sorted(unanswered))}", where)
        _check_content(message, where)
        if role == "assistant":
            unanswered = _check_tool_calls(message, where)
    if unanswered:
        raise RefusedRequest(f"tool calls without a result: {', '.join(sorted(unanswered))}", "messages")


def _take_result(message: dict[str, Any], unanswered: set[str], where: str) -> None:
    call_id = message.get("tool_call_id")
    if call_id not in unanswered:
        raise RefusedRequest(f"tool result {call_id!r} answers no call right before it", f"{where}.tool_call_id")
    unanswered.discard(call_id)


def _check_content(message: dict[str, Any], where: str) -> None:
    role, content, where = message["role"], message.get("content"), f"{where}.content"
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, role, f"{where}.[{index}]")
    elif content is not None and not isinstance(content, str):
        raise RefusedRequest("content must be text or parts", where)
    if role == "assistant":
        if not content and not message.get("tool_calls"):
            raise RefusedRequest("an assistant message must not be empty", where)
    elif content is None:
        raise RefusedRequest(f"a {role} message must have content", where)


def _check_part(part: Any, role: str, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in PARTS:
        raise RefusedRequest(f"unknown part type {kind!r}", f"{where}.type")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str) or (role == "assistant" and not text):
            raise RefusedRequest("a text part must hold text", f"{where}.text")
    if kind == "image_url":
        if role != "user":
            raise RefusedRequest(f"a {role} message must not hold an image", where)
        _check_image(part.get("image_url"), f"{where}.image_url")


def _check_image(image: Any, where: str) -> None:
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str) or not url.startswith(("data:", "https://", "http://")):
        raise RefusedRequest("an image needs a data: or http(s): url", where)
    if not url.startswith("data:"):
        return
    label, _, payload = url.removeprefix("data:").partition(";base64,")
    starts = IMAGE_STARTS.get(label)
    if starts is None:
        raise RefusedRequest(f"unsupported image type {label[:40]!r}", where)
    try:
        data = base64.b64decode(payload, validate=True)
    except binascii.Error:
        raise RefusedRequest("the image is not base64", where) from None
    if not starts.match(data):
        raise RefusedRequest(f"the image's bytes are not {label}", where)


def _check_tool_calls(message: dict[str, Any], where: str) -> set[str]:
    """The ids of the calls that now wait for a result."""
    calls, where = message.get("tool_calls"), f"{where}.tool_calls"
    if calls is None:
        return set()
    if not isinstance(calls, list) or not calls:
        raise RefusedRequest("tool_calls must be a list with at least one call", where)
    ids = [_check_tool_call(call, f"{where}.[{index}]") for index, call in enumerate(calls)]
    if len(set(ids)) < len(ids):
        raise RefusedRequest("two tool calls have the same id", where)
    return set(ids)


def _check_tool_call(call: Any, where: str) -> str:
    call_id = call.get("id") if isinstance(call, dict) else None
    if not isinstance(call_id, str) or not call_id:
        raise RefusedRequest("a tool call needs an id", f"{where}.id")
    function = call.get("function")
    if call.get("type") != "function" or not isinstance(function, dict):
        raise RefusedRequest("a tool call must be of type function", f"{where}.type")
    if not _NAME.fullmatch(str(function.get("name") or "")):
        raise RefusedRequest(f"bad tool name {function.get('name')!r}", f"{where}.function.name")
    if not _is_json_object(function.get("arguments")):
        raise RefusedRequest("a tool call's arguments must be a JSON object", f"{where}.function.arguments")
    return call_id


def _is_json_object(text: Any) -> bool:
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except ValueError:
        return False
