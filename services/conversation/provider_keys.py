"""The model providers' keys of projects: sealed at rest, opened for one call, sealed again under newer ring keys."""

import time
from collections.abc import Awaitable, Callable, Mapping
from uuid import UUID

import psycopg
from prometheus_client import Counter

from kit.sealing import CannotOpenError, KeyRing
from kit.telemetry import log
from services.conversation import limits
from services.conversation.domain import endings
from services.conversation.store import provider_keys

UNREADABLE = Counter("threadloom_unreadable_provider_keys_total", "Provider keys that did not open.", ["provider"])

# Does a piece of reading on a connection of the engine role, again while Postgres is away.
Insist = Callable[[Callable[[psycopg.AsyncConnection], Awaitable[bytes | None]]], Awaitable[bytes | None]]


class ProviderKeys:
    """Finds the key a call is made with. `own` are the deployment's, for projects that set none."""

    def __init__(self, ring: KeyRing, own: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._ring, self._own, self._clock = ring, own, clock
        # What was read, sealed as it was, and when its reading began.
        self._read: dict[tuple[UUID, str], tuple[float, bytes | None]] = {}

    async def key_for(self, project: UUID, provider: str, insist: Insist) -> str:
        """The project's own key, else the deployment's; raises AI_PROVIDER_NOT_CONFIGURED.

        A key that does not open is never replaced by the deployment's: somebody else would pay.
        """
        sealed = await self._sealed(project, provider, insist)
        if sealed is not None:
            return self._open(sealed, project, provider)
        if provider not in self._own:
            raise endings.not_configured(provider)
        return self._own[provider]

    async def _sealed(self, project: UUID, provider: str, insist: Insist) -> bytes | None:
        known = self._read.get((project, provider))
        if known is not None and self._clock() - known[0] < limits.PROVIDER_KEY_CACHE_SECONDS:
            return known[1]

        async def read(connection: psycopg.AsyncConnection) -> bytes | None:
            began = self._clock()
            sealed = await provider_keys.read_sealed(connection, project, provider)
            if len(self._read) >= limits.PROVIDER_KEYS_CACHED:
                self._read.clear()  # reading them again is cheaper than keeping their order
            self._read[project, provider] = began, sealed
            return sealed

        return await insist(read)

    def _open(self, sealed: bytes, project: UUID, provider: str) -> str:
        try:
            return self._ring.open(sealed, _place(project, provider))
        except CannotOpenError as error:
            _tell_unreadable(project, provider, error)
            raise endings.key_unreadable(provider) from error


def seal(ring: KeyRing, project: UUID, provider: str, key: str) -> bytes:
    """A key as it is kept: it opens for this project and this provider only."""
    return ring.seal(key, _place(project, provider))


async def seal_again(connection: psycopg.AsyncConnection, ring: KeyRing, limit: int) -> int:
    """Seals up to `limit` keys that are under an older key of the ring under its first; returns how many.

    A key that is set meanwhile stays. One that does not open is left for its project to set again.
    """
    count = 0
    for row in await provider_keys.sealed_under(connection, ring.older_ids, limit):
        try:
            key = ring.open(row.sealed, _place(row.project_id, row.provider))
        except CannotOpenError as error:
            _tell_unreadable(row.project_id, row.provider, error)
            continue
        sealed = seal(ring, row.project_id, row.provider, key)
        count += await provider_keys.replace_sealed(connection, row, sealed, ring.first_id)
    if count:
        log.info("provider keys sealed again", count=count, key_id=ring.first_id)
    return count


def _place(project: UUID, provider: str) -> str:
    return f"conversation.provider_keys:{project}:{provider}"


def _tell_unreadable(project: UUID, provider: str, error: CannotOpenError) -> None:
    UNREADABLE.labels(provider).inc()
    log.error("provider key does not open", project_id=str(project), provider=provider, cause=str(error))
