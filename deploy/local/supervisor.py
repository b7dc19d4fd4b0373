"""Keeps children running: starts an ended one again, stops all in order, never leaves one behind."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from deploy.local.private_files import read_json, write_json
from deploy.local.processes import Child, Program, born, end_process

# A child that ends at once is not started in a tight loop.
FIRST_PAUSE_SECONDS = 0.1
PAUSE_MAX_SECONDS = 5.0
# One that ran this long has recovered: the next pause is the first one again.
STEADY_SECONDS = 10.0
# In this order, each with the time it gets: below 10 s in all; services drain first (durability.md 30).
STOP_ORDER: tuple[tuple[str, float], ...] = (
    ("gateway", 2.0),
    ("conversation", 5.4),
    # Its calls are one short transaction each, and whoever makes them has ended.
    ("billing", 0.4),
    ("provider", 0.2),
    ("nats", 0.3),
    ("postgres", 1.0),
)
# What is left of it when somebody presses Ctrl-C again.
HURRIED_SECONDS = 0.2
# A signal to the whole group reaches us twice, the second time passed on by make.
ONE_REQUEST_SECONDS = 0.5
LEFTOVER_SECONDS = 3.0
POLL_SECONDS = 0.02


class Stopping(Exception):
    """Somebody asked for the end."""


class StopRequests:
    """Counts Ctrl-C, SIGTERM and SIGHUP. A handler that only counts interrupts nothing half-way."""

    def __init__(self) -> None:
        self.count = 0
        self._last = -ONE_REQUEST_SECONDS

    def listen(self) -> None:
        """Takes the signals over, except those a caller such as nohup had switched off."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._count)

    def check(self) -> None:
        """Raises Stopping once one came."""
        if self.count:
            raise Stopping

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last >= ONE_REQUEST_SECONDS:
            self.count += 1
        self._last = now


@dataclass
class Restart:
    """When an ended child is started again."""

    due: float
    pause_seconds: float


class Supervisor:
    """The children of a stack. `changed` is called after each restart."""

    def __init__(self, record: Path, say: Callable[[str], None], changed: Callable[[], None]) -> None:
        """`record` is where the ids of the children are kept for a successor."""
        self._record, self._say, self._changed = record, say, changed
        self._children: dict[str, Child] = {}
        self._restarts: dict[str, Restart] = {}

    def start(self, program: Program) -> Child:
        """Starts a child and keeps it from now on; a second one of the same name takes the first one's place."""
        child = self._children[program.name] = Child(program)
        children = [{"pid": one.pid, "born": born(one.pid)} for one in self._children.values()]
        write_json(self._record, {"children": children})
        return child

    def child(self, name: str) -> Child:
        """The process that has this name now. Raises KeyError."""
        return self._children[name]

    def pids(self) -> dict[str, list[int]]:
        """The process ids by service."""
        found: dict[str, list[int]] = {}
        for child in self._children.values():
            found.setdefault(child.program.service, []).append(child.pid)
        return found

    def tend(self) -> None:
        """Starts children again that have ended. Called again and again."""
        for name, child in list(self._children.items()):
            if child.exit_code is None:
                continue
            restart = self._restarts.get(name)
            if restart is None or restart.due == 0:
                self._schedule(child, restart)
            elif time.monotonic() >= restart.due:
                restart.due = 0
                pid = self.start(child.program).pid
                self._changed()
                self._say(f"{name} runs again (pid {pid})")

    def stop(self, is_hurried: Callable[[], bool]) -> None:
        """Stops all in order; kills what does not stop in its time."""
        self._restarts.clear()
        for service, seconds in STOP_ORDER:
            children = [child for child in self._children.values() if child.program.service == service]
            _stop_together(children, seconds, is_hurried)
        self._record.unlink(missing_ok=True)

    def _schedule(self, child: Child, before: Restart | None) -> None:
        now = time.monotonic()
        steady = before is None or now - child.started > STEADY_SECONDS
        pause = FIRST_PAUSE_SECONDS if before is None or steady else min(before.pause_seconds * 2, PAUSE_MAX_SECONDS)
        self._restarts[child.program.name] = Restart(now + pause, pause)
        where = "" if steady else f"; {child.program.log} may say why"
        self._say(f"{child.program.name} (pid {child.pid}) {child.end_in_words()}, starting it again{where}")


def end_leftovers(record: Path, say: Callable[[str], None]) -> None:
    """Ends the children of a supervisor that was killed, where the system did not do so itself."""
    children = read_json(record).get("children", [])
    for child in children if isinstance(children, list) else []:
        # An id alone may name somebody else's process by now; with its birth it cannot.
        if child["born"] is not None and born(child["pid"]) == child["born"]:
            say(f"Ending a process the last run left behind (pid {child['pid']})")
            end_process(child["pid"], LEFTOVER_SECONDS)
    record.unlink(missing_ok=True)


def _stop_together(children: list[Child], seconds: float, is_hurried: Callable[[], bool]) -> None:
    for child in children:
        child.send(child.program.stop_signal)
    begun = time.monotonic()
    while any(child.exit_code is None for child in children):
        if time.monotonic() - begun > (HURRIED_SECONDS if is_hurried() else seconds):
            break
        time.sleep(POLL_SECONDS)
    for child in children:
        if child.exit_code is None:
            child.kill()
