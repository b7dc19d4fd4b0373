"""The command `logs`: follows the logs of a service's processes, also over a restart."""

import os
import re
import time
from pathlib import Path
from typing import BinaryIO

from deploy.local.data_folder import DataFolder
from deploy.local.processes import StackError

LAST_LINES = 20
# Enough for so many lines of JSON; a longer past is in the file.
TAIL_BYTES = 64 * 1024
POLL_SECONDS = 0.2


def follow(folder: DataFolder, service: str) -> None:
    """Prints the last lines and then what comes, until interrupted. Raises StackError for an unknown name."""
    paths = _paths(folder, service)
    if not paths:
        names = ", ".join(sorted({re.sub(r"-\d+$", "", path.stem) for path in folder.logs.glob("*.log")}))
        known = f"There are: {names}." if names else f"There are no logs in {folder.logs} yet."
        asked = f"There is no log of {service!r}." if service else "Whose log? make logs SERVICE=gateway"
        raise StackError(f"{asked} {known}")
    tails: dict[Path, Tail] = {}
    while True:
        for path in _paths(folder, service):  # a further replica may have been started since
            tail = tails.get(path) or tails.setdefault(path, Tail(path))
            for line in tail.lines():
                print(f"{path.stem} | {line}" if len(tails) > 1 else line, flush=True)
        time.sleep(POLL_SECONDS)


class Tail:
    """The growing end of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def lines(self) -> list[str]:
        """The whole lines written since the last call; at first the last ones there are."""
        found = self._read() if self._file else self._open()
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        """Lets the file go."""
        if self._file:
            self._file.close()

    def _open(self) -> bytes:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            return b""
        self._file.seek(max(self._path.stat().st_size - TAIL_BYTES, 0))
        return b"\n".join(self._file.read().split(b"\n")[-LAST_LINES - 1 :])

    def _read(self) -> bytes:
        assert self._file is not None
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return b""
        ours = self._file.fileno()
        if found.st_ino != _inode(ours) or found.st_size < self._file.tell():
            self._file.close()  # replaced or cut: what it holds now is all new
            self._file = self._path.open("rb")
        return self._file.read()


def _inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def _paths(folder: DataFolder, service: str) -> list[Path]:
    named = re.compile(rf"{re.escape(service)}(-\d+)?")
    return sorted(path for path in folder.logs.glob("*.log") if service and named.fullmatch(path.stem))
