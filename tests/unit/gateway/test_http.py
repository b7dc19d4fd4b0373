"""What any request meets: ids, unknown paths, bad bodies, limits, CORS. Raw bytes in, raw bytes out."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kit.errors import ServiceError, invalid
from services.gateway.limits import BODY_BYTES, HEAD_BYTES
from tests.unit.gateway.replica import ANON, THREAD_ID, Replica, batch, finished, play
from tests.unit.gateway.running import ALICE, Gateway, Reply, read_reply, request, running_gateway, token

PATH = "/v1/conversations"
MESSAGES = f"{PATH}/{THREAD_ID}/messages"


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with Replica(run=play(batch(finished(1)))) as found:
        yield found


@pytest.fixture
async def gateway(replica: Replica) -> AsyncIterator[Gateway]:
    async with running_gateway(replica.address) as found:
        yield found


def problem(reply: Reply, status: int, code: str) -> Any:
    assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
    assert reply.json["code"] == code
    assert reply.json["message"].endswith(".")
    assert reply.json["request_id"] == reply.headers["x-request-id"]
    return reply.json


async def test_a_request_id_is_kept_or_made(gateway: Gateway) -> None:
    assert (await gateway.ask("GET", PATH, x_request_id="My.id-1_")).headers["x-request-id"] == "My.id-1_"
    for bad in ("a b", "x" * 129, "ü", "a/b", '"'):
        assert (await gateway.ask("GET", PATH, x_request_id=bad)).headers["x-request-id"] != bad


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/v1",
        "/v1/conversations/",
        "//v1/conversations",
        "/V1/conversations",
        f"{PATH}/{THREAD_ID}/",
        f"{PATH}/{THREAD_ID}/messages/..",
        f"{PATH}/{THREAD_ID}%2Fmessages%2F..",
        f"{PATH}%0A",
        "/%00",
        "/%ff%fe",
        "*",
        "/./v1/conversations",
        "/v1/conversations;a=b",
    ],
)
async def test_an_unknown_path_is_404(gateway: Gateway, path: str) -> None:
    assert problem(await gateway.ask("GET", path), 404, "NOT_FOUND")["kind"] == "path"


@pytest.mark.parametrize(
    "name", ["..", ".", "%2e%2e", "1", THREAD_ID.upper(), THREAD_ID + "%00", "{" + THREAD_ID + "}", "%F0%9F%98%80", "*"]
)
async def test_what_cannot_be_an_id_is_not_found(gateway: Gateway, replica: Replica, name: str) -> None:
    for suffix in ("", "/messages", "/stream", "/traces"):
        problem(await gateway.ask("GET", f"{PATH}/{name}{suffix}"), 404, "THREAD_NOT_FOUND")
    problem(await gateway.ask("POST", f"{PATH}/{name}/messages", {"content": "x"}), 404, "THREAD_NOT_FOUND")
    problem(await gateway.ask("POST", f"{PATH}/{name}/cancel"), 404, "THREAD_NOT_FOUND")
    assert not replica.requests


async def test_a_wrong_method_is_405_and_names_the_right_ones(gateway: Gateway) -> None:
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE"):
        reply = await gateway.ask(method, PATH)
        problem(reply, 405, "METHOD_NOT_ALLOWED")
        assert reply.headers["allow"] == "GET, POST"
    reader, writer = await gateway.open(request("HEAD", f"{PATH}/{THREAD_ID}/stream"))
    assert b" 405 " in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_head_is_get_without_its_body(gateway: Gateway) -> None:
    _, writer = connection = await gateway.open(request("HEAD", "/healthz"))
    assert b"200 OK" in await connection[0].readuntil(b"\r\n\r\n")
    writer.write(request("GET", "/healthz"))
    assert (await read_reply(connection[0])).json == {"status": "ok"}
    writer.close()


def say(raw: str | bytes) -> bytes:
    """A body whose content holds this, verbatim."""
    return b'{"content":"' + (raw if isinstance(raw, bytes) else raw.encode()) + b'"}'


BAD_BODIES = [
    (b"", "body"),
    (b" ", "body"),
    (b"null", "body"),
    (b"[]", "body"),
    (b'"text"', "body"),
    (b"{", "body"),
    (b'{"content":"x"}x', "body"),
    (b"{'content':'x'}", "body"),
    (b"\xef\xbb\xbf" + say("x"), "body"),
    (say(b"\xff"), "body"),
    (say(b"\xed\xa0\x80"), "body"),
    (say(b"\x00"), "body"),
    (say(b"\n"), "body"),
    (b"content=x", "body"),
    (b"{}", "content"),
    (b'{"content":null}', "content"),
    (b'{"content":5}', "content"),
    (b'{"content":{"text":"x"}}', "content"),
    (b'{"content":["x"]}', "content[0]"),
    (b'{"content":[{"type":"text"}]}', "content[0].text"),
    (b'{"content":[{"type":"image","text":"x"}]}', "content[0].type"),
    (b'{"content":[{"type":"text","text":"x","url":"y"}]}', "content[0].url"),
    (say("\\ud800"), "content"),
    (say("a\\udc00b"), "content"),
    (say("\\ud800\\ud800"), "content"),
    (b'{"content":[{"type":"text","text":"ok"},{"type":"text","text":"\\ud83d"}]}', "content[1].text"),
    (b'{"content":"x","model":"\\ud800abcdef"}', "model"),
    (b'{"content":"x","model":7}', "model"),
    (b'{"content":"x","temperature":"hot"}', "temperature"),
    (b'{"content":"x","temperature":1e999}', "temperature"),
    (b'{"content":"x","temperature":true}', "temperature"),
    (b'{"content":"x","max_output_tokens":1.5}', "max_output_tokens"),
    (b'{"content":"x","max_output_tokens":4294967296}', "max_output_tokens"),
    (b'{"content":"x","max_output_tokens":99999999999999999999999}', "max_output_tokens"),
    (b'{"content":"x","if_running":"wait"}', "if_running"),
    (b'{"content":"x","if_running":null}', "if_running"),
    (b'{"content":"x","media":[]}', "media"),
    (b'{"content":"x","background":1}', "background"),
    (b'{"content":"x","background":true,"on_disconnect":{"cancel_after_s":5}}', "on_disconnect"),
    (b'{"content":"x","on_disconnect":"cancel"}', "on_disconnect"),
    (b'{"content":"x","on_disconnect":{"cancel_after_s":1e300}}', "on_disconnect"),
    (b'{"content":"x","on_disconnect":{"cancel_after_s":5,"more":1}}', "on_disconnect.more"),
    (b'{"content":"x","fallback_models":"a"}', "fallback_models"),
    (b'{"content":"x","maxTokens":5}', "maxTokens"),
    (b'{"content":"x","":5}', ""),
    (b'{"content":"x","' + b"y" * 10_000 + b'":5}', "y" * 80),
    (b'{"content":"x","deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
    (b"[" * 1_000_000, "body"),
    (b'{"content":' + b'[{"type":' * 100_000, "content[0].type"),
]


@pytest.mark.parametrize(("body", "field"), BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_a_bad_body_is_refused_with_its_field(
    gateway: Gateway, replica: Replica, body: bytes, field: str
) -> None:
    found = problem(await gateway.ask("POST", MESSAGES, body), 400, "INVALID_OPTIONS")
    assert found["field"] == field
    assert len(found["message"]) < 300
    assert not replica.runs


async def test_options_to_come_are_called_so(gateway: Gateway) -> None:
    for option in ("media", "tools", "skill"):
        reply = await gateway.ask("POST", MESSAGES, {"content": "x", option: None})
        assert reply.json["message"] == f"The option {option} is not available yet."


async def test_json_is_read_whatever_its_content_type(gateway: Gateway, replica: Replica) -> None:
    reply = await gateway.ask("POST", MESSAGES, {"content": "ü😀"}, content_type="text/plain")
    assert reply.status == 200
    assert replica.runs[0].parts[0].text == "ü😀"


async def test_a_message_reaches_the_service(gateway: Gateway, replica: Replica) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    options = {"model": "m", "system": "s", "temperature": 1, "max_output_tokens": 5, "reasoning_effort": "low"}
    body = {"content": parts, **options, "if_running": "reject"}
    reply = await gateway.ask("POST", MESSAGES, body, idempotency_key="key 1")
    assert reply.status == 200
    run = replica.runs[0]
    assert (run.thread_id, run.request_id, [part.text for part in run.parts]) == (THREAD_ID, "key 1", ["a", "b"])
    assert {name: getattr(run.options, name) for name in options} == options
    await gateway.ask("POST", MESSAGES, {"content": "x"})
    assert replica.runs[1].request_id  # our own, for our own retry
    assert not replica.runs[1].options.HasField("temperature")


@pytest.mark.parametrize("key", ["", "x" * 256, "ü", "a\tb"])
async def test_a_bad_idempotency_key_is_refused(gateway: Gateway, replica: Replica, key: str) -> None:
    for path, body in ((MESSAGES, {"content": "x"}), (PATH, {})):
        found = problem(await gateway.ask("POST", path, body, idempotency_key=key), 400, "INVALID_OPTIONS")
        assert found["field"] == "Idempotency-Key"
    assert not replica.requests


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("x=1", "x"),
        ("limit=0", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("limit=1.0", "limit"),
        ("limit=", "limit"),
        ("limit=%D9%A1", "limit"),
        ("limit=1&limit=2", "limit"),
        ("cursor", None),
        ("&".join("a=1" for _ in range(40)), "query"),
    ],
)
async def test_a_bad_query_is_refused(gateway: Gateway, query: str, field: str | None) -> None:
    reply = await gateway.ask("GET", f"{PATH}?{query}")
    assert reply.json.get("field") == field
    assert reply.status == (400 if field else 200)


async def test_a_page_is_asked_for(gateway: Gateway, replica: Replica) -> None:
    reply = await gateway.ask("GET", f"{PATH}?limit=99999999999&cursor=a%20b")
    assert reply.json["next_cursor"] == "more"
    assert (replica.requests[0].page_size, replica.requests[0].page_token) == (2**31 - 1, "a b")


async def test_the_services_fields_get_the_names_of_this_dialect(gateway: Gateway, replica: Replica) -> None:
    for inner, outer in (
        ("page_token", "cursor"),
        ("options.temperature", "temperature"),
        ("parts[3].text", "content[3].text"),
    ):
        replica.failure = invalid(inner, "This is wrong.")
        assert problem(await gateway.ask("GET", PATH), 400, "INVALID_OPTIONS")["field"] == outer


async def test_metadata_that_is_not_for_clients_stays_inside(gateway: Gateway, replica: Replica) -> None:
    replica.failure = ServiceError(
        "CONTENT_TOO_LARGE", "Too long.", {"limit": "5", "unit": "characters", "host": "10.1.2.3"}
    )
    found = problem(await gateway.ask("GET", PATH), 413, "CONTENT_TOO_LARGE")
    assert found == {**found, "limit": 5, "unit": "characters"}
    assert "host" not in found


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused_while_it_is_read(gateway: Gateway, declared: bool) -> None:
    head = request("POST", MESSAGES, headers={**ALICE, "transfer-encoding": "chunked"})
    if declared:
        head = request("POST", MESSAGES, headers={**ALICE, "content-length": str(BODY_BYTES + 1)})
    reader, writer = await gateway.open(head)
    if not declared:
        chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        for _ in range(BODY_BYTES // 0x100000 + 1):
            writer.write(chunk)
    found = problem(await asyncio.wait_for(read_reply(reader), 10), 413, "CONTENT_TOO_LARGE")
    assert (found["limit"], found["unit"]) == (BODY_BYTES, "bytes")
    writer.close()


async def test_a_body_at_the_limit_is_taken(gateway: Gateway, replica: Replica) -> None:
    body = say("x")
    reply = await gateway.ask("POST", MESSAGES, body + b" " * (BODY_BYTES - len(body)))
    assert reply.status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: t\r\nx: " + b"a" * HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: t\r\nx: " + b"a" * 10_000_000,
        b"GET /" + b"a" * 10_000_000,
        b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % number for number in range(100_000)) + b"\r\n",
    ],
    ids=["just over", "endless header", "endless line", "many headers"],
)
async def test_a_huge_head_is_431(gateway: Gateway, head: bytes) -> None:
    reader, writer = await gateway.open(head)
    reply = await asyncio.wait_for(read_reply(reader), 10)
    assert problem(reply, 431, "CONTENT_TOO_LARGE")["limit"] == HEAD_BYTES
    writer.close()


async def test_a_large_head_below_the_limit_is_taken(gateway: Gateway) -> None:
    assert (await gateway.ask("GET", PATH, x_filler="a" * (HEAD_BYTES - 2000))).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: t\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: t\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: t\r\nx: a\x00b\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_400(gateway: Gateway, raw: bytes) -> None:
    problem(await gateway.raw(raw), 400, "INVALID_OPTIONS")


async def test_a_local_origin_may_call_and_read_errors(gateway: Gateway) -> None:
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173"):
        preflight = await gateway.ask(
            "OPTIONS", MESSAGES, headers={}, origin=origin, access_control_request_method="POST",
            access_control_request_headers="apikey,authorization,x-client-info",
        )  # fmt: skip
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        for reply in (
            await gateway.ask("GET", "/no", origin=origin),
            await gateway.ask("GET", PATH, headers={}, origin=origin),
        ):
            assert reply.status in (401, 404)
            assert reply.headers["access-control-allow-origin"] == origin
            assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


async def test_another_origin_may_not(gateway: Gateway) -> None:
    for origin in (
        "https://evil.example",
        "http://localhost.evil.example",
        "http://localhost:3000.evil.example",
        "null",
    ):
        reply = await gateway.ask("GET", PATH, origin=origin)
        assert "access-control-allow-origin" not in reply.headers


async def test_a_listed_origin_may_call(replica: Replica) -> None:
    async with running_gateway(replica.address, origins=("https://app.example.com",)) as gateway:
        reply = await gateway.ask("GET", PATH, origin="https://app.example.com")
        assert reply.headers["access-control-allow-origin"] == "https://app.example.com"
        assert "access-control-allow-origin" not in (await gateway.ask("GET", PATH, origin="http://localhost")).headers


async def test_a_bug_is_500_and_tells_nothing(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def bug(*_: Any) -> None:
        raise RuntimeError("postgres://user:password@10.0.0.1")

    monkeypatch.setattr("services.gateway.auth.Auth.caller", bug)
    reply = await gateway.ask("GET", PATH, origin="http://localhost:3000")
    problem(reply, 500, "INTERNAL")
    assert b"postgres" not in reply.body
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"


async def test_the_log_holds_no_query_header_or_body(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.ask("GET", f"{PATH}?secret=inquery")
    await gateway.ask("POST", MESSAGES, {"content": "secret-in-body"}, x_request_id="seen-id")
    logged = capsys.readouterr().out + caplog.text
    assert MESSAGES in logged
    assert "seen-id" in logged
    for secret in ("inquery", "secret-in-body", ANON, token()):
        assert secret not in logged


async def test_open_routes_need_nothing(gateway: Gateway, replica: Replica) -> None:
    assert (await gateway.ask("GET", "/", headers={})).json["openapi"] == "/openapi.json"
    assert (await gateway.ask("GET", "/healthz", headers={})).json == {"status": "ok"}
    assert (await gateway.ask("GET", "/readyz", headers={})).json == {"status": "ok"}
    assert b"threadloom_http_requests_total" in (await gateway.ask("GET", "/metrics", headers={})).body
    assert json.loads((await gateway.ask("GET", "/openapi.json", headers={})).body)["openapi"] == "3.1.0"


async def test_not_ready_without_a_serving_replica(replica: Replica) -> None:
    async with running_gateway(replica.address) as gateway:
        await replica.set_serving(False)
        assert (await gateway.ask("GET", "/readyz", headers={})).status == 503
    async with running_gateway(replica.address) as gateway:
        await replica.die()
        reply = await gateway.ask("GET", "/readyz", headers={})
        assert (reply.status, reply.json) == (503, {"status": "unavailable"})


async def test_a_dead_replica_costs_no_request() -> None:
    async with Replica() as dead:
        address = dead.address
    async with Replica() as alive, running_gateway(address, alive.address) as gateway:
        for _ in range(4):
            assert (await gateway.ask("GET", PATH)).status == 200
            assert (await gateway.ask("POST", PATH, {"title": "x"})).status == 201
