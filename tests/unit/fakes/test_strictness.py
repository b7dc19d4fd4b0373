"""What the fake provider refuses, on real HTTP for one case and by the pure check for the rest."""

from __future__ import annotations

import base64
import json
from typing import Any

import aiohttp
import pytest

from tests.fakes.provider import FakeProvider
from tests.fakes.strictness import RefusedRequest, read_request

PNG = b"\x89PNG\r\n\x1a\n rest"
USER = {"role": "user", "content": "hi"}


def a_call(call_id: str = "a", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(call_id: str = "a") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "42"}


def image(mime: str, data: bytes) -> dict[str, Any]:
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def raw(*messages: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([USER], id="one message"),
        pytest.param([USER, calling(a_call("a"), a_call("b")), result("b"), result("a"), USER], id="parallel calls"),
        pytest.param([image("image/png", PNG)], id="png"),
        pytest.param([image("image/webp", b"RIFF\n\0\0\0WEBPVP8 ")], id="webp"),
        pytest.param([{"role": "user", "content": "a \U0001f600"}], id="a whole surrogate pair"),
    ],
)
def test_sound_request_is_read(messages: list[Any]) -> None:
    assert read_request(raw(*messages))["messages"] == messages


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        pytest.param([], "at least one", id="no messages"),
        pytest.param([{"role": "robot", "content": "hi"}], "unknown role", id="role"),
        pytest.param([USER, {"role": "assistant", "content": ""}], "must not be empty", id="empty assistant"),
        pytest.param([USER, {"role": "assistant", "content": []}], "must not be empty", id="no parts"),
        pytest.param([{"role": "user", "content": None}], "must have content", id="user without content"),
        pytest.param([USER, result()], "answers no call", id="orphan result"),
        pytest.param([USER, calling(a_call()), result(), result()], "answers no call", id="second result"),
        pytest.param([USER, calling(a_call()), USER], "without a result", id="call without result"),
        pytest.param([USER, calling(a_call("a"), a_call("b")), result("a")], "without a result: b", id="one missing"),
        pytest.param([USER, calling(a_call(arguments="[1]")), result()], "JSON object", id="arguments are a list"),
        pytest.param([USER, calling(a_call(arguments='{"a":')), result()], "JSON object", id="broken arguments"),
        pytest.param([USER, calling(a_call(), a_call()), result()], "same id", id="same id twice"),
        pytest.param([USER, calling()], "must not be empty|at least one call", id="no calls"),
        pytest.param([image("image/tiff", PNG)], "unsupported image", id="image type"),
        pytest.param([image("image/jpeg", PNG)], "are not image/jpeg", id="lying image"),
        pytest.param([{"role": "user", "content": "half \ud83d"}], "surrogate", id="half a character"),
        pytest.param([{"role": "user", "content": [{"type": "video"}]}], "unknown part", id="part"),
    ],
)
def test_unsound_request_is_refused(messages: list[Any], complaint: str) -> None:
    with pytest.raises(RefusedRequest, match=complaint):
        read_request(raw(*messages))


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"messages": []}'])
def test_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedRequest):
        read_request(body)


async def test_refusals_have_the_shape_of_openai_errors_and_are_recorded() -> None:
    with FakeProvider() as provider:
        async with aiohttp.ClientSession() as session:
            url = f"{provider.base_url}/chat/completions"
            async with session.post(url, data=raw(USER, result())) as response:
                assert response.status == 400
                error = (await response.json())["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", "messages.[1].tool_call_id")
            async with session.post(url, data=raw(USER), headers={"Authorization": "Bearer bad"}) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        assert [call.outcome for call in provider.calls] == ["refused", "refused"]
