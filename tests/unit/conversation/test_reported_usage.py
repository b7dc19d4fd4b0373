"""What providers report, brought into one form: every token in exactly one class."""

from typing import Any

import aiohttp
import pytest

from services.conversation.providers.model import TokenUsage
from services.conversation.providers.openai_chat import _not_answered, _reported


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 2}, TokenUsage(10, 2)),
        # Cached is a part of the input, reasoning a part of the output.
        (
            {
                "prompt_tokens": 11125,
                "completion_tokens": 429,
                "total_tokens": 11554,
                "prompt_tokens_details": {"cached_tokens": 7441},
                "completion_tokens_details": {"reasoning_tokens": 409},
            },
            TokenUsage(11125, 429, 409, 7441),
        ),
        # Reasoning beside the output, as the total tells.
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 20,
                "total_tokens": 70,
                "completion_tokens_details": {"reasoning_tokens": 40},
            },
            TokenUsage(10, 60, 40),
        ),
        # Net of what was written to the cache.
        (
            {"prompt_tokens": 3, "completion_tokens": 550, "prompt_tokens_details": {"cache_creation_tokens": 12304}},
            TokenUsage(12307, 550, cache_write_tokens=12304),
        ),
        # Net of what was read from it too.
        (
            {
                "prompt_tokens": 3,
                "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": 50, "cache_write_tokens": 7},
            },
            TokenUsage(60, 1, cached_tokens=50, cache_write_tokens=7),
        ),
        ({"prompt_tokens": "10", "completion_tokens": 2.0}, TokenUsage(10, 2)),
        ({"prompt_tokens": None, "completion_tokens_details": None}, TokenUsage()),
    ],
)
def test_every_token_is_in_one_class(usage: dict[str, Any], expected: TokenUsage) -> None:
    assert _reported(usage) == [expected]


@pytest.mark.parametrize("usage", [[], "many", {"prompt_tokens": "ten"}, {"prompt_tokens_details": []}, 7])
def test_what_cannot_be_read_is_not_reported(usage: Any) -> None:
    assert _reported(usage) == []


def test_a_connection_that_was_never_made_costs_nothing() -> None:
    failure = _not_answered(aiohttp.ConnectionTimeoutError("connect"))
    assert (failure.error.reason, failure.may_be_billed) == ("AI_PROVIDER_TIMEOUT", False)


def test_a_request_that_was_sent_and_not_answered_may_cost_something() -> None:
    failure = _not_answered(aiohttp.SocketTimeoutError("read"))
    assert (failure.error.reason, failure.may_be_billed) == ("AI_PROVIDER_TIMEOUT", True)
