"""The supervisor, over real small processes."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from deploy.local.processes import Program, StackError, born, run_all_to_end, run_to_end, wait_until
from deploy.local.supervisor import Supervisor, end_leftovers

SECONDS = 10.0
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
# A parent that starts a child as we do, tells its pid, and waits to be killed.
PARENT = """
import sys, time
from pathlib import Path
from deploy.local.processes import Child, Program
print(Child(Program("x-1", (sys.executable, "-c", "import time; time.sleep(600)"), Path(sys.argv[1]))).pid, flush=True)
time.sleep(600)
"""


def a_program(folder: Path, name: str, code: str, *arguments: str) -> Program:
    return Program(name, (sys.executable, "-c", code, *arguments), folder / f"{name}.log")


def is_up(program: Program) -> bool:
    return "up" in program.log.read_text()


def test_a_killed_child_is_started_again_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    changes: list[int] = []
    supervisor = Supervisor(tmp_path / "children.json", said.append, lambda: changes.append(1))
    first = supervisor.start(a_program(tmp_path, "gateway-1", SLEEP))
    first.send(signal.SIGKILL)
    first.wait(SECONDS)

    def runs_again() -> bool:
        supervisor.tend()
        return bool(changes)

    assert wait_until(runs_again, SECONDS)
    pid = supervisor.pids()["gateway"][0]
    assert pid != first.pid
    assert said == [
        f"gateway-1 (pid {first.pid}) was ended by SIGKILL, starting it again",
        f"gateway-1 runs again (pid {pid})",
    ]
    supervisor.stop(lambda: True)
    assert born(pid) is None


def test_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "children.json", print, lambda: None)
    deaf = a_program(tmp_path, "nats-1", DEAF)
    child = supervisor.start(deaf)
    assert wait_until(lambda: is_up(deaf), SECONDS)
    supervisor.stop(lambda: False)
    assert child.exit_code == -signal.SIGKILL
    assert not (tmp_path / "children.json").exists()


def test_children_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    parent = Supervisor(tmp_path / "children.json", print, lambda: None).start(
        a_program(tmp_path, "stack-1", PARENT, str(tmp_path / "child.log"))
    )
    log = tmp_path / "stack-1.log"
    assert wait_until(lambda: log.read_text().endswith("\n"), SECONDS)
    grandchild = int(log.read_text())
    assert psutil.pid_exists(grandchild)
    parent.kill()
    assert wait_until(lambda: born(grandchild) is None, SECONDS)


def test_leftovers_of_a_killed_supervisor_are_ended_by_the_next_one(tmp_path: Path) -> None:
    record = tmp_path / "children.json"
    said: list[str] = []
    child = Supervisor(record, print, lambda: None).start(a_program(tmp_path, "gateway-1", SLEEP))
    end_leftovers(record, said.append)
    assert child.wait(SECONDS)
    assert said == [f"Ending a process the last run left behind (pid {child.pid})"]
    end_leftovers(record, said.append)
    assert len(said) == 1


def test_programs_that_run_together_are_all_waited_for_and_the_failed_one_is_named(tmp_path: Path) -> None:
    done = tmp_path / "done"
    slow = a_program(tmp_path, "migrate-a", f"import time; time.sleep(0.5); open({str(done)!r}, 'w')")
    wrong = a_program(tmp_path, "migrate-b", "raise SystemExit('no such table')")
    with pytest.raises(StackError, match="migrate-b ended with code 1"):
        run_all_to_end([slow, wrong], SECONDS)
    assert done.exists()


def test_a_program_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    program = a_program(tmp_path, "migrate", "raise SystemExit('no such table')")
    with pytest.raises(StackError, match="ended with code 1") as caught:
        run_to_end(program, SECONDS)
    assert "no such table" in str(caught.value)
