"""One retry budget a turn, whatever fails (reports.md 194 to 198)."""

import pytest

from services.conversation.domain.retries import falls_back, pause_after_refusals, retry_delay


def test_a_retryable_failure_is_tried_three_times_in_all() -> None:
    delays = [retry_delay(attempt, True, False, None) for attempt in (1, 2, 3, 4)]
    assert delays == [0.5, 1.0, None, None]


def test_what_cannot_be_retried_is_not() -> None:
    assert retry_delay(1, False, False, None) is None
    assert retry_delay(1, False, False, 1.0) is None


def test_nothing_is_retried_once_output_was_shown() -> None:
    assert retry_delay(1, True, True, None) is None
    assert retry_delay(1, True, True, 0.0) is None


@pytest.mark.parametrize("asked", [0.0, 0.3, 10.0])
def test_a_short_retry_after_is_kept_to_the_letter(asked: float) -> None:
    assert retry_delay(2, True, False, asked) == asked


@pytest.mark.parametrize("asked", [10.001, 3600.0])
def test_a_long_retry_after_is_left_to_the_caller(asked: float) -> None:
    assert retry_delay(1, True, False, asked) is None


def test_the_budget_counts_also_when_the_provider_names_a_delay() -> None:
    assert retry_delay(3, True, False, 0.1) is None


def test_a_refused_row_is_sent_again_ever_more_seldom_but_at_least_every_64_seconds() -> None:
    assert [pause_after_refusals(refusals) for refusals in (1, 2, 8, 9, 1000)] == [0.5, 1.0, 64.0, 64.0, 64.0]


PROVIDER_S = ["AI_PROVIDER_ERROR", "AI_PROVIDER_TIMEOUT", "AI_RATE_LIMITED", "AI_PROVIDER_NOT_CONFIGURED"]


@pytest.mark.parametrize("reason", [*PROVIDER_S, "MODEL_NOT_PRICED"])
def test_a_failure_of_the_model_is_followed_by_the_next_one_until_output_was_shown(reason: str) -> None:
    assert falls_back(reason, has_output=False)
    assert not falls_back(reason, has_output=True)


@pytest.mark.parametrize("reason", ["QUOTA_EXCEEDED", "AI_BUDGET_EXCEEDED", "CONTEXT_TOO_LARGE", "INTERNAL_ERROR"])
def test_what_would_meet_every_model_is_no_reason_for_another(reason: str) -> None:
    assert not falls_back(reason, has_output=False)


def test_a_fallback_after_three_attempts_gets_one_and_no_retry() -> None:
    assert retry_delay(4, True, False, None) is None
