"""Keys are fetched when they are needed, once for all who need them, and known ones outlive their provider.

The provider is a real HTTP server; the clock is the test's.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest

from kit.errors import ServiceError
from kit.jwks import KeySet
from kit.outbound import Outbound, allowed_hosts
from services.gateway import jwks as module
from services.gateway.jwks import JwksCache, fresh_seconds
from services.gateway.limits import (
    JWKS_BYTES,
    JWKS_FRESH_SECONDS,
    JWKS_FRESH_SECONDS_MAX,
    JWKS_FRESH_SECONDS_MIN,
    JWKS_REFETCH_SECONDS,
    JWKS_REFRESH_SHARE,
    JWKS_RETRY_SECONDS,
    JWKS_STALE_SECONDS,
)
from tests.fakes.jwks import FakeIdentityProvider
from tests.support.signing import ec_signer, jwks, rsa_signer

RSA, EC = rsa_signer(), ec_signer()
REFRESH_SECONDS = JWKS_FRESH_SECONDS * JWKS_REFRESH_SHARE
WAIT_SECONDS = 10.0


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def provider() -> AsyncIterator[FakeIdentityProvider]:
    async with FakeIdentityProvider() as found:
        yield found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def cache(clock: Clock) -> AsyncIterator[JwksCache]:
    found = JwksCache(lambda: Outbound(allowed_hosts("127.0.0.1")), clock)
    yield found
    await found.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch is given up soon."""
    monkeypatch.setattr(module, "JWKS_SECONDS", 0.3)


def kids(keys: KeySet) -> list[str | None]:
    return [key.kid for key in keys.keys]


async def refused(call: Awaitable[object]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await call
    assert caught.value.reason == "UNAVAILABLE"
    return caught.value


async def settled(cache: JwksCache) -> None:
    """Waits for what is being fetched."""
    tasks = [entry.fetching for entry in cache._entries.values() if entry.fetching is not None]
    await asyncio.wait_for(asyncio.gather(*tasks), WAIT_SECONDS)


async def test_fifty_first_requests_are_one_fetch_and_a_thousand_more_none(
    provider: FakeIdentityProvider, cache: JwksCache
) -> None:
    url = provider.publish("a", jwks(RSA, EC))
    gate = provider.hang("a")
    asking = [asyncio.create_task(cache.keys(url)) for _ in range(50)]
    await asyncio.wait_for(provider.asked.wait(), WAIT_SECONDS)
    assert not any(task.done() for task in asking)
    gate.set()
    assert {tuple(kids(keys)) for keys in await asyncio.gather(*asking)} == {("r1", "e1")}
    for _ in range(1000):
        await cache.keys(url)
    assert provider.fetched("a") == 1


async def test_who_leaves_does_not_end_the_fetch_of_the_others(
    provider: FakeIdentityProvider, cache: JwksCache
) -> None:
    url = provider.publish("a", jwks(RSA))
    gate = provider.hang("a")
    first, second = (asyncio.create_task(cache.keys(url)) for _ in range(2))
    await asyncio.wait_for(provider.asked.wait(), WAIT_SECONDS)
    first.cancel()
    await asyncio.wait({first})
    gate.set()
    assert kids(await second) == ["r1"]
    assert provider.fetched("a") == 1


async def test_keys_are_fetched_again_in_the_background_before_their_time_is_up(
    provider: FakeIdentityProvider, cache: JwksCache, clock: Clock
) -> None:
    url = provider.publish("a", jwks(RSA))
    await cache.keys(url)
    provider.publish("a", jwks(EC))
    clock.now += REFRESH_SECONDS - 1
    assert kids(await cache.keys(url)) == ["r1"]
    await settled(cache)
    assert provider.fetched("a") == 1
    clock.now += 1
    gate = provider.hang("a")
    for _ in range(20):
        assert kids(await cache.keys(url)) == ["r1"]  # at once, with what is known
    gate.set()
    await settled(cache)
    assert kids(await cache.keys(url)) == ["e1"]
    assert provider.fetched("a") == 2


async def test_a_removed_key_is_gone_when_its_time_is_up_though_nobody_asked_for_it_before(
    provider: FakeIdentityProvider, cache: JwksCache, clock: Clock
) -> None:
    url = provider.publish("a", jwks(RSA, EC), headers={"Cache-Control": "max-age=99999"})
    await cache.keys(url)
    provider.publish("a", jwks(EC))
    clock.now += JWKS_FRESH_SECONDS_MAX
    assert kids(await cache.keys(url)) == ["e1"]
    provider.publish("a", jwks())
    clock.now += 10 * JWKS_FRESH_SECONDS_MAX
    assert kids(await cache.keys(url)) == []


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, JWKS_FRESH_SECONDS),
        ("", JWKS_FRESH_SECONDS),
        ("public", JWKS_FRESH_SECONDS),
        ("max-age=200", 200),
        ("public, MAX-AGE=200, must-revalidate", 200),
        ('max-age="200"', 200),
        ("s-maxage=100,max-age = 200", 200),
        (f"max-age={JWKS_FRESH_SECONDS_MAX:.0f}", JWKS_FRESH_SECONDS_MAX),
        (f"max-age={JWKS_FRESH_SECONDS_MAX + 1:.0f}", JWKS_FRESH_SECONDS_MAX),
        ("max-age=999999999", JWKS_FRESH_SECONDS_MAX),
        (f"max-age={JWKS_FRESH_SECONDS_MIN:.0f}", JWKS_FRESH_SECONDS_MIN),
        (f"max-age={JWKS_FRESH_SECONDS_MIN - 1:.0f}", JWKS_FRESH_SECONDS_MIN),
        ("max-age=0", JWKS_FRESH_SECONDS_MIN),
        ("no-store", JWKS_FRESH_SECONDS_MIN),
        ("max-age=500, no-cache", JWKS_FRESH_SECONDS_MIN),
        ("max-age=-1", JWKS_FRESH_SECONDS),
        ("max-age=soon", JWKS_FRESH_SECONDS),
        ("max-age=" + "9" * 5000, JWKS_FRESH_SECONDS),
    ],
)
def test_cache_control_is_heeded_within_bounds(header: str | None, seconds: float) -> None:
    assert fresh_seconds({} if header is None else {"Cache-Control": header}) == seconds


