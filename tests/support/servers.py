"""Real Postgres and NATS servers for tests: started by the local stack's launchers, killed at will."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.local import ports, postgres
from deploy.local.nats import Nats
from deploy.local.placement import temporary_folder
from deploy.local.postgres import Postgres
from deploy.local.processes import Child

STOP_SECONDS = 10.0


@dataclass
class RunningPostgres:
    """A cluster in a temporary folder. `child` is replaced by a restart, which keeps the port."""

    server: Postgres
    log: Path
    child: Child

    def url(self, database: str = "postgres") -> str:
        """The superuser's address of a database."""
        return self.server.url(database)

    def kill(self) -> None:
        """SIGKILL to the postmaster; its children notice and end by themselves."""
        self.child.kill()

    def pause(self) -> None:
        """Freezes the postmaster: no new connections. Connections that exist go on."""
        self.child.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends a pause."""
        self.child.send(signal.SIGCONT)

    def start(self) -> None:
        """Starts it again on the same port and waits until it answers."""
        self.child = self.server.start(self.log)

    def stop(self) -> None:
        """A fast shutdown."""
        self.child.stop(STOP_SECONDS)


@dataclass
class RunningNats:
    """A NATS server in a temporary folder. `child` is replaced by a restart, which keeps the port."""

    server: Nats
    folder: Path
    child: Child

    @property
    def url(self) -> str:
        """Its address with the credentials."""
        return self.server.url

    @property
    def log(self) -> Path:
        """What it wrote."""
        return self.folder / "nats.log"

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill()

    def pause(self) -> None:
        """Freezes it: connections stay open, nothing moves."""
        self.child.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends a pause."""
        self.child.send(signal.SIGCONT)

    def start(self) -> None:
        """Starts it again on the same port and waits until it is ready."""
        self.child = self.server.start(self.folder, self.log)

    def stop(self) -> None:
        """An orderly stop."""
        self.child.stop(STOP_SECONDS)


@contextlib.contextmanager
def running_postgres() -> Iterator[RunningPostgres]:
    """A new cluster, fsync on, stopped and deleted at the end."""
    with temporary_folder() as folder:
        log = folder / "postgres.log"
        server = postgres.prepare(folder, ports.free_port(), postgres.new_password(), log, lambda _line: None)
        running = RunningPostgres(server, log, server.start(log))
        try:
            yield running
        finally:
            _end(running)


@contextlib.contextmanager
def running_nats() -> Iterator[RunningNats]:
    """A new server, stopped at the end."""
    with temporary_folder() as folder:
        server = Nats(ports.free_port(), postgres.new_password())
        running = RunningNats(server, folder, server.start(folder, folder / "nats.log"))
        try:
            yield running
        finally:
            _end(running)


def _end(running: RunningPostgres | RunningNats) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.child.pid, signal.SIGCONT)  # a test may have left it frozen
    running.stop()
