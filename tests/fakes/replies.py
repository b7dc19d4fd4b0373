"""What an answer says, and its bytes as server-sent events or as one JSON body. Pure: no clock, no socket."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

from tests.fakes.counting import count_tokens, longest_within, prompt_tokens
from tests.fakes.script import Script

_SURROGATE = re.compile("[\ud800-\udfff]")
GARBAGE = '{"id":"broken","choices":[{"index":0,"delta":{"content":"'


@dataclass(frozen=True)
class Turn:
    """What of a request's messages decides the answer."""

    user_text: str
    rounds_answered: int  # groups of tool results since the last user message
    prompt_tokens: int


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    pieces: tuple[str, ...]  # the arguments, as they are streamed


@dataclass(frozen=True)
class Reply:
    """An answer without a wire format."""

    id: str
    model: str
    created: int  # Unix seconds
    reasoning: tuple[str, ...]
    text: tuple[str, ...]
    tool_calls: tuple[ToolCall, ...]
    finish: str
    usage: dict[str, Any]
    shows_usage: bool


@dataclass(frozen=True)
class Events:
    """A streamed answer's bytes: `deltas[i]` carries the text `texts[i]`; `ending` closes the stream."""

    deltas: list[bytes]
    texts: list[str]
    ending: bytes


def read_turn(messages: list[dict[str, Any]]) -> Turn:
    user_text, rounds, texts, before = "", 0, [], ""
    for message in messages:
        role, text = message["role"], _text_of(message.get("content"))
        texts.append(text)
        if role == "user":
            user_text, rounds = text, 0
        elif role == "tool" and before != "tool":
            rounds += 1
        before = role
    return Turn(user_text, rounds, prompt_tokens(texts))


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def compose(script: Script, body: dict[str, Any], turn: Turn, number: int, created: int) -> Reply:
    """The answer to the call with this number. Unless the script fixes the text, the number is in every word,
    so that text of a superseded call can be told from that of its successor."""
    asks_tools = script.tools > 0 and turn.rounds_answered < script.rounds
    reasoning = () if script.empty else _words(f"c{number}r", script.reasoning, script.size)
    text = () if script.empty else _text(script, turn, number, asks_tools)
    calls = _tool_calls(script, body, number) if asks_tools else ()
    finish = script.finish or ("tool_calls" if calls else "stop")
    limit = body.get("max_completion_tokens")
    if limit is not None and not script.unlimited:
        thought = longest_within(reasoning, limit)
        said = longest_within(text, limit - count_tokens("".join(thought)))
        if (thought, said) != (reasoning, text):
            reasoning, text, calls, finish = thought, said, (), "length"
    return Reply(
        id=f"chatcmpl-fake-{number}",
        model=body["model"],
        created=created,
        reasoning=reasoning,
        text=text,
        tool_calls=calls,
        finish=finish,
        usage=_usage(script, turn, reasoning, text, calls),
        shows_usage=_shows_usage(script, body),
    )


def _text(script: Script, turn: Turn, number: int, asks_tools: bool) -> tuple[str, ...]:
    if asks_tools:
        deltas = _words(f"c{number}w", script.preamble, script.size)
    elif script.echo:
        deltas = _cut(turn.user_text, script.chunks)
    elif script.text is not None:
        deltas = _cut(script.text, script.chunks)
    else:
        deltas = _words(f"c{number}w", script.chunks, script.size)
    if script.surrogates:
        deltas = (*deltas[:1], "\ud83d", "\ude00", "\ud800", *deltas[1:])
    return deltas


def _words(stem: str, how_many: int, size: int) -> tuple[str, ...]:
    return tuple(f"{stem}{index} ".ljust(size, ".") for index in range(how_many))


def _cut(text: str, parts: int) -> tuple[str, ...]:
    length = math.ceil(len(text) / max(parts, 1)) or 1
    return tuple(text[at : at + length] for at in range(0, len(text), length))


def _tool_calls(script: Script, body: dict[str, Any], number: int) -> tuple[ToolCall, ...]:
    offered = [tool["function"]["name"] for tool in body.get("tools") or () if "function" in tool]
    names = [name for name in script.tool.split("|") if name] or offered or ["fake_tool"]
    return tuple(
        ToolCall(f"call_{number}_{index}", names[index % len(names)], _cut(script.args, script.pieces))
        for index in range(script.tools)
    )


def _shows_usage(script: Script, body: dict[str, Any]) -> bool:
    if script.usage != "auto":
        return script.usage == "always"
    return not body.get("stream") or bool((body.get("stream_options") or {}).get("include_usage"))


