"""What the chaos tests measured, for the summary at the end of the session."""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

# Draws the random points of every chaos test.
SEED = 20_240_607


@dataclass
class Figures:
    """The rounds of one scenario."""

    seconds: list[float] = field(default_factory=list)
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, seconds: float, **counts: int) -> None:
        """One round: how long it took to the end, and what happened in it."""
        self.seconds.append(seconds)
        for name, count in counts.items():
            self.counts[name] += count

    def in_words(self) -> str:
        """One line."""
        counts = "".join(f", {count} {name.replace('_', ' ')}" for name, count in self.counts.items() if count)
        return f"{len(self.seconds)} x, p50 {median(self.seconds):.2f} s, max {max(self.seconds):.2f} s{counts}"


FIGURES: defaultdict[str, Figures] = defaultdict(Figures)
