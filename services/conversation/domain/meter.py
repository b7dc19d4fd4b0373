"""Watching that an answer keeps to the output its hold pays for. Pure."""

from collections.abc import Callable


class OutputMeter:
    """Counts an answer's tokens while it streams.

    Cheap for providers that honour the limit they were given: a token is at least a byte, so
    nothing is counted until the bytes alone could pass it, and then only where they could again.
    """

    def __init__(self, granted: int, count: Callable[[str], int]) -> None:
        self._granted, self._count = granted, count
        self._counted = 0  # tokens of what was counted
        self._bytes = 0  # of what was not counted yet
        self._pieces: list[str] = []
        self._whole: list[str] = []

    def add(self, text: str, size: int) -> None:
        """Takes a piece of the answer of so many bytes."""
        self._pieces.append(text)
        self._bytes += size

    @property
    def is_passed(self) -> bool:
        """Whether the answer is longer than was granted."""
        if self._counted + self._bytes <= self._granted:
            return False
        self._counted += self._count("".join(self._pieces))
        self._whole += self._pieces
        self._pieces.clear()
        self._bytes = 0
        if self._counted > self._granted:
            # Pieces counted apart are a few tokens more than the text: near the limit the whole decides.
            self._counted = self._count("".join(self._whole))
        return self._counted > self._granted