def _usage(
    script: Script, turn: Turn, reasoning: tuple[str, ...], text: tuple[str, ...], calls: tuple[ToolCall, ...]
) -> dict[str, Any]:
    """Counts only what the script does not fix: a text of megabytes takes a while."""
    reasoned = count_tokens("".join(reasoning))
    prompt = script.prompt_tokens if script.prompt_tokens >= 0 else turn.prompt_tokens
    completion = script.completion_tokens
    if completion < 0:
        arguments = sum(count_tokens(call.name + "".join(call.pieces)) for call in calls)
        completion = reasoned + count_tokens("".join(text)) + arguments
    thought = script.reasoning_tokens if script.reasoning_tokens >= 0 else reasoned
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": script.cached_tokens,
            "cache_write_tokens": script.cache_write_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def to_json(value: Any) -> bytes:
    """UTF-8 as it is, so that splitting the bytes splits characters; escapes only where UTF-8 cannot say it."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _quoted(text: str) -> str:
    if text.isascii() or not _SURROGATE.search(text):
        return encode_basestring(text)
    return encode_basestring_ascii(text)


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": kind}}


def reply_body(reply: Reply) -> dict[str, Any]:
    """The answer of a request without `stream`."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(reply.text) or None, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = "".join(reply.reasoning)
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(call.pieces)}}
            for call in reply.tool_calls
        ]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
    body = {"id": reply.id, "object": "chat.completion", "created": reply.created, "model": reply.model}
    return body | {"choices": [choice]} | ({"usage": reply.usage} if reply.shows_usage else {})


class EventWriter:
    """Puts data into events of one stream. Built once a call, as its strings are the bulk of each event."""

    def __init__(self, reply: Reply, script: Script) -> None:
        identity = {"id": reply.id, "object": "chat.completion.chunk", "created": reply.created, "model": reply.model}
        self._identity = to_json(identity).decode()[:-1]
        self._no_usage = ',"usage":null' if reply.shows_usage else ""
        self._end = "\r\n\r\n" if script.crlf else "\n\n"
        self._before = f": still here{self._end}data: " if script.comments else "data: "

    def event(self, data: str) -> bytes:
        return f"{self._before}{data}{self._end}".encode()

    def choice(self, delta: str, finish: str = "null") -> bytes:
        """An event whose one choice carries `delta`, given as JSON."""
        choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}'
        return self.event(f'{self._identity},"choices":[{choice}]{self._no_usage}}}')

    def usage(self, figures: dict[str, Any]) -> bytes:
        return self.event(f'{self._identity},"choices":[],"usage":{to_json(figures).decode()}}}')


def render_events(reply: Reply, script: Script) -> Events:
    """All of a streamed answer. The role rides with the first delta, as it is none itself."""
    writer = EventWriter(reply, script)
    deltas = [writer.choice(f'{{"reasoning_content":{_quoted(piece)}}}') for piece in reply.reasoning]
    deltas += [writer.choice(f'{{"content":{_quoted(piece)}}}') for piece in reply.text]
    for index, call in enumerate(reply.tool_calls):
        deltas += _tool_call_events(writer, index, call)
    if script.usage == "first" and deltas:
        deltas[0] += writer.usage(reply.usage | {"completion_tokens": 1})
    texts = [""] * len(reply.reasoning) + list(reply.text)
    texts += [""] * (len(deltas) - len(texts))
    role = writer.choice('{"role":"assistant","content":""}')
    ending = writer.choice("{}", _quoted(reply.finish))
    if reply.shows_usage:
        ending += writer.usage(reply.usage)
    ending += writer.event("[DONE]")
    if deltas:
        deltas[0] = role + deltas[0]
    else:
        ending = role + ending
    if script.garbage_at is not None and script.garbage_at < len(deltas):
        deltas[script.garbage_at] = writer.event(GARBAGE) + deltas[script.garbage_at]
    return Events(deltas, texts, ending)


def _tool_call_events(writer: EventWriter, index: int, call: ToolCall) -> list[bytes]:
    opening = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
    pieces = [{"index": index, "function": {"arguments": piece}} for piece in call.pieces]
    return [writer.choice(to_json({"tool_calls": [fragment]}).decode()) for fragment in [opening, *pieces]]


def error_event(message: str, script: Script) -> bytes:
    end = b"\r\n\r\n" if script.crlf else b"\n\n"
    return b"data: " + to_json(error_body(message, "server_error")) + end
