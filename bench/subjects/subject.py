"""What the bench asks of a subject: to start, to tell its processes, to make requests."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.load import UI_MESSAGES, Dialect, Request
from bench.processes import Tree
from bench.shape import Shape
from deploy.local.processes import Child, Program, StackError
from deploy.local.readiness import is_listening

MODEL = "gpt-4o-mini"
READY_SECONDS = 60.0
STOP_SECONDS = 15.0
# Where `make bench-peers` puts what the peers run on.
ENVIRONMENTS = Path(__file__).parents[2] / ".bench"
HOST = "127.0.0.1"


class Running(Protocol):
    """A subject that is up."""

    tree: Tree

    def requests(self, shape: Shape, count: int) -> list[Request]:
        """So many requests, each of a user of its own; what must exist before them is made here."""


class Subject(Protocol):
    """One column of the table."""

    name: str

    def missing(self) -> str:
        """What must be done before it can run; empty when nothing."""

    def versions(self) -> str:
        """What it runs on."""

    def start(self, provider_url: str, folder: Path) -> AbstractContextManager[Running]:
        """Starts it, waits until it is ready, and stops it at the end. Raises StackError."""


@dataclass
class Server:
    """A peer: one process that takes the AI SDK's chat requests."""

    tree: Tree
    port: int

    def requests(self, shape: Shape, count: int) -> list[Request]:
        """See Running. What `useChat` posts for the first message of a chat."""
        body = {
            "id": "chat",
            "trigger": "submit-message",
            "messages": [{"id": "m1", "role": "user", "parts": [{"type": "text", "text": str(shape)}]}],
        }
        return [post(self.port, "/api/chat", body, UI_MESSAGES, shape)] * count


def post(
    port: int, path: str, body: object, dialect: Dialect, shape: Shape, headers: Mapping[str, str] | None = None
) -> Request:
    """A POST of JSON."""
    content = json.dumps(body).encode()
    lines = {
        "Host": f"{HOST}:{port}",
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Content-Length": str(len(content)),
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return Request(HOST, port, f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content, dialect, shape)


@contextmanager
def process(
    name: str, command: Sequence[str], folder: Path, cwd: Path, environ: Mapping[str, str], port: int
) -> Iterator[Child]:
    """A process that listens on the port; stopped at the end. Raises StackError with its last words."""
    log = folder / f"{name}.log"
    child = Child(Program(f"{name}-1", tuple(command), log, {**_plain_environ(), **environ}, cwd=cwd))
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not is_listening(HOST, port):
            if child.exit_code is not None or time.monotonic() > deadline:
                raise StackError(f"{name} did not start:\n{child.log_tail()}")
            time.sleep(0.05)
        yield child
    finally:
        child.stop(STOP_SECONDS)


def _plain_environ() -> dict[str, str]:
    """What every process of the bench gets; no setting of the developer's."""
    return {"PATH": os.defpath, "HOME": str(Path.home()), "LANG": "C.UTF-8", "NO_PROXY": HOST, "no_proxy": HOST}


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """A module of this tree."""
    return (sys.executable, "-m", module, *arguments)
