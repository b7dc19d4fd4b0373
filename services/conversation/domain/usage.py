"""What calls consume and cost: sums, prices, and estimates for calls that were cut. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from kit import pricing
from kit.pricing import TOKENS_MAX, Rates
from services.conversation.domain.tokens import Tokenizer
from threadloom.common.v1.money_pb2 import Money
from threadloom.conversation.v1.message_pb2 import Usage


@dataclass(frozen=True)
class Hold:
    """Money set aside for one call. `stored_rates` is the message `rates` was read from."""

    rates: Rates
    stored_rates: bytes
    granted_output: int
    credits_per_usd: int


def priced(rates: Rates, usage: Usage) -> Usage:
    """The usage of one call with its cost, rounded once (durability.md 27)."""
    return add_usage(usage, _costing(pricing.cost(rates, as_priced(usage))))


def as_priced(usage: Usage) -> pricing.Usage:
    """The tokens by their price class."""
    return pricing.Usage(
        usage.input_tokens,
        usage.output_tokens,
        cached_input=usage.cached_tokens,
        cache_write=usage.cache_write_tokens,
        reasoning=usage.thinking_tokens,
    )


def estimated(tokenizer: Tokenizer, input_tokens: int, text: str, thinking: str) -> Usage:
    """What a call that reported nothing is taken to have consumed."""
    thought = tokenizer.count(thinking)
    return Usage(
        input_tokens=input_tokens,
        output_tokens=tokenizer.count(text) + thought,
        thinking_tokens=thought,
        estimated=True,
    )


def at_least(first: Usage, second: Usage) -> Usage:
    """The larger figure of each class: a count reported in mid-answer is only a lower bound."""
    return bounded(
        Usage(
            input_tokens=max(first.input_tokens, second.input_tokens),
            output_tokens=max(first.output_tokens, second.output_tokens),
            thinking_tokens=max(first.thinking_tokens, second.thinking_tokens),
            cached_tokens=max(first.cached_tokens, second.cached_tokens),
            cache_write_tokens=max(first.cache_write_tokens, second.cache_write_tokens),
            estimated=True,
        )
    )


def bounded(usage: Usage) -> Usage:
    """The same figures, made to fit each other: parts within their whole, nothing negative or absurd."""
    read, written = _bound(usage.input_tokens, TOKENS_MAX), _bound(usage.output_tokens, TOKENS_MAX)
    cached = _bound(usage.cached_tokens, read)
    return Usage(
        input_tokens=read,
        output_tokens=written,
        thinking_tokens=_bound(usage.thinking_tokens, written),
        cached_tokens=cached,
        cache_write_tokens=_bound(usage.cache_write_tokens, read - cached),
        estimated=usage.estimated,
    )


def add_usage(first: Usage, second: Usage) -> Usage:
    """The sum; estimated when either is."""
    cost = first.cost.nano_usd + second.cost.nano_usd
    return Usage(
        input_tokens=first.input_tokens + second.input_tokens,
        output_tokens=first.output_tokens + second.output_tokens,
        thinking_tokens=first.thinking_tokens + second.thinking_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
        cache_write_tokens=first.cache_write_tokens + second.cache_write_tokens,
        cost=Money(nano_usd=cost) if cost else None,
        estimated=first.estimated or second.estimated,
    )


def sum_usage(usages: Iterable[Usage]) -> Usage:
    """The sum of many."""
    total = Usage()
    for one in usages:
        total = add_usage(total, one)
    return total


def untold(total: Usage, told: Usage) -> Usage:
    """What of a total is not in what was told."""
    cost = max(0, total.cost.nano_usd - told.cost.nano_usd)
    return Usage(
        input_tokens=max(0, total.input_tokens - told.input_tokens),
        output_tokens=max(0, total.output_tokens - told.output_tokens),
        thinking_tokens=max(0, total.thinking_tokens - told.thinking_tokens),
        cached_tokens=max(0, total.cached_tokens - told.cached_tokens),
        cache_write_tokens=max(0, total.cache_write_tokens - told.cache_write_tokens),
        cost=Money(nano_usd=cost) if cost else None,
        estimated=total.estimated,
    )


def is_nothing(usage: Usage) -> bool:
    """Whether there is nothing to tell."""
    return not (usage.input_tokens or usage.output_tokens or usage.cost.nano_usd)


def _costing(nano: int) -> Usage:
    return Usage(cost=Money(nano_usd=nano)) if nano else Usage()


def _bound(figure: int, most: int) -> int:
    return max(0, min(figure, most))
