"""The figures of all rounds, and what is computed from them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.workloads import Figures

DIRECT = "direct"


@dataclass(frozen=True)
class Value:
    """The median of the rounds, and their least and most."""

    middle: float
    least: float
    most: float


def value(numbers: Sequence[float]) -> Value | None:
    """None when there are no numbers."""
    return Value(statistics.median(numbers), min(numbers), max(numbers)) if numbers else None


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which this share of them lies. There must be one."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Results:
    """Figures by subject and workload, one for each round. A void round has none, and a reason."""

    rounds: dict[tuple[str, str], list[Figures]] = field(default_factory=dict)
    void: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    shares: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, subject: str, workload: str, figures: Figures) -> None:
        """One round's figures."""
        self.rounds.setdefault((subject, workload), []).append(figures)

    def add_void(self, subject: str, workload: str, reason: str) -> None:
        """A round whose figure cannot be made."""
        self.void.setdefault((subject, workload), []).append(reason)

    def number(self, subject: str, workload: str, name: str) -> Value | None:
        """A number over the rounds."""
        found = self.rounds.get((subject, workload), [])
        return value([figures.numbers[name] for figures in found if name in figures.numbers])

    def all_processes(self, subject: str, workload: str) -> Value | None:
        """What is measured by process, of all together: CPU microseconds a delta, or KiB an open stream."""
        return value([sum(figures.by_process.values()) for figures in self.rounds.get((subject, workload), [])])

    def by_process(self, subject: str, workload: str) -> dict[str, float]:
        """The same by process: medians."""
        found = self.rounds.get((subject, workload), [])
        names = dict.fromkeys(name for figures in found for name in figures.by_process)
        return {name: statistics.median(figures.by_process.get(name, 0.0) for figures in found) for name in names}

    def quantile(self, subject: str, workload: str, name: str, share: float) -> Value | None:
        """A percentile: of the samples of all rounds together, and its least and most by round."""
        found = [
            figures.samples[name] for figures in self.rounds.get((subject, workload), []) if name in figures.samples
        ]
        if not found:
            return None
        by_round = [percentile(samples, share) for samples in found]
        pooled = percentile([sample for samples in found for sample in samples], share)
        return Value(pooled, min(by_round), max(by_round))

    def added(self, subject: str, workload: str, name: str, share: float) -> Value | None:
        """A percentile less the same of the direct stream."""
        own, base = self.quantile(subject, workload, name, share), self.quantile(DIRECT, workload, name, share)
        if own is None or base is None:
            return None
        return Value(own.middle - base.middle, own.least - base.middle, own.most - base.middle)
