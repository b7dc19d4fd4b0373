"""The fake provider over real HTTP: each group of script keys, and what it remembers of a call."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.fakes.provider import FakeProvider
from tests.fakes.script import BadScript


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    with FakeProvider() as started:
        yield started


@dataclass
class Client:
    """Asks the provider under test."""

    session: aiohttp.ClientSession
    provider: FakeProvider

    def post(self, user_text: str, *, stream: bool = True, key: str = "any", **body: Any) -> Any:
        """The request's context manager; `body` overrides what a plain request holds."""
        request = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": user_text}]} | body
        headers = {"Authorization": f"Bearer {key}", "X-Client-Request-Id": "req-7"}
        return self.session.post(f"{self.provider.base_url}/chat/completions", json=request, headers=headers)

    async def stream(self, user_text: str, **body: Any) -> str:
        """The whole body of a streamed answer."""
        async with self.post(user_text, **body) as response:
            assert response.status == 200
            return str(await response.text())

    async def refusal(self, user_text: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error object."""
        async with self.post(user_text, **body) as response:
            return response.status, (await response.json())["error"]


@pytest.fixture
async def client(provider: FakeProvider) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        yield Client(session, provider)


def events(body: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def choices(body: str) -> list[dict[str, Any]]:
    return [choice for event in events(body) for choice in event["choices"]]


def text_of(body: str, field: str = "content") -> str:
    return "".join(choice["delta"].get(field) or "" for choice in choices(body))


# A plain answer.
async def test_text_names_the_call_and_so_differs_every_time(client: Client) -> None:
    texts = [text_of(await client.stream("hello [fake chunks=2]")) for _ in range(2)]
    assert texts == ["c1w0 c1w1 ", "c2w0 c2w1 "]


async def test_stream_opens_with_role_and_closes_with_finish_and_done(client: Client) -> None:
    body = await client.stream("hello")
    assert choices(body)[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices(body)[-1]["finish_reason"] == "stop"
    assert body.endswith("data: [DONE]\n\n")


async def test_answer_without_stream_is_one_body(client: Client) -> None:
    async with client.post("hi [fake chunks=3 reasoning=1 finish=length]", stream=False) as response:
        answer = await response.json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "c1w0 c1w1 c1w2 "
    assert answer["choices"][0]["message"]["reasoning_content"] == "c1r0 "
    assert answer["usage"]["total_tokens"] > 4


async def test_scripts_of_message_model_and_provider_are_laid_over_each_other(client: Client) -> None:
    client.provider.script(text="one two", chunks=1, reasoning=2)
    body = await client.stream('[fake text="a] b" delay=0.5]', model="fake:chunks=3,text=unseen")
    assert text_of(body) == "a] b"
    assert len([choice for choice in choices(body) if choice["delta"].get("content")]) == 2
    assert text_of(body, "reasoning_content") == "c1r0 c1r1 "


async def test_echo_says_what_the_user_said(client: Client) -> None:
    assert text_of(await client.stream("héllo 🌍 [fake echo=1]")) == "héllo 🌍 [fake echo=1]"


async def test_delta_of_a_megabyte_arrives_whole(client: Client) -> None:
    assert len(text_of(await client.stream("[fake chunks=2 size=1000000]"))) == 2_000_000


async def test_empty_answer_has_a_finish_and_no_text(client: Client) -> None:
    body = await client.stream("[fake empty=1]")
    assert [choice["finish_reason"] for choice in choices(body)] == [None, "stop"]
    assert client.provider.calls[0].deltas_sent == 0


async def test_unknown_key_is_refused(client: Client) -> None:
    status, error = await client.refusal("[fake chunk=2]")
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "'chunk'" in error["message"]
    with pytest.raises(BadScript):
        client.provider.script(chunk=2)


# Figures.
@pytest.mark.parametrize(
    ("usage", "asked", "shown"),
    [("auto", True, True), ("auto", False, False), ("always", False, True), ("never", True, False)],
)
async def test_usage_is_shown_as_asked(client: Client, usage: str, asked: bool, shown: bool) -> None:
    body = await client.stream(f"[fake usage={usage}]", stream_options={"include_usage": asked})
    assert any(event.get("usage") for event in events(body)) is shown


async def test_usage_figures_are_the_scripted_ones(client: Client) -> None:
    body = await client.stream(
        "[fake usage=always prompt_tokens=9 completion_tokens=8 cached_tokens=7 cache_write_tokens=1"
        " reasoning_tokens=6]"
    )
    assert events(body)[-1]["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 8,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 6},
    }


# Tool calls.
async def test_tools_are_called_before_their_results_and_text_follows_after(client: Client) -> None:
    ask = {"role": "user", "content": '[fake tools=2 tool=a|b args={"q":"x y"} pieces=2 preamble=1]'}
    body = await client.stream("", messages=[ask])
    assert choices(body)[-1]["finish_reason"] == "tool_calls"
    assert text_of(body) == "c1w0 "
    fragments = [fragment for choice in choices(body) for fragment in choice["delta"].get("tool_calls", [])]
    arguments = "".join(part["function"]["arguments"] for part in fragments if part["index"] == 1)
    assert json.loads(arguments) == {"q": "x y"}
    calls = [
        {"id": part["id"], "type": "function", "function": {"name": part["function"]["name"], "arguments": arguments}}
        for part in fragments
        if "id" in part
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    answered = [ask, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    assert text_of(await client.stream("", messages=answered)) == "c2w0 c2w1 c2w2 c2w3 c2w4 "


# Pace and gates.
async def test_paced_deltas_keep_an_absolute_schedule(client: Client) -> None:
    await client.stream("[fake chunks=11 delay=10 first=30]")
    call = client.provider.calls[0]
    assert call.answered
    assert call.first_delta
    assert call.ended
    assert call.first_delta - call.answered >= 0.029
    # Counted from the answer, as a busy machine may delay the first delta but not the schedule.
    assert 0.129 <= call.ended - call.answered < 2


async def test_gate_holds_before_the_first_delta_until_it_is_opened(client: Client) -> None:
    async with client.post("[fake gate=a]") as response:
        [call] = await client.provider.until(lambda calls: calls and calls[0].held == "a")
        assert call.deltas_sent == 0
        client.provider.open_gate("a")
        assert text_of(await response.text()) == call.text


async def test_gate_in_mid_answer_opens_over_http(client: Client) -> None:
    async with client.post("[fake gate=b gate_at=2 delay=1]") as response:
        [call] = await client.provider.until(lambda calls: calls and calls[0].held)
        assert call.text == "c1w0 c1w1 "
        root = client.provider.base_url.removesuffix("/v1")
        async with client.session.post(f"{root}/fake/gate/b") as opened:
            assert opened.status == 200
        assert text_of(await response.text()) == "c1w0 c1w1 c1w2 c1w3 c1w4 "


# Faults.
async def test_error_has_its_status_and_retry_after(client: Client) -> None:
    async with client.post("[fake error=429 retry_after=2]") as response:
        assert (response.status, response.headers["retry-after"]) == (429, "2")
        assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
    assert client.provider.calls[0].outcome == "refused"


async def test_only_so_many_calls_of_a_key_fail(client: Client) -> None:
    statuses = []
    for key in ("x", "x", "y"):
        async with client.post(f"[fake error=503 times=1 key={key}]") as response:
            statuses.append(response.status)
    assert statuses == [503, 200, 503]


async def exchange(provider: FakeProvider, user_text: str) -> tuple[bytes, bool, list[bytes]]:
    """What comes over a bare socket: all bytes, whether a reset ended them, and the bytes of each read."""
    reader, writer = await asyncio.open_connection(provider.host, provider.port)
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": user_text}]}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body))
    writer.write(body)
    reads, was_reset = [], False
    try:
        while data := await asyncio.wait_for(reader.read(1 << 20), 5):
            reads.append(data)
    except ConnectionResetError:
        was_reset = True
    writer.close()
    return b"".join(reads), was_reset, reads


async def test_cut_resets_the_connection_after_its_deltas(client: Client) -> None:
    data, was_reset, _ = await exchange(client.provider, "[fake cut=3 chunks=9]")
    assert was_reset
    assert re.findall(rb"c1w\d", data) == [b"c1w0", b"c1w1", b"c1w2"]
    [call] = await client.provider.until(lambda calls: calls[0].ended)
    assert (call.outcome, call.deltas_sent, call.text) == ("cut", 3, "c1w0 c1w1 c1w2 ")


async def test_close_ends_the_body_in_order_without_a_finish(client: Client) -> None:
    data, was_reset, _ = await exchange(client.provider, "[fake close=2]")
    assert not was_reset
    assert data.endswith(b"\r\n0\r\n\r\n")
    assert b"c1w1" in data
    assert b"c1w2" not in data
    assert b'"finish_reason":"' not in data
    assert client.provider.calls[0].outcome == "cut"


@pytest.mark.parametrize(("place", "status"), [(-1, None), (2, 200)])
async def test_hang_is_silent_until_the_client_closes(client: Client, place: int, status: int | None) -> None:
    asking = asyncio.create_task(client.stream(f"[fake hang={place}]"))
    await client.provider.until(lambda calls: calls and calls[0].deltas_sent == max(place, 0))
    asking.cancel()
    [call] = await client.provider.until(lambda calls: calls[0].ended, timeout=1)
    assert (call.outcome, call.status, call.client_closed is not None) == ("closed_by_client", status, True)


async def test_error_event_stands_in_for_its_delta(client: Client) -> None:
    body = await client.stream("[fake error_at=1]")
    assert "error" in events(body)[-1]
    assert "c1w0" in body
    assert "c1w1" not in body
    assert client.provider.calls[0].outcome == "cut"


async def test_garbage_is_not_json(client: Client) -> None:
    body = await client.stream("[fake garbage_at=1]")
    with pytest.raises(json.JSONDecodeError):
        events(body)
    assert "c1w4" in body


@pytest.mark.parametrize("fault", ["cut=1", "close=1"])
async def test_fault_breaks_an_answer_without_stream(client: Client, fault: str) -> None:
    with pytest.raises(aiohttp.ClientError):
        async with client.post(f"[fake {fault}]", stream=False) as response:
            await response.read()
    [call] = await client.provider.until(lambda calls: calls[0].ended)
    assert call.outcome == "cut"


async def test_client_that_leaves_between_deltas_is_noticed_at_once(client: Client) -> None:
    async with client.post("[fake chunks=2 delay=60000]") as response:
        await response.content.readany()
    [call] = await client.provider.until(lambda calls: calls[0].ended, timeout=1)
    assert (call.outcome, call.text, call.ended is not None) == ("closed_by_client", "c1w0 ", True)


async def test_provider_may_ignore_that_the_client_left(client: Client) -> None:
    async with client.post("[fake chunks=20 delay=5 ignore_close=1]") as response:
        await response.content.readany()
    [call] = await client.provider.until(lambda calls: calls[0].ended)
    assert (call.outcome, call.deltas_sent) == ("closed_by_client", 20)
    assert call.client_closed
    assert call.ended
    assert call.client_closed < call.ended


# Bytes.
async def test_split_tears_characters_apart(client: Client) -> None:
    text = "aé漢🌍"
    data, _, _ = await exchange(client.provider, f'[fake split=1 chunks=1 text="{text}"]')
    chunks = re.findall(rb"\r\n1\r\n(.)(?=\r\n)", b"\r\n" + data.partition(b"\r\n\r\n")[2], re.DOTALL)
    assert text_of(b"".join(chunks).decode()) == text


async def test_split_answer_is_the_same_to_a_client(client: Client) -> None:
    assert text_of(await client.stream("[fake split=7 text=漢字🌍é chunks=2]")) == "漢字🌍é"


async def test_crlf_and_comments_are_between_the_same_events(client: Client) -> None:
    async with client.post("[fake crlf=1 comments=1 chunks=2]") as response:
        raw = await response.read()
    assert raw.count(b"\r\n\r\n: still here\r\n\r\ndata: ") > 2
    assert re.search(rb"(?<!\r)\n", raw) is None
    assert text_of(raw.decode()) == "c1w0 c1w1 "


async def test_surrogates_are_escapes_halved_over_two_deltas(client: Client) -> None:
    body = await client.stream("[fake surrogates=1 chunks=2]")
    contents = [choice["delta"]["content"] for choice in choices(body) if choice["delta"].get("content")]
    assert contents == ["c1w0 ", "\ud83d", "\ude00", "\ud800", "c1w1 "]
    assert client.provider.calls[0].text == "c1w0 😀\ud800c1w1 "


async def test_answer_without_pauses_leaves_in_few_writes(client: Client) -> None:
    data, _, reads = await exchange(client.provider, "[fake chunks=2000]")
    assert data.count(b"data: ") == 2003
    assert len(reads) < 60


# What is remembered, and the rest of the server.
async def test_call_tells_who_asked_what_and_when(client: Client) -> None:
    await client.stream("hello", temperature=0.5)
    [call] = client.provider.calls
    assert (call.id, call.client_request_id, call.body["temperature"]) == (1, "req-7", 0.5)
    assert (call.outcome, call.status, call.deltas_sent) == ("finished", 200, 5)
    assert call.answered
    assert call.first_delta
    assert call.ended
    assert call.arrived <= call.answered <= call.first_delta <= call.ended


async def test_calls_are_served_as_json_and_forgotten_on_reset(client: Client) -> None:
    await client.stream("[fake surrogates=1]")
    root = client.provider.base_url.removesuffix("/v1")
    async with client.session.get(f"{root}/fake/calls") as response:
        [call] = await response.json()
    assert (call["outcome"], call["text"][:6], "_pieces" in call) == ("finished", "c1w0 😀", False)
    async with client.session.post(f"{root}/fake/reset") as response:
        assert response.status == 200
    assert client.provider.calls == []
    assert text_of(await client.stream("[fake chunks=1]")) == "c2w0 "


async def test_models_and_unknown_routes(client: Client) -> None:
    async with client.session.get(f"{client.provider.base_url}/models") as response:
        assert [model["object"] for model in (await response.json())["data"]] == ["model"]
    async with client.session.get(f"{client.provider.base_url}/nothing") as response:
        assert response.status == 404


async def test_waiting_in_vain_tells_what_the_calls_were(client: Client) -> None:
    await client.stream("hello")
    with pytest.raises(TimeoutError, match="#1 finished after 5"):
        client.provider.wait_for(lambda calls: len(calls) > 1, timeout=0.01)


async def test_fifty_answers_at_a_time_are_not_mixed_up(client: Client) -> None:
    bodies = await asyncio.gather(*(client.stream("[fake chunks=20 delay=1]") for _ in range(50)))
    assert len({text_of(body) for body in bodies}) == 50
    assert all(len(set(re.findall(r"c(\d+)w", body))) == 1 for body in bodies)


def test_port_can_be_chosen_and_is_below_those_of_outgoing_connections() -> None:
    with FakeProvider() as first:
        port = first.port
    assert port < 32_768
    with FakeProvider(port=port) as second:
        assert second.base_url == f"http://127.0.0.1:{port}/v1"


def test_process_prints_its_base_url_and_ends_on_sigterm() -> None:
    command = [sys.executable, "-m", "tests.fakes.provider", "--port", "0", "--script", "chunks=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1\n", process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
        finally:
            process.kill()
