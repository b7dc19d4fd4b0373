"""How many tokens a text is, for money (durability.md 26). Pure.

The context's estimate (`history.estimate_tokens`, R92) is another number and another
promise: four characters a token undercount Chinese by half, and a hold must not.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpe_openai import Encoding

# The vocabulary of OpenAI's models since gpt-4o. Those of others are smaller and need a few tokens more for
# the same text: the margin below is for them.
VOCABULARY = "o200k_base"
# What a chat protocol puts around a message (role, separators) and around them all; published figures are 3 to 4.
MESSAGE_TOKENS = 4
FRAME_TOKENS = 3
MARGIN_PERCENT = 10
# The tokenizer refuses texts of more than 200,000 tokens, and a character may be four of them.
PIECE_CHARS = 50_000
# A thread of its own counts longer texts: the loop would stand still for more than about 2 ms.
LONG_CHARS = 50_000


@lru_cache(maxsize=1)
def vocabulary() -> "Encoding":
    """The vocabulary; reading it takes a second, once."""
    from bpe_openai import get_encoding  # reads two of them when it is imported: a process asks in a thread

    return get_encoding(VOCABULARY)


def count(text: str) -> int:
    """Tokens of a text; of a very long one a few too many, where it is cut to be counted."""
    encode = vocabulary().encode_ordinary
    return sum(len(encode(text[at : at + PIECE_CHARS])) for at in range(0, len(text), PIECE_CHARS))


def count_input(messages: Iterable[Mapping[str, Any]]) -> int:
    """Tokens a request gives the model to read, as near as can be told."""
    return FRAME_TOKENS + sum(MESSAGE_TOKENS + count(message["content"]) for message in messages)


def upper_bound(counted: int) -> int:
    """The most input tokens a provider may report for a request of so many counted ones."""
    return counted + -(-counted * MARGIN_PERCENT // 100)
