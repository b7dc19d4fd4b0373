"""The demo model `make run` starts when no provider is configured: OpenAI-compatible, friendly, not intelligent.

It lets a newcomer see a streamed answer, and kill something while it streams, without a key or a network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from aiohttp import web

from deploy.local.demo_wording import Answer, compose_answer

MODEL = "threadloom-demo"
MODEL_CREATED = 1_767_225_600  # 2026-01-01, in Unix seconds; clients want some time here
WORD_SECONDS = 0.03  # a hundred words take three seconds: time enough to kill a process
CHARACTERS_PER_TOKEN = 4  # the usual estimate, as there is no tokeniser
REQUEST_BYTES = 64 * 1024 * 1024  # long threads with images come whole
SHUTDOWN_SECONDS = 2.0

WORD_PACE = web.AppKey("word_pace", float)
CHANCE = web.AppKey("chance", Random)


class BadRequest(ValueError):
    """A request the model cannot read. The text is for the client."""


@dataclass(frozen=True)
class Order:
    """What a request asks for."""

    model: str
    user_text: str
    user_messages: int
    prompt_tokens: int
    max_words: int | None
    streams: bool
    shows_usage: bool


@dataclass(frozen=True)
class Served:
    """An answer cut to what was ordered, with its figures."""

    id: str
    created: int
    answer: Answer
    finish: str

    @property
    def tokens(self) -> int:
        return len(self.answer.words) + len(self.answer.thoughts)


def create_app(word_seconds: float = WORD_SECONDS, chance: Random | None = None) -> web.Application:
    """The server, without a port. A test passes no pause and a seeded `chance`."""
    app = web.Application(middlewares=[_errors_as_openai], client_max_size=REQUEST_BYTES)
    app[WORD_PACE] = word_seconds
    app[CHANCE] = chance or Random()
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/chat/completions", _complete)
    return app


async def _models(_: web.Request) -> web.Response:
    model = {"id": MODEL, "object": "model", "created": MODEL_CREATED, "owned_by": "threadloom"}
    return web.json_response({"object": "list", "data": [model]})


async def _complete(request: web.Request) -> web.StreamResponse:
    order = read_order(await request.read())
    served = _serve(order, request.app[CHANCE])
    pace = request.app[WORD_PACE]
    if order.streams:
        return await _stream(request, order, served, pace)
    await asyncio.sleep(pace * served.tokens)
    return web.json_response(_body(order, served))


def read_order(raw: bytes) -> Order:
    """Read a request's body; BadRequest says what is wrong with it."""
    try:
        body = json.loads(raw)
    except ValueError:
        raise BadRequest("The body is not JSON.") from None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("'messages' must be a list with at least one message.")
    texts = [_text_of(message.get("content")) for message in messages if message.get("role") == "user"]
    characters = sum(len(_text_of(message.get("content"))) for message in messages)
    return Order(
        model=str(body.get("model") or MODEL),
        user_text=texts[-1] if texts else "",
        user_messages=len(texts),
        prompt_tokens=characters // CHARACTERS_PER_TOKEN + 1,
        max_words=_max_words(body),
        streams=bool(body.get("stream")),
        shows_usage=_shows_usage(body.get("stream_options")),
    )


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _shows_usage(stream_options: Any) -> bool:
    return isinstance(stream_options, dict) and bool(stream_options.get("include_usage"))


def _max_words(body: dict[str, Any]) -> int | None:
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise BadRequest("'max_completion_tokens' must be a positive integer.")
    return limit


def _serve(order: Order, chance: Random) -> Served:
    """A word is counted as one token, thoughts first, so a limit is kept exactly."""
    answer = compose_answer(order.user_text, order.user_messages, chance)
    served = Served(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), answer, "stop")
    if order.max_words is None or served.tokens <= order.max_words:
        return served
    thoughts = answer.thoughts[: order.max_words]
    words = answer.words[: order.max_words - len(thoughts)]
    return Served(served.id, served.created, Answer(thoughts, words), "length")


async def _stream(request: web.Request, order: Order, served: Served, pace: float) -> web.StreamResponse:
    """Word by word. A client that leaves cancels this handler."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)

    async def send(delta: dict[str, Any], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        await response.write(_event(_chunk(order, served) | {"choices": [choice]}))

    await send({"role": "assistant", "content": ""})
    for kind, words in (("reasoning_content", served.answer.thoughts), ("content", served.answer.words)):
        for word in words:
            await send({kind: word})
            await asyncio.sleep(pace)
    await send({}, served.finish)
    if order.shows_usage:
        await response.write(_event(_chunk(order, served) | {"choices": [], "usage": _usage(order, served)}))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _chunk(order: Order, served: Served) -> dict[str, Any]:
    return {"id": served.id, "object": "chat.completion.chunk", "created": served.created, "model": order.model}


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _body(order: Order, served: Served) -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(served.answer.words), "refusal": None}
    if served.answer.thoughts:
        message["reasoning_content"] = "".join(served.answer.thoughts)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": served.finish}
    kind = {"object": "chat.completion", "choices": [choice], "usage": _usage(order, served)}
    return _chunk(order, served) | kind


def _usage(order: Order, served: Served) -> dict[str, Any]:
    return {
        "prompt_tokens": order.prompt_tokens,
        "completion_tokens": served.tokens,
        "total_tokens": order.prompt_tokens + served.tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": len(served.answer.thoughts)},
    }


@web.middleware
async def _errors_as_openai(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(400, str(error))
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=status)


def main() -> None:
    parser = argparse.ArgumentParser(description="A small OpenAI-compatible demo model.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    arguments = parser.parse_args()
    web.run_app(
        create_app(),
        print=partial(print, flush=True),  # also into a pipe: whoever started us waits for the line
        host=arguments.host,
        port=arguments.port,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        access_log=None,
        # The port may be in the closing state of the run before.
        reuse_address=True,
    )


if __name__ == "__main__":
    main()
