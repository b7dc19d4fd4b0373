"""How many tokens a text is, for money (durability.md 26, decision 0016). Pure.

The context's estimate (`history.estimate_tokens`, R92) is another number and another
promise: four characters a token undercount Chinese by half, and a hold must not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpe_openai import Encoding

Messages = Sequence[Mapping[str, Any]]

NEWEST = "o200k_base"
# Models whose vocabulary is public, by how their slug begins; the first that fits.
VOCABULARIES = (
    *(
        (family, NEWEST)
        for family in ("gpt-4o", "chatgpt-4o", "gpt-4.1", "gpt-4.5", "gpt-5", "gpt-oss", "o1", "o3", "o4")
    ),
    *((family, "cl100k_base") for family in ("gpt-4", "gpt-3.5")),
)
# What a chat protocol puts around a message (role, separators) and around them all; published figures are 3 to 4.
MESSAGE_TOKENS = 4
FRAME_TOKENS = 3
# On top of a count by the model's own vocabulary.
MARGIN_PERCENT = 10
# Templates of models nobody described say more around the messages, such as the date.
UNKNOWN_FRAME_TOKENS = 64
# How much longer than granted an answer may be by a count that is not the model's own.
UNKNOWN_SLACK_PERCENT = 10
# Counted at once: the tokenizer lets nothing else run meanwhile, and this is a fraction of a millisecond.
PIECE_CHARS = 4_000
# A thread of its own counts longer texts, piece by piece.
LONG_CHARS = 8_000


@lru_cache
def vocabulary(name: str) -> "Encoding":
    """A vocabulary; reading the first takes a second, once."""
    from bpe_openai import get_encoding  # reads two of them when it is imported: a process asks in a thread

    return get_encoding(name)


def load() -> None:
    """Reads every vocabulary."""
    for name in {name for _, name in VOCABULARIES}:
        vocabulary(name)


@dataclass(frozen=True)
class Tokenizer:
    """Counts for one model. `is_own`: by the model's own vocabulary; otherwise every count is a guess."""

    name: str
    is_own: bool

    def count(self, text: str) -> int:
        """Tokens of a text; of a long one a few too many, where it is cut to be counted."""
        encode = vocabulary(self.name).encode_ordinary
        return sum(len(encode(text[at : at + PIECE_CHARS])) for at in range(0, len(text), PIECE_CHARS))

    def count_input(self, messages: Messages) -> int:
        """Tokens a request gives the model to read, as near as can be told."""
        return FRAME_TOKENS + sum(MESSAGE_TOKENS + self.count(message["content"]) for message in messages)

    def input_bound(self, messages: Messages, counted: int) -> int:
        """The most input tokens a provider may report for a request of so many counted ones.

        A vocabulary nobody knows makes a token of a byte at worst: some do of most scripts but Latin.
        """
        if self.is_own:
            return counted + -(-counted * MARGIN_PERCENT // 100)
        return UNKNOWN_FRAME_TOKENS + sum(MESSAGE_TOKENS + _bytes(message["content"]) for message in messages)

    def output_slack(self, granted: int) -> int:
        """Tokens by which an answer may pass its limit and still keep it by the provider's own count."""
        return 0 if self.is_own else -(-granted * UNKNOWN_SLACK_PERCENT // 100)


@lru_cache(maxsize=1024)
def tokenizer_of(model: str) -> Tokenizer:
    """The model's tokenizer. Of a slug such as `openai/gpt-4o` or `ft:gpt-4o:acme` the model's name counts."""
    name = model.rpartition("/")[2].removeprefix("ft:")
    found = next((vocabulary for family, vocabulary in VOCABULARIES if name.startswith(family)), None)
    return Tokenizer(found or NEWEST, is_own=found is not None)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
