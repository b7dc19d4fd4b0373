"""The public keys of identity providers: fetched by URL, remembered for minutes, never asked for by each request.

One fetch at a time for a URL, whatever waits for it. Keys are fetched again in the
background before their time is up. A token that names an unknown key has them fetched at
once, but not again and again. While a provider is away its known keys stay in use.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import Counter
from yarl import URL

from kit.errors import ServiceError, unavailable
from kit.jwks import KeySet, read_jwks
from kit.outbound import Answer, CannotReachError, Outbound
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.gateway.limits import (
    JWKS_BYTES,
    JWKS_FRESH_SECONDS,
    JWKS_FRESH_SECONDS_MAX,
    JWKS_FRESH_SECONDS_MIN,
    JWKS_REFETCH_SECONDS,
    JWKS_REFRESH_SHARE,
    JWKS_RETRY_SECONDS,
    JWKS_SECONDS,
    JWKS_STALE_SECONDS,
    JWKS_URLS,
)

FETCHES = Counter("threadloom_jwks_fetches_total", "Fetches of JWKS documents by outcome.", ["outcome"])
MAX_AGE = re.compile(r'(?:^|[\s,])max-age\s*=\s*"?([0-9]{1,9})(?![0-9])', re.IGNORECASE)
UNCACHED = re.compile(r"(?:^|[\s,])no-(?:store|cache)\b", re.IGNORECASE)


@dataclass
class _Entry:
    """What is known of a URL. Times are monotonic seconds; `failure` says why the last fetch failed."""

    keys: KeySet | None = None
    fetched_at: float = 0.0
    fresh_seconds: float = 0.0
    failure: str | None = None
    failed_at: float = 0.0
    asked_again_at: float = float("-inf")
    fetching: asyncio.Task[None] | None = None


class JwksCache:
    """The keys of each URL. For one event loop."""

    def __init__(self, connect: Callable[[], Outbound], clock: Callable[[], float] = time.monotonic) -> None:
        """`connect` makes the client once it is needed: most gateways fetch nothing."""
        self._connect, self._clock = connect, clock
        self._outbound: Outbound | None = None
        self._entries: dict[str, _Entry] = {}  # the one used longest ago first

    async def keys(self, url: str) -> KeySet:
        """The keys at a URL, from memory if they are known. Raises UNAVAILABLE when none are and none can be had."""
        entry, now = self._entry(url), self._clock()
        age = now - entry.fetched_at
        if entry.keys is not None and age >= JWKS_STALE_SECONDS:
            entry.keys = None
        if entry.keys is None:
            await self._wait(self._fetch_soon(url, entry))
        elif age >= entry.fresh_seconds:
            fetching = self._fetch_soon(url, entry)
            if not _is_away(entry, now):
                await self._wait(fetching)  # nobody asked for long: a key may have been removed meanwhile
        elif age >= entry.fresh_seconds * JWKS_REFRESH_SHARE:
            self._fetch_soon(url, entry)
        return _known(entry)

    async def again(self, url: str, seen: KeySet) -> KeySet:
        """The keys at a URL as of now, for a token that means none of those `seen`.

        They are fetched for this once in JWKS_REFETCH_SECONDS. Raises UNAVAILABLE while that fails.
        """
        entry = self._entry(url)
        if entry.keys is not None and entry.keys is not seen:
            return entry.keys
        now = self._clock()
        fetching = entry.fetching
        if fetching is None and now - entry.asked_again_at >= JWKS_REFETCH_SECONDS:
            fetching = self._fetch_soon(url, entry)
            if fetching is not None:
                entry.asked_again_at = now
        await self._wait(fetching)
        if entry.failure is not None:
            raise _away(entry.failure)
        return _known(entry)

    async def close(self) -> None:
        """Ends what is being fetched."""
        tasks = [entry.fetching for entry in self._entries.values() if entry.fetching is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._outbound is not None:
            await self._outbound.close()

    def _entry(self, url: str) -> _Entry:
        entry = self._entries.pop(url, None) or _Entry()
        self._entries[url] = entry
        if len(self._entries) > JWKS_URLS:
            oldest = next(iter(self._entries))
            forgotten = self._entries.pop(oldest)
            if forgotten.fetching is not None:
                forgotten.fetching.cancel()  # those who wait are told to ask again
        return entry

    def _fetch_soon(self, url: str, entry: _Entry) -> asyncio.Task[None] | None:
        """The fetch under way, or a new one; None shortly after one failed."""
        if entry.fetching is not None:
            return entry.fetching
        if entry.failure is not None and self._clock() - entry.failed_at < JWKS_RETRY_SECONDS:
            return None
        # A task of its own: a client that leaves does not end what others wait for.
        entry.fetching = asyncio.create_task(self._fetch(url, entry), name="jwks")
        return entry.fetching

    @staticmethod
    async def _wait(fetching: asyncio.Task[None] | None) -> None:
        if fetching is not None:
            await asyncio.wait({fetching})

    async def _fetch(self, url: str, entry: _Entry) -> None:
        begun = self._clock()
        failure: str | None = "It was given up."
        try:
            answer = await self._request(url)
            keys = _read(answer)
            entry.keys, entry.fetched_at, entry.fresh_seconds = keys, begun, fresh_seconds(answer.headers)
            failure = None
        except (CannotReachError, _OfNoUseError) as error:
            failure = str(error)
        except ServiceError as error:  # the address may not be called from here
            failure = error.message
        except Exception as error:  # a bug: those who wait must not wait for ever, and it must not pass unseen
            UNEXPECTED_ERRORS.labels("jwks").inc()
            log.error("jwks fetch failed unexpectedly", exc_info=error)
            failure = "Reading it failed."
        finally:
            entry.fetching, entry.failure = None, failure
            if failure is not None:
                entry.failed_at = self._clock()
        FETCHES.labels("read" if failure is None else "failed").inc()
        if failure is not None:
            log.warning("jwks not read", host=URL(url).host, why=failure, has_keys=entry.keys is not None)

    async def _request(self, url: str) -> Answer:
        if self._outbound is None:
            self._outbound = self._connect()
        accept = {"Accept": "application/jwk-set+json, application/json"}
        return await self._outbound.request("GET", url, headers=accept, seconds=JWKS_SECONDS, max_bytes=JWKS_BYTES)


class _OfNoUseError(Exception):
    """An answer that is no JWKS document; the message says why."""


def _read(answer: Answer) -> KeySet:
    if answer.status != 200:
        hint = " Redirects are not followed." if 300 <= answer.status < 400 else ""
        raise _OfNoUseError(f"Its address answered with status {answer.status}.{hint}")
    if answer.is_cut:
        raise _OfNoUseError(f"The document is larger than {JWKS_BYTES:,} bytes.")
    try:
        return read_jwks(answer.body)
    except ValueError as error:
        raise _OfNoUseError(f"The document is of no use: {error}.") from None


def fresh_seconds(headers: Mapping[str, str]) -> float:
    """How long an answer may be used: as its Cache-Control says, within bounds."""
    header = headers.get("Cache-Control", "")
    found = MAX_AGE.search(header)
    asked = 0.0 if UNCACHED.search(header) else float(found[1]) if found else JWKS_FRESH_SECONDS
    return min(max(asked, JWKS_FRESH_SECONDS_MIN), JWKS_FRESH_SECONDS_MAX)


def _is_away(entry: _Entry, now: float) -> bool:
    """Whether the provider failed a moment ago: then its known keys are used without waiting for it."""
    return entry.failure is not None and now - entry.failed_at < JWKS_FRESH_SECONDS_MIN


def _known(entry: _Entry) -> KeySet:
    if entry.keys is None:
        raise _away(entry.failure or "It was given up.")
    return entry.keys


def _away(why: str) -> ServiceError:
    message = f"The JWKS of the project's identity provider cannot be read, so the token cannot be verified. {why}"
    return unavailable(message, JWKS_RETRY_SECONDS)
