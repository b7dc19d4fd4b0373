"""Child processes: how one is started, watched and stopped.

A child has a session of its own (the terminal's Ctrl-C is not for it) and dies with
the thread that started it (`guard.py`): start children from the main thread.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

GUARD = Path(__file__).with_name("guard.py")
# How often a condition is looked at while waiting for it.
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 15


class StackError(Exception):
    """Something a person must put right; the message says what."""


@dataclass(frozen=True)
class Account:
    """Whom a process runs as, when not as ourselves."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True)
class Program:
    """How one process is started. `name` is the service and its number: `gateway-1`."""

    name: str
    command: tuple[str, ...]
    log: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = Path("/")
    account: Account | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    # What it gets when its parent is gone.
    orphan_signal: signal.Signals = signal.SIGKILL

    @property
    def service(self) -> str:
        """The name without its number."""
        return self.name.rpartition("-")[0]


class Child:
    """A started Program."""

    def __init__(self, program: Program) -> None:
        """Starts it. Raises OSError when the log cannot be written."""
        self.program = program
        self.started = time.monotonic()
        self._log_start = _size(program.log)
        with open(os.open(program.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                _guarded(program),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=program.cwd,
                env=dict(program.environ),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id; the guard becomes the program, so it never changes."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal when one ended it."""
        return self._process.poll()

    def end_in_words(self) -> str:
        """How it ended, for a person."""
        code = self.exit_code
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with code {code}"
        return f"was ended by {signal.Signals(-code).name}"

    def log_tail(self) -> str:
        """The last lines it wrote since it was started."""
        with contextlib.suppress(OSError), open(self.program.log, "rb") as log:
            log.seek(self._log_start)
            return "\n".join(log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return ""

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; one that is gone already is fine."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Waits for its end; False when it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0.0))
        return self.exit_code is not None

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def stop(self, seconds: float) -> None:
        """Asks it to stop; kills it when it has not after `seconds`."""
        self.send(self.program.stop_signal)
        if not self.wait(seconds):
            self.kill()


def run_to_end(program: Program, seconds: float) -> None:
    """Runs a program that ends by itself. Raises StackError with its last lines when it fails or takes longer."""
    run_all_to_end([program], seconds)


def run_all_to_end(programs: Sequence[Program], seconds: float) -> None:
    """Runs several at the same time. Raises StackError of the first in the list that fails or takes longer."""
    children: list[Child] = []
    deadline = time.monotonic() + seconds
    try:
        children.extend(map(Child, programs))
        unfinished = [child for child in children if not child.wait(deadline - time.monotonic())]
    finally:
        for child in children:
            if child.exit_code is None:
                child.kill()
    for child in children:
        if child in unfinished:
            raise _failure(child, f"did not finish within {seconds:.0f} s")
        if child.exit_code != 0:
            raise _failure(child, child.end_in_words())


def never_mind() -> None:
    """The check of a wait nothing can make pointless."""


def wait_until(is_so: Callable[[], bool], seconds: float, check: Callable[[], None] = never_mind) -> bool:
    """Waits for a condition; False when the time is over. `check` raises when waiting has become pointless."""
    deadline = time.monotonic() + seconds
    while True:
        check()
        if is_so():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)


def wait_ready(
    child: Child, is_ready: Callable[[], bool], seconds: float, check: Callable[[], None] = never_mind
) -> None:
    """Waits until a child is ready. Raises StackError when it ends before that or is not ready in time."""

    def still_alive() -> None:
        check()
        if child.exit_code is not None:
            raise _failure(child, child.end_in_words() + " while starting")

    if not wait_until(is_ready, seconds, still_alive):
        raise _failure(child, f"is not ready after {seconds:.0f} s")


def born(pid: int) -> float | None:
    """When a process was started (seconds since 1970): with its id it names a process for good. None when gone."""
    try:
        process = psutil.Process(pid)
        # One that only waits to be buried has ended.
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def end_process(pid: int, seconds: float) -> None:
    """Ends a process that is not our child: SIGTERM, after `seconds` SIGKILL."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.terminate()
        try:
            process.wait(seconds)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(seconds)


def listener(port: int) -> str | None:
    """Who listens on a TCP port, as `name (pid 1)`; None when that cannot be seen."""
    try:
        found = [
            c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr and c.laddr.port == port
        ]
    except (psutil.Error, OSError):
        found = _own_listeners(port)
    for pid in found:
        with contextlib.suppress(psutil.Error):
            if pid is not None:
                return f"{psutil.Process(pid).name()} (pid {pid})"
    return None


def command_line(pid: int) -> str:
    """The command of a process; empty when it is gone or hidden."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def working_in(folder: Path) -> list[int]:
    """The processes whose working directory is `folder`, as far as they can be seen."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(folder):
                found.append(process.pid)
    return found


def _own_listeners(port: int) -> list[int | None]:
    # macOS shows all connections to root only; those of our own processes are always visible.
    found: list[int | None] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if any(_listens(one, port) for one in process.net_connections("tcp")):
                found.append(process.pid)
    return found


def _listens(connection: Any, port: int) -> bool:
    return bool(connection.status == "LISTEN" and connection.laddr and connection.laddr.port == port)


def _failure(child: Child, what: str) -> StackError:
    return StackError(f"{child.program.name} {what}; the end of {child.program.log}:\n{child.log_tail()}")


def _guarded(program: Program) -> list[str]:
    account = program.account
    user = [str(account.uid), str(account.gid)] if account else ["-", "-"]
    # -I -S: nothing of the environment and no packages, which makes it 15 ms.
    python = [sys.executable, "-I", "-S", str(GUARD)]
    return [*python, str(os.getpid()), str(int(program.orphan_signal)), *user, *program.command]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
