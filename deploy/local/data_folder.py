"""The data folder of a stack: what lies where in it, and the lock of the stack that runs on it."""

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from deploy.local.processes import StackError

# A command that only looks whether the lock is held holds it for an instant itself.
LOCK_SECONDS = 0.3
LOCK_POLL_SECONDS = 0.05
# Everything a stack writes; reset deletes nothing else.
ENTRIES = (
    "postgres",
    "postgres.new",
    "postgres.password",
    "outside",
    "nats.conf",
    "secrets.json",
    "ports.json",
    "children.json",
    "stack.json",
    "logs",
    "lock",
)


class DataFolder:
    """Names the files of a data folder."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.logs = self.path / "logs"
        self.secrets = self.path / "secrets.json"
        self.ports = self.path / "ports.json"
        self.children = self.path / "children.json"
        self.stack = self.path / "stack.json"
        self._lock = self.path / "lock"

    def log(self, name: str) -> Path:
        """The log of a process such as `gateway-1`."""
        return self.logs / f"{name}.log"

    def make(self) -> None:
        """Makes the folders that are missing. Raises StackError when that is not allowed."""
        try:
            if not self.path.is_dir():
                self.path.mkdir(parents=True)
                # Under root Postgres' own account passes through; every file in here is private by itself.
                self.path.chmod(0o711 if os.geteuid() == 0 else 0o700)
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StackError(f"The data folder cannot be made: {error}. Choose another: THREADLOOM_DATA_DIR") from None
        if not os.access(self.path, os.W_OK):
            raise StackError(f"{self.path} belongs to another user. Choose another folder: THREADLOOM_DATA_DIR")

    def lock(self) -> IO[str] | None:
        """Takes the lock until the file is closed or the process ends; None when another stack has it."""
        file = open(os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600), "r+")  # noqa: SIM115 - kept open on purpose
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(file):
            if time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(LOCK_POLL_SECONDS)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        return file

    def running(self) -> int | None:
        """The process id of the stack that runs on this folder."""
        try:
            file = self._lock.open("r+")
        except FileNotFoundError:
            return None
        with file:
            if _try_lock(file):
                return None
            return int(file.read().strip() or 0) or None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
