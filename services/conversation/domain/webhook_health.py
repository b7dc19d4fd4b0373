"""Which webhooks failed last, as far as one process knows, and how much each is tried for now. Pure."""

from typing import NamedTuple
from uuid import UUID

from services.conversation import limits


class Failing(NamedTuple):
    """`failures` in a row; no try before `rests_until`, in seconds of a monotonic clock."""

    failures: int
    rests_until: float


class Health:
    """What the newest tries of each webhook came to. Nothing of it outlives the process: it spares work, no more."""

    def __init__(self) -> None:
        self._failing: dict[UUID, Failing] = {}

    def note(self, webhook: UUID, is_well: bool, now: float) -> None:
        """A try has ended."""
        before = self._failing.pop(webhook, None)
        if is_well:
            return
        failures = before.failures + 1 if before is not None else 1
        if len(self._failing) >= limits.WEBHOOKS_REMEMBERED:
            del self._failing[next(iter(self._failing))]  # the one that failed longest ago
        self._failing[webhook] = Failing(failures, now + rest_after(failures))

    def rooms(self, now: float) -> dict[UUID, int]:
        """How many tries at a time those may have that failed last: one, or none while they rest."""
        return {webhook: int(failing.rests_until <= now) for webhook, failing in self._failing.items()}


def rest_after(failures: int) -> float:
    """Seconds without a try after so many failures in a row; the first may be of one delivery."""
    if failures < 2:
        return 0.0
    doublings = min(failures - 2, 30)
    return min(limits.WEBHOOK_REST_SECONDS * 2.0**doublings, limits.WEBHOOK_REST_MAX_SECONDS)
