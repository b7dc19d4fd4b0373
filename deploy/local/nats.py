"""A real NATS from the wheel, with a user and a password, on this machine only."""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.local.processes import Child, Program, StackError, never_mind, wait_ready

USER = "threadloom"
READY_SECONDS = 20.0
GREETING_SECONDS = 1.0


@dataclass(frozen=True)
class Nats:
    """One server: its port and the password of its only user."""

    port: int
    password: str

    @property
    def url(self) -> str:
        """Its address with the credentials."""
        return f"nats://{USER}:{self.password}@127.0.0.1:{self.port}"

    def program(self, folder: Path, log: Path) -> Program:
        """How it is started; writes its configuration, mode 0600, into `folder`."""
        config = folder / "nats.conf"
        config.unlink(missing_ok=True)
        with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f'listen: "127.0.0.1:{self.port}"\n')
            file.write(f'authorization {{ user: "{USER}", password: "{self.password}" }}\n')
        return Program("nats-1", (str(_binary()), "--config", str(config)), log, {"PATH": os.defpath})

    def is_ready(self) -> bool:
        """Whether it greets a connection."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), GREETING_SECONDS) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def start(
        self,
        folder: Path,
        log: Path,
        start: Callable[[Program], Child] = Child,
        check: Callable[[], None] = never_mind,
    ) -> Child:
        """Starts it and waits until it is ready. Raises StackError."""
        child = start(self.program(folder, log))
        wait_ready(child, self.is_ready, READY_SECONDS, check)
        return child


def _binary() -> Path:
    # Beside the interpreter, never by PATH: an old server of the system may be found there.
    found = Path(sys.executable).with_name("nats-server")
    if not found.exists():
        raise StackError("nats-server is not installed beside Python. Run make install, or set NATS_URL.")
    return found