async def test_an_unknown_key_has_them_fetched_at_once(provider: FakeIdentityProvider, cache: JwksCache) -> None:
    url = provider.publish("a", jwks(RSA))
    seen = await cache.keys(url)
    provider.publish("a", jwks(RSA, EC))
    assert kids(await cache.again(url, seen)) == ["r1", "e1"]
    assert provider.fetched("a") == 2


async def test_a_flood_of_made_up_keys_is_one_fetch_in_ten_seconds(
    provider: FakeIdentityProvider, cache: JwksCache, clock: Clock
) -> None:
    url = provider.publish("a", jwks(RSA))
    seen = await cache.keys(url)
    for wave in range(1, 4):
        await asyncio.gather(*(cache.again(url, seen) for _ in range(200)))
        for _ in range(200):
            await cache.again(url, await cache.keys(url))
        clock.now += JWKS_REFETCH_SECONDS - 0.1
        await cache.again(url, await cache.keys(url))
        assert provider.fetched("a") == 1 + wave
        clock.now += 0.1


async def test_a_provider_that_is_away_is_asked_again_after_a_pause(
    provider: FakeIdentityProvider, cache: JwksCache, clock: Clock
) -> None:
    url = provider.publish("a", b"", status=500)
    for _ in range(100):
        error = await refused(cache.keys(url))
        assert "status 500" in error.message
        assert error.retry_after == JWKS_RETRY_SECONDS
    assert provider.fetched("a") == 1
    provider.publish("a", jwks(RSA))
    clock.now += JWKS_RETRY_SECONDS - 0.1
    await refused(cache.keys(url))
    clock.now += 0.1
    assert kids(await cache.keys(url)) == ["r1"]
    assert provider.fetched("a") == 2


@pytest.mark.usefixtures("quick")
async def test_known_keys_stay_in_use_while_their_provider_hangs(
    provider: FakeIdentityProvider, cache: JwksCache, clock: Clock
) -> None:
    url = provider.publish("a", jwks(RSA))
    seen = await cache.keys(url)
    provider.hang("a")
    # Of unknown keys nobody can tell now: that is no refusal.
    assert "within 0.3 s" in (await refused(cache.again(url, seen))).message
    assert await cache.keys(url) is seen
    clock.now += JWKS_FRESH_SECONDS - JWKS_RETRY_SECONDS
    assert await cache.keys(url) is seen  # begins a fetch, which fails
    await settled(cache)
    before = provider.fetched("a")
    clock.now += JWKS_RETRY_SECONDS  # their time is up
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for _ in range(100):
        assert await cache.keys(url) is seen
    assert loop.time() - begun < 0.25  # none of them waited for the fetch that was begun
    await settled(cache)
    assert provider.fetched("a") == before + 1


async def test_known_keys_stay_in_use_for_a_day_and_no_longer(
    provider: FakeIdentityProvider, cache: JwksCache, clock: Clock
) -> None:
    url = provider.publish("a", jwks(RSA))
    seen = await cache.keys(url)
    provider.publish("a", b"", status=503)
    clock.now += JWKS_STALE_SECONDS - 1
    assert await cache.keys(url) is seen
    clock.now += 1
    await refused(cache.keys(url))
    provider.publish("a", jwks(EC))
    clock.now += JWKS_RETRY_SECONDS
    assert kids(await cache.keys(url)) == ["e1"]


