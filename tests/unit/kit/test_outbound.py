"""Nothing that a tenant names reaches what is not of the public internet, under whatever name it comes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from ipaddress import ip_address

import pytest
from aiohttp import web

from kit.errors import ServiceError
from kit.outbound import URL_CHARS, CannotReachError, Outbound, allowed_hosts, check_url
from kit.public_addresses import is_public

REFUSED_URLS = [
    "http://example.com/",
    "ftp://example.com/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:25/",
    "https://",
    "https:///x",
    "example.com/hook",
    "//example.com/hook",
    "https://user@example.com/",
    "https://user:word@example.com/",
    "https://@example.com/",
    "https://example.com@127.0.0.1/",
    "https://example.com#@127.0.0.1/",
    "https://example.com\\@127.0.0.1/",
    "https://127.0.0.1/",
    "https://127.0.0.1:8443/",
    "https://127.8.9.1/",
    "https://127.0.0.1./",
    "https://127.1/",
    "https://127.0.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0x7f.1/",
    "https://0x7F.0.0.0x1/",
    "https://0177.0.0.1/",
    "https://017700000001/",
    "https://0/",
    "https://0.0.0.0/",
    "https://127.0.0.1/",
    "https://①②⑦.⓪.⓪.①/",
    "https://127。0。0。1/",
    "https://127%2e0.0.1/",
    "https://%31%32%37.0.0.1/",
    "https://10.0.0.1/",
    "https://172.16.0.1/",
    "https://172.31.255.255/",
    "https://192.168.1.1/",
    "https://169.254.169.254/latest/meta-data/",
    "https://168.63.129.16/",
    "https://100.64.0.1/",
    "https://100.127.255.255/",
    "https://100.100.100.200/",
    "https://192.0.0.192/",
    "https://192.0.2.1/",
    "https://198.18.0.1/",
    "https://198.19.255.255/",
    "https://198.51.100.7/",
    "https://203.0.113.7/",
    "https://192.88.99.1/",
    "https://224.0.0.1/",
    "https://239.255.255.250/",
    "https://240.0.0.1/",
    "https://255.255.255.255/",
    "https://[::]/",
    "https://[::1]/",
    "https://[0:0:0:0:0:0:0:1]/",
    "https://[::127.0.0.1]/",
    "https://[::7f00:1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://[::ffff:0:10.0.0.1]/",
    "https://[64:ff9b::10.0.0.1]/",
    "https://[64:ff9b::a9fe:a9fe]/",
    "https://[64:ff9b:1::808:808]/",
    "https://[2002:7f00:1::]/",
    "https://[2002:a9fe:a9fe::1]/",
    "https://[2001::1]/",
    "https://[2001:0:808:808:0:0:80ff:fffe]/",
    "https://[2001:0:a00:1::f7f7:f7f7]/",
    "https://[2001:db8::1]/",
    "https://[2001:2::1]/",
    "https://[3fff::1]/",
    "https://[fe80::1]/",
    "https://[fe80::1%25eth0]/",
    "https://[2606:4700::1111%25eth0]/",
    "https://[fec0::1]/",
    "https://[fc00::1]/",
    "https://[fd00:ec2::254]/",
    "https://[ff02::1]/",
    "https://[100::1]/",
    "https://[4000::1]/",
    "https://example.com:0/",
    "https://example.com:65536/",
    "https://exa mple.com/",
    "https://example..com/",
    "https://-/",
    "https://1.2.3.4.5/",
    "https://[::1/",
]


@pytest.mark.parametrize("url", [*REFUSED_URLS, "https://example.com/\r\nHost: x", "https://example.com/\0", ""])
def test_refused(url: str) -> None:
    with pytest.raises(ServiceError) as caught:
        check_url(url)
    assert caught.value.reason == "INVALID_OPTIONS"
    assert caught.value.metadata == {"field": "url"}


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "https://example.com:8443/a?token=b",
        "HTTPS://EXAMPLE.com./",
        "https://bücher.example/",
        "https://a_b.example/",
        "https://8.8.8.8/",
        "https://100.63.255.255/",
        "https://100.128.0.0/",
        "https://172.32.0.1/",
        "https://[2606:4700:4700::1111]/",
        "https://[::ffff:8.8.8.8]/",
        "https://[2002:808:808::1]/",
        "https://[64:ff9b::8.8.8.8]/",
    ],
)
def test_taken(url: str) -> None:
    check_url(url)


def test_a_url_has_a_longest_length() -> None:
    stem = "https://example.com/"
    check_url(stem + "a" * (URL_CHARS - len(stem)))
    with pytest.raises(ServiceError, match=str(URL_CHARS)):
        check_url(stem + "a" * (URL_CHARS - len(stem) + 1))


@pytest.mark.parametrize("raw", ["8.8.8.8", "1.1.1.1", "2606:4700::1", "2001:0:808:808::f7f7:f7f7", "::ffff:1.1.1.1"])
def test_public(raw: str) -> None:
    assert is_public(ip_address(raw))


@pytest.mark.parametrize("raw", ["localhost", "hooks.internal, 10.1.0.0/16 ,[fd00::1]", "127.0.0.1", "-", "::1/128"])
def test_lists_of_hosts(raw: str) -> None:
    allowed_hosts(raw)


@pytest.mark.parametrize("raw", ["http://x", "a b", "10.0.0.0/33", "127.1", "*", "host:80"])
def test_lists_that_are_none(raw: str) -> None:
    with pytest.raises(ValueError, match="no host name"):
        allowed_hosts(raw)


def test_what_is_allowed_may_be_private_and_without_tls() -> None:
    allowed = allowed_hosts("hooks.internal,10.1.0.0/16,::1")
    for url in ("http://hooks.internal/", "http://HOOKS.internal.:81/", "http://10.1.2.3/", "https://[::1]:444/"):
        check_url(url, allowed)
    for url in ("http://other.internal/", "https://10.2.0.1/", "http://a.hooks.internal/", "https://127.0.0.1/"):
        with pytest.raises(ServiceError):
            check_url(url, allowed)


class Names:
    """A name server: what it answers, one answer after the other; the last one stays."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers, self.asked = list(answers), 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server on 127.0.0.1 that redirects, sends much, hangs, and closes early."""

    async def redirect(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "/ok"})

    async def much(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * 1_000_000)

    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async def early(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def ok(request: web.Request) -> web.Response:
        return web.Response(text=request.host)

    app = web.Application()
    for handler in (redirect, much, hang, early, ok):
        app.router.add_route("*", f"/{handler.__name__}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def get(outbound: Outbound, url: str, seconds: int = 5, max_bytes: int = 65536) -> tuple[int, bytes, bool]:
    try:
        answer = await outbound.request("GET", url, seconds=seconds, max_bytes=max_bytes)
        return answer.status, answer.body, answer.is_cut
    finally:
        await outbound.close()


@pytest.mark.parametrize(
    "answer", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::1"], ["fe80::1%eth0"], ["2606:4700::1", "::ffff:10.0.0.1"]]
)
async def test_a_name_with_one_address_that_is_not_public_is_refused_and_not_told(answer: list[str]) -> None:
    for act in ("check", "request"):
        outbound = Outbound(lookup=Names(answer))
        url = "https://rebound.example/"
        acting = outbound.check(url) if act == "check" else outbound.request("GET", url, seconds=5)
        with pytest.raises(ServiceError) as caught:
            await acting
        await outbound.close()
        assert caught.value.reason == "INVALID_OPTIONS"
        assert "rebound.example" in caught.value.message
        assert not any(address in caught.value.message for address in answer)


async def test_the_connection_goes_to_the_address_that_was_checked(port: int) -> None:
    """The name's first answer is the server, each later one another: a second look-up would not arrive."""
    names = Names(["127.0.0.1"], ["127.0.0.2"])
    allowed = allowed_hosts("rebound.example")
    status, body, _ = await get(Outbound(allowed, names), f"http://rebound.example:{port}/ok")
    assert (status, body, names.asked) == (200, f"rebound.example:{port}".encode(), 1)


async def test_a_name_that_became_private_after_it_was_checked_is_refused(port: int) -> None:
    outbound = Outbound(allowed_hosts("127.0.0.0/30"), Names(["8.8.8.8"], ["127.0.0.9"]))
    await outbound.check(f"https://rebound.example:{port}/")
    with pytest.raises(ServiceError, match="public internet"):
        await get(outbound, f"https://rebound.example:{port}/")


async def test_the_machines_own_names_are_refused() -> None:
    outbound = Outbound()
    with pytest.raises(ServiceError, match="localhost"):
        await outbound.check("https://localhost/")
    with pytest.raises(ServiceError, match="localhost"):
        await get(outbound, "https://localhost/")


async def test_an_allowed_private_host_is_reached(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9/")  # nobody asks it
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    assert (await get(Outbound(allowed_hosts("127.0.0.1")), f"http://127.0.0.1:{port}/ok"))[0] == 200
    assert (await get(Outbound(allowed_hosts("localhost")), f"http://localhost:{port}/ok"))[0] == 200


async def test_redirects_are_answers_and_long_answers_are_cut(port: int) -> None:
    allowed = allowed_hosts("127.0.0.1")
    assert (await get(Outbound(allowed), f"http://127.0.0.1:{port}/redirect"))[0] == 302
    assert await get(Outbound(allowed), f"http://127.0.0.1:{port}/much", max_bytes=10) == (200, b"x" * 10, True)
    status, body, is_cut = await get(Outbound(allowed), f"http://127.0.0.1:{port}/much", max_bytes=1_000_000)
    assert (status, len(body), is_cut) == (200, 1_000_000, False)


@pytest.mark.parametrize(("path", "says"), [("hang", "within 1 s"), ("early", "broke")])
async def test_failures_are_told_in_words_for_the_tenant(port: int, path: str, says: str) -> None:
    with pytest.raises(CannotReachError, match=says):
        await get(Outbound(allowed_hosts("127.0.0.1")), f"http://127.0.0.1:{port}/{path}", seconds=1)


async def test_a_closed_port_and_an_unknown_name_are_failures() -> None:
    async def unknown(host: str, port: int) -> Sequence[str]:
        raise OSError("no such name")

    with pytest.raises(CannotReachError, match="did not accept") as caught:
        await get(Outbound(allowed_hosts("hooks.internal"), Names(["127.0.0.1"])), "http://hooks.internal:9/")
    assert "127" not in str(caught.value)
    with pytest.raises(CannotReachError, match="cannot be found"):
        await get(Outbound(lookup=unknown), "https://nowhere.example/")
