"""`make run` as a test sees it: a process, what it prints, the file it writes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import psutil

from deploy.local.ports import free_port
from deploy.local.processes import born, wait_until
from deploy.local.service_programs import ROOT

READY_SECONDS = 90.0
OURS = ("DATABASE_URL", "NATS_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL")


def stack_environ(data_dir: Path, port: int, **settings: str) -> dict[str, str]:
    """The environment of a stack of its own, with no setting of the developer's."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS and "THREADLOOM" not in name}
    return {**kept, "THREADLOOM_DATA_DIR": str(data_dir), "THREADLOOM_PORT": str(port), **settings}


def run_command(
    environ: dict[str, str], *arguments: str, sent: str = "", seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs a command of the local stack to its end. `sent` is what it reads from stdin."""
    command = [sys.executable, "-m", "deploy.local", *arguments]
    return subprocess.run(
        command, env=environ, cwd=ROOT, input=sent, capture_output=True, text=True, timeout=seconds, check=False
    )


class LocalStack:
    """A stack started by `python -m deploy.local up`; killed at the end when a test left it running."""

    def __init__(self, folder: Path, **settings: str) -> None:
        """`folder`: what it keeps lies in folder/data; a second one on the same folder finds it."""
        self.data_dir, self.port = folder / "data", free_port()
        self.environ = stack_environ(self.data_dir, self.port, **settings)
        self._log = folder / f"up-{self.port}.log"

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.local", "up"],
                env=self.environ,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its children go with it
        self.process.wait()
        print(self.output())

    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float = READY_SECONDS) -> re.Match[str]:
        """Waits until it has printed this. Raises AssertionError with all it printed."""
        wait_until(lambda: bool(re.search(pattern, self.output())) or self.process.poll() is not None, seconds)
        found = re.search(pattern, self.output())
        assert found, f"{pattern!r} was not printed:\n{self.output()}"
        return found

    def wait_ready(self) -> Self:
        """Waits for the ready line."""
        self.wait_for(r"(?m)^curl .*$")
        return self

    def file(self) -> dict[str, Any]:
        """stack.json."""
        found: dict[str, Any] = json.loads((self.data_dir / "stack.json").read_text())
        return found

    def processes(self) -> set[tuple[int, float]]:
        """Every process of the stack, Postgres' children too, by its id and birth."""
        found = set()
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            birth = born(process.pid)
            if birth is not None:
                found.add((process.pid, birth))
        return found

    def stop(self, seconds: float) -> int:
        """SIGTERM; its exit code. Raises TimeoutExpired when it takes longer."""
        self.process.terminate()
        return self.process.wait(seconds)


def still_there(processes: set[tuple[int, float]]) -> set[int]:
    """Which of them have not ended."""
    return {pid for pid, birth in processes if born(pid) == birth}
