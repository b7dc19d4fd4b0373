"""How the fake counts tokens: as OpenAI's models since gpt-4o do."""

from functools import lru_cache
from typing import Any

from bpe_openai import get_encoding

PIECE = 50_000  # characters; the tokenizer refuses more than 200,000 tokens at once
# What the published recipe adds to a request and to each of its messages.
REQUEST_TOKENS, MESSAGE_TOKENS = 3, 3


@lru_cache(maxsize=1024)
def count_tokens(text: str) -> int:
    encode = get_encoding("o200k_base").encode_ordinary
    return sum(len(encode(text[at : at + PIECE])) for at in range(0, len(text), PIECE))


def prompt_tokens(texts: list[str]) -> int:
    """Of a request with messages of these texts."""
    return REQUEST_TOKENS + sum(MESSAGE_TOKENS + count_tokens(text) for text in texts)


def longest_within(pieces: tuple[str, ...], tokens: int) -> tuple[str, ...]:
    """As many pieces from the start as are at most so many tokens together."""
    if count_tokens("".join(pieces)) <= tokens:
        return pieces
    low, high = 0, len(pieces)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count_tokens("".join(pieces[:middle])) <= tokens else (low, middle - 1)
    return pieces[:low]


def bill(usage: dict[str, Any]) -> dict[str, int]:
    """The figures of a usage object, flat."""
    return {
        "input": usage["prompt_tokens"],
        "output": usage["completion_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "reasoning": usage["completion_tokens_details"]["reasoning_tokens"],
    }
