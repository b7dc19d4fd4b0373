"""Whether what failed is tried again, and when: an attempt at the provider, a row of the outbox. Pure."""

from services.conversation import limits
from services.conversation.limits import ATTEMPTS_PER_TURN, RETRY_DELAY_MAX_SECONDS, RETRY_DELAY_SECONDS


def retry_delay(attempt: int, is_retryable: bool, has_output: bool, asked_seconds: float | None) -> float | None:
    """Seconds to wait before the next attempt, or None to give up.

    `attempt` is the one that failed, from 1. Never once output was shown: a second
    answer behind half a first one is worse than an error. `asked_seconds` is the
    provider's Retry-After; one longer than we wait is handed to the caller instead.
    """
    if has_output or not is_retryable or attempt >= ATTEMPTS_PER_TURN:
        return None
    if asked_seconds is not None:
        return asked_seconds if asked_seconds <= RETRY_DELAY_MAX_SECONDS else None
    doubled: float = RETRY_DELAY_SECONDS * 2 ** (attempt - 1)
    return min(doubled, RETRY_DELAY_MAX_SECONDS)


# The model or its provider failed; money, cancels and limits of ours would meet the next model as well.
FALLBACK_REASONS = frozenset(
    ("AI_PROVIDER_ERROR", "AI_PROVIDER_TIMEOUT", "AI_RATE_LIMITED", "AI_PROVIDER_NOT_CONFIGURED", "MODEL_NOT_PRICED")
)


def falls_back(reason: str, has_output: bool) -> bool:
    """Whether a run goes on with its next fallback model when the current one is not tried any more.

    Each fallback gets one attempt, and what is left of the turn's retries. Never once
    output was shown, as with retries.
    """
    return not has_output and reason in FALLBACK_REASONS


def pause_after_refusals(refusals: int) -> float:
    """Seconds until a row of the outbox that was refused so often is sent again: a fault of ours takes time to mend."""
    doubled: float = limits.OUTBOX_PAUSE_SECONDS * 2 ** min(refusals - 1, limits.OUTBOX_DOUBLINGS)
    return doubled
