"""The demo model over real HTTP."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from deploy.local.demo_model import create_app
from deploy.local.demo_wording import compose_answer

URL = "/v1/chat/completions"
Demo = TestClient[Any, Any]


@pytest.fixture
async def demo() -> AsyncIterator[Demo]:
    async with TestClient(TestServer(create_app(word_seconds=0, chance=Random(7)))) as client:
        yield client


def a_request(*texts: str, **options: Any) -> dict[str, Any]:
    return {"model": "threadloom-demo", "messages": [{"role": "user", "content": text} for text in texts]} | options


async def streamed(demo: Demo, request: dict[str, Any]) -> list[dict[str, Any]]:
    async with demo.post(URL, json=request | {"stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def deltas(events: list[dict[str, Any]], field: str) -> list[str]:
    found = (choice["delta"].get(field) for event in events for choice in event["choices"])
    return [text for text in found if text]


async def test_model_is_listed(demo: Demo) -> None:
    async with demo.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["threadloom-demo"]


async def test_stream_comes_word_by_word_with_usage_at_its_end(demo: Demo) -> None:
    events = await streamed(demo, a_request("Hello there", stream_options={"include_usage": True}))
    words = deltas(events, "content")
    assert all(len(word.split()) == 1 for word in words)
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == len(words)
    assert deltas(events, "reasoning_content") == []


async def test_answer_without_stream_quotes_and_counts(demo: Demo) -> None:
    async with demo.post(URL, json=a_request("one", "two", "my third")) as response:
        answer = await response.json()
    text = answer["choices"][0]["message"]["content"]
    assert '"my third"' in text
    assert " 3 " in text
    assert answer["usage"]["total_tokens"] > 60


async def test_reasoning_comes_only_when_asked_to_think(demo: Demo) -> None:
    events = await streamed(demo, a_request("Think about it"))
    assert len(deltas(events, "reasoning_content")) > 10


async def test_limit_of_tokens_is_kept(demo: Demo) -> None:
    events = await streamed(demo, a_request("Hello", max_completion_tokens=5))
    assert len(deltas(events, "content")) == 5
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": []}', b'{"messages": ["x"]}'])
async def test_bad_request_is_an_openai_error(demo: Demo, body: bytes) -> None:
    async with demo.post(URL, data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_unknown_route_is_an_openai_error(demo: Demo) -> None:
    async with demo.get("/v1/nothing") as response:
        assert (response.status, "message" in (await response.json())["error"]) == (404, True)


def test_every_wording_shows_the_product_off_in_some_seconds_of_words() -> None:
    answers = [compose_answer("a word " * 40, 2, Random(seed)) for seed in range(200)]
    texts = {"".join(answer.words) for answer in answers}
    assert len(texts) > 100
    for text in texts:
        assert 60 <= len(text.split()) <= 150
        assert all(fact in text for fact in ("no intelligence", "kill", "reconnect", "OPENAI_API_KEY", " …"))


def test_process_serves_and_ends_in_order_on_sigterm() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "deploy.local.demo_model", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert str(port) in process.stdout.readline()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
        finally:
            process.kill()