@pytest.mark.usefixtures("quick")
async def test_after_a_long_silence_the_provider_is_asked_before_an_old_key_is_believed(
    provider: FakeIdentityProvider, cache: JwksCache, clock: Clock
) -> None:
    url = provider.publish("a", jwks(RSA))
    seen = await cache.keys(url)
    provider.hang("a")
    await refused(cache.again(url, seen))  # it is away, and nobody asks for an hour
    clock.now += 3600
    provider.publish("a", jwks(EC))
    assert kids(await cache.keys(url)) == ["e1"]


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ({"body": b"", "status": 500}, "status 500"),
        ({"body": jwks(RSA), "status": 404}, "status 404"),
        ({"body": jwks(RSA), "status": 206}, "status 206"),
        ({"body": b"<html>Sign in</html>"}, "not JSON"),
        ({"body": b"\xff" * 100}, "not JSON"),
        ({"body": b""}, "not JSON"),
        ({"body": b"[" * 200_000}, "not JSON"),
        ({"body": b'{"error": "x"}'}, "a list `keys`"),
        ({"body": jwks(RSA) + b" " * 10_000_000}, f"{JWKS_BYTES:,} bytes"),
        ({"body": jwks(RSA) + b" " * (JWKS_BYTES + 1 - len(jwks(RSA)))}, f"{JWKS_BYTES:,} bytes"),
        ({"body": jwks(*[EC.jwk(kid=str(n)) for n in range(33)])}, "more than 32 keys"),
    ],
)
async def test_an_answer_of_no_use_is_told(
    provider: FakeIdentityProvider, cache: JwksCache, page: dict[str, object], says: str
) -> None:
    url = provider.publish("a", **page)  # type: ignore[arg-type]
    assert says in (await refused(cache.keys(url))).message


async def test_a_document_of_the_largest_size_is_read(provider: FakeIdentityProvider, cache: JwksCache) -> None:
    url = provider.publish("a", jwks(RSA) + b" " * (JWKS_BYTES - len(jwks(RSA))))
    assert kids(await cache.keys(url)) == ["r1"]


async def test_a_redirect_is_not_followed(provider: FakeIdentityProvider, cache: JwksCache) -> None:
    target = provider.publish("target", jwks(RSA))
    for status in (301, 302, 303, 307, 308):
        url = provider.publish(f"from-{status}", b"", status=status, headers={"Location": target})
        assert "not followed" in (await refused(cache.keys(url))).message
    assert provider.fetched("target") == 0


@pytest.mark.parametrize("form", ["http://localhost:{0}/a", "https://127.0.0.1:{0}/a", "http://127.0.0.2:{0}/a"])
async def test_what_is_not_allowed_is_not_called(provider: FakeIdentityProvider, form: str) -> None:
    """The same server, under names that nobody allowed."""
    provider.publish("a", jwks(RSA))
    cache = JwksCache(Outbound)
    error = await refused(cache.keys(form.format(provider.port)))
    await cache.close()
    assert "public internet" in error.message or "https" in error.message
    assert provider.fetched("a") == 0


async def test_a_closed_port_is_told(cache: JwksCache) -> None:
    assert "did not accept" in (await refused(cache.keys("http://127.0.0.1:1/a"))).message


async def test_a_bug_in_reading_is_a_failure_and_no_hang(
    provider: FakeIdentityProvider, cache: JwksCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> KeySet:
        raise KeyError("nobody expected this")

    monkeypatch.setattr(module, "read_jwks", broken)
    assert "Reading it failed" in (await refused(cache.keys(provider.publish("a", jwks(RSA))))).message


async def test_documents_are_kept_apart_and_the_longest_unused_is_forgotten(
    provider: FakeIdentityProvider, cache: JwksCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JWKS_URLS", 3)
    urls = {name: provider.publish(name, jwks(ec_signer(name))) for name in "abcd"}
    for name in "abc":
        assert kids(await cache.keys(urls[name])) == [name]
    await cache.keys(urls["a"])
    assert kids(await cache.keys(urls["d"])) == ["d"]  # in place of b
    for name in "acd":
        await cache.keys(urls[name])
    assert [provider.fetched(name) for name in "abcd"] == [1, 1, 1, 1]
    await cache.keys(urls["b"])
    assert provider.fetched("b") == 2
    assert len(cache._entries) == 3


async def test_what_is_forgotten_while_it_is_fetched_leaves_nobody_waiting(
    provider: FakeIdentityProvider, cache: JwksCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JWKS_URLS", 1)
    first, second = (provider.publish(name, jwks(RSA)) for name in ("a", "b"))
    provider.hang("a")
    waiting = asyncio.create_task(cache.keys(first))
    await asyncio.wait_for(provider.asked.wait(), WAIT_SECONDS)
    await cache.keys(second)
    await refused(asyncio.wait_for(waiting, WAIT_SECONDS))


async def test_closing_ends_what_is_being_fetched(provider: FakeIdentityProvider, clock: Clock) -> None:
    cache = JwksCache(lambda: Outbound(allowed_hosts("127.0.0.1")), clock)
    url = provider.publish("a", jwks(RSA))
    provider.hang("a")
    waiting = asyncio.create_task(cache.keys(url))
    await asyncio.wait_for(provider.asked.wait(), WAIT_SECONDS)
    await cache.close()
    await refused(asyncio.wait_for(waiting, WAIT_SECONDS))
