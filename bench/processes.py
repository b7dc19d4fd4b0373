"""What the processes of a subject use: CPU and memory, read from /proc."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

TICKS = os.sysconf("SC_CLK_TCK")  # a second of CPU; 100 on Linux, so a figure has steps of 10 ms


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far by process: its name, such as `gateway`, and its id."""

    seconds: Mapping[tuple[str, int], float]

    def since(self, earlier: "Usage") -> dict[str, float]:
        """CPU seconds since then, by name. A process that is new counts from its start."""
        found: dict[str, float] = {}
        for key, seconds in self.seconds.items():
            found[key[0]] = found.get(key[0], 0.0) + seconds - earlier.seconds.get(key, 0.0)
        return found


class Tree:
    """A process and all below it. `names`: what to call those that are known, their children with them."""

    def __init__(self, pid: int, names: Mapping[int, str]) -> None:
        self._root, self._names = pid, names

    def members(self) -> list[tuple[str, int]]:
        """Every process now, by name and id."""
        below: dict[int, list[int]] = {}
        for pid in psutil.pids():
            below.setdefault(_parent(pid), []).append(pid)
        found: list[tuple[str, int]] = []
        waiting = [(self._root, self._names.get(self._root, "other"))]
        while waiting:
            pid, name = waiting.pop()
            found.append((name, pid))
            waiting += [(child, self._names.get(child, name)) for child in below.get(pid, ())]
        return found

    def cpu(self) -> Usage:
        """What each has used, its ended children that were waited for included."""
        return Usage({(name, pid): _cpu_seconds(pid) for name, pid in self.members()})

    def pss_kib(self) -> Counter[str]:
        """Memory by name, shared pages counted once."""
        found: Counter[str] = Counter()
        for name, pid in self.members():
            found[name] += _pss_kib(pid)
        return found


def thread_seconds(pid: int) -> dict[tuple[int, str], float]:
    """CPU seconds of each thread of a process, by its id and name."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        try:
            # Nanoseconds, where the kernel keeps them; ticks are too coarse for a thread.
            nano = int((folder / "schedstat").read_text().split()[0])
            found[int(folder.name), (folder / "comm").read_text().strip()] = nano / 1e9
        except OSError:  # it has just ended
            continue
    return found


def _stat(pid: int) -> list[str]:
    """The fields behind the command's name: the first is the 3rd of the whole line. Empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _cpu_seconds(pid: int) -> float:
    # utime, stime, cutime, cstime: the 14th to the 17th.
    return sum(map(int, _stat(pid)[11:15])) / TICKS


def _pss_kib(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass  # it has just ended
    return 0
