"""Watching that an answer keeps to the output its hold pays for. Pure."""

from services.conversation.domain.tokens import Tokenizer

# Counted at once at most; see tokens.PIECE_CHARS.
BATCH_BYTES = 4_000


class OutputMeter:
    """Counts an answer's tokens while it streams, in batches: a token is at least a byte.

    Texts counted apart may be a token more than together, so each batch after the first excuses one.
    """

    def __init__(self, granted: int, tokenizer: Tokenizer) -> None:
        self._limit, self._tokenizer = granted + tokenizer.output_slack(granted), tokenizer
        self._counted = 0  # tokens of the batches so far
        self._bytes = 0  # of the batch that grows
        self._pieces: list[str] = []

    def add(self, text: str, size: int) -> None:
        """Takes a piece of the answer of so many bytes."""
        self._pieces.append(text)
        self._bytes += size
        if self._bytes >= BATCH_BYTES:
            self._count()

    @property
    def is_passed(self) -> bool:
        """Whether the answer is longer than was granted."""
        if self._counted + self._bytes > self._limit:
            self._count()
        return self._counted > self._limit

    def _count(self) -> None:
        if self._pieces:
            excused = 1 if self._counted else 0
            self._counted += max(0, self._tokenizer.count("".join(self._pieces)) - excused)
            self._pieces.clear()
            self._bytes = 0
