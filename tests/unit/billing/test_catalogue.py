"""Which slugs have a published price: those on the list, and none that only resemble them."""

from datetime import UTC, datetime

import genai_prices
import pytest
from genai_prices.data_snapshot import get_snapshot

from kit.money import NANO_PER_USD
from services.billing.catalogue import published_rates

NOW = datetime(2026, 6, 1, 20, tzinfo=UTC)


def input_price(model: str, at: datetime = NOW) -> int | None:
    """Nano-USD for a million input tokens."""
    rates = published_rates(model, at)
    return None if rates is None else rates.base.input


@pytest.mark.parametrize(
    "model",
    [
        "gpt-4o-mini", "gpt-4o-mini-2024-07-18", "GPT-4o-mini", "gpt-5-mini", "gpt-4o", "gpt-4o-2024-08-06",
        "claude-sonnet-4-5", "claude-sonnet-4-5-20250929", "claude-opus-4-1", "gemini-2.5-pro", "grok-4",
        "mistral-large-latest", "deepseek-chat", "o3", "gpt-4.1-nano",
    ],
)  # fmt: skip
def test_a_listed_model_has_its_listed_price(model: str) -> None:
    usage = genai_prices.Usage(input_tokens=10**6, output_tokens=10**6)
    rates = published_rates(model, NOW)
    assert rates is not None
    listed = genai_prices.calc_price(usage, model, genai_request_timestamp=NOW)
    prices = rates.prices_for(10**6)
    assert (prices.input, prices.output) == (
        listed.input_price * NANO_PER_USD,
        listed.output_price * NANO_PER_USD,
    )


@pytest.mark.parametrize(
    "model",
    [
        "gpt-4o-miniature", "gpt-4o-mini-2031-01-01", "gpt-4o-mini-99", "gpt-9-ultra", "fake-model", "threadloom-demo",
        # The list would match these by a pattern.
        "claude-sonnet-4-5-turbo", "claude-sonnet-4-59", "claude-sonnet-4-5-20250929-v2", "claude-sonnet-4-5-20251399",
        "claude-sonnet-4-5-2025-0929", "gemini-2.5-prodigy", "claude-3-5-sonnet-latest", "deepseek-chatty",
        # Of an aggregator's list, whose prices are not the maker's.
        "openai/gpt-4o", "anthropic/claude-sonnet-4-5", "x/grok-4", "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
        # Tuned models cost more than what they are made of.
        "ft:gpt-4o-mini:acme::1", "claude-sonnet-4-5 ", "", " ", "-20250929",
    ],
)  # fmt: skip
def test_a_slug_that_is_not_listed_has_no_price(model: str) -> None:
    assert published_rates(model, NOW) is None


def test_a_snapshot_with_a_price_of_its_own_has_that() -> None:
    assert (input_price("gpt-4o-2024-05-13"), input_price("gpt-4o")) == (5 * NANO_PER_USD, 25 * NANO_PER_USD // 10)


def test_a_price_by_the_hour_is_that_of_the_hour() -> None:
    night, day = datetime(2026, 6, 1, 3, tzinfo=UTC), datetime(2026, 6, 1, 20, tzinfo=UTC)
    assert input_price("deepseek-chat", night) != input_price("deepseek-chat", day)


def test_every_slug_that_is_priced_is_named_by_the_list_itself() -> None:
    # Each listed id with something behind it: the list's patterns match many of these.
    ids = {model.id for provider in get_snapshot().providers for model in provider.models}
    assert [id for id in ids if (made := f"{id}-made-up") not in ids and published_rates(made, NOW)] == []
