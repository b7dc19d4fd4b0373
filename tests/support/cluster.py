"""Real processes of ours for e2e and chaos tests: started, killed, frozen, started again.

Use it as a context manager, from the main thread (children end with the thread that
started them). Processes are named as `make run` names them: `conversation-1`,
`gateway-2`, `billing-1`, and, when private, `postgres-1` and `nats-1`. The cluster's
model has the price of `tests.support.billing` in every project.
"""

import asyncio
import base64
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import psutil

from deploy.local import placement, postgres, readiness, service_programs
from deploy.local.nats import Nats
from deploy.local.ports import free_port
from deploy.local.processes import Child, Program, StackError, wait_ready, wait_until
from deploy.local.projects import Projects, user_token
from deploy.local.secret_file import ProjectKeys
from deploy.local.service_programs import Wiring
from deploy.local.supervisor import STEADY_SECONDS, Supervisor
from tests.support import databases
from tests.support.billing import Billing
from tests.support.databases import Database

CREDENTIAL = "service-credential-of-tests"
# 32 zero bytes: a key like any other, and the same in every run.
SECRET_KEYS = f"k1:{base64.b64encode(bytes(32)).decode()}"
MODEL = "fake-model"
READY_SECONDS = 30.0
KILL_SECONDS = 5.0  # the kernel needs milliseconds
TEND_SECONDS = 0.05
LOG_LINES = 40


class Cluster:
    """Processes of the three services over a database, a NATS and a provider."""

    def __init__(
        self,
        *,
        provider_url: str,
        database: Database | None = None,
        nats_url: str | None = None,
        conversations: int = 2,
        gateways: int = 1,
        billings: int = 1,
        private_postgres: bool = False,
        private_nats: bool = False,
        supervised: bool = False,
        environ: Mapping[str, Mapping[str, str]] | None = None,
        project: ProjectKeys | None = None,
        model: str = MODEL,
        conversation_drain_seconds: float = 5.0,
    ) -> None:
        """`supervised`: ended processes are started again, as make run does.

        `environ`: further variables by service. `project`: the keys of `default` when the database has it already.
        """
        self._counts = {"billing": billings, "conversation": conversations, "gateway": gateways}
        self._private = {"postgres": private_postgres, "nats": private_nats}
        self._database, self._nats_url, self._provider_url, self._model = database, nats_url, provider_url, model
        self._supervised, self._environ, self._drain = supervised, environ or {}, conversation_drain_seconds
        self._project, self._resources = project, ExitStack()
        self._ready: dict[str, Callable[[], bool]] = {}
        self._ports: dict[str, int] = {}
        self._ending = threading.Event()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def database(self) -> Database:
        """The database in use; its admin address reaches every table."""
        assert self._database is not None
        return self._database

    @property
    def http(self) -> list[str]:
        """The gateways' addresses."""
        return [f"http://{address}" for address in self._addresses("gateway")]

    @property
    def grpc(self) -> list[str]:
        """The conversation replicas' addresses."""
        return self._addresses("conversation")

    @property
    def billing(self) -> list[str]:
        """The billing replicas' addresses."""
        return self._addresses("billing")

    @property
    def is_supervised(self) -> bool:
        """Whether ended processes are started again without a `restart`."""
        return self._supervised

    @property
    def project(self) -> ProjectKeys:
        """The project `default`."""
        assert self._project is not None
        return self._project

    def create_project(self, slug: str) -> ProjectKeys:
        """A further project."""
        return Projects(self.grpc[0], CREDENTIAL).create(slug)

    def token(self, user: str, project: ProjectKeys | None = None) -> str:
        """A user's token."""
        chosen = project or self.project
        return user_token(chosen.jwt_secret, chosen.slug, user)

    def headers(self, user: str, project: ProjectKeys | None = None) -> dict[str, str]:
        """What a user's request carries."""
        chosen = project or self.project
        return {"apikey": chosen.anon_key, "Authorization": f"Bearer {self.token(user, chosen)}"}

    def pid(self, service: str, index: int = 1) -> int:
        """The process id now."""
        return self._child(service, index).pid

    def log(self, service: str, index: int = 1) -> str:
        """All a process has written, over its restarts."""
        return self._child(service, index).program.log.read_text(errors="replace")

    def kill(self, service: str, index: int = 1) -> None:
        """SIGKILL, and its end. Of Postgres only the postmaster: its children notice by themselves."""
        child = self._child(service, index)
        child.send(signal.SIGKILL)
        wait_until(lambda: child.exit_code is not None, KILL_SECONDS)

    def terminate(self, service: str, index: int = 1) -> None:
        """The orderly stop: SIGTERM, of Postgres SIGINT."""
        child = self._child(service, index)
        child.send(child.program.stop_signal)

    def pause(self, service: str, index: int = 1) -> None:
        """SIGSTOP, also to the children a process has (Postgres)."""
        self._send_to_tree(service, index, signal.SIGSTOP)

    def resume(self, service: str, index: int = 1) -> None:
        """SIGCONT."""
        self._send_to_tree(service, index, signal.SIGCONT)

    def has_ended(self, service: str, index: int = 1) -> bool:
        """Whether the process is gone and was not started again."""
        return self._child(service, index).exit_code is not None

    def restart(self, service: str, index: int = 1) -> None:
        """Starts an ended process again on its port, without waiting until it is ready."""
        child = self._child(service, index)
        if not child.wait(READY_SECONDS):
            raise StackError(f"{child.program.name} still runs")
        if service == "postgres":
            # Orphans of a killed postmaster hold the data for a moment: the launcher tries until they are gone.
            self._postgres.start(child.program.log, self._start_program)
        else:
            self._start_program(child.program)

    def settle(self) -> None:
        """Lets the next end of a process count as its first: a supervised one is started again without a long pause."""
        for name in self._ready:
            self._supervisor.child(name).started -= STEADY_SECONDS

    async def ready(self, service: str | None = None, index: int | None = None) -> None:
        """Waits until a process, those of a service, or all are ready again. Raises StackError after 30 s."""
        for name, is_ready in self._ready.items():
            kind, _, number = name.rpartition("-")
            if service not in (None, kind) or index not in (None, int(number)):
                continue
            # A thread, because the caller's loop may be what the processes are waiting for.
            if not await asyncio.to_thread(wait_until, is_ready, READY_SECONDS):
                raise StackError(f"{name} is not ready after {READY_SECONDS:.0f} s\n{self.log(kind, int(number))}")

    def _start(self) -> None:
        self._folder = self._resources.enter_context(placement.temporary_folder())
        self._supervisor = Supervisor(self._folder / "children.json", self._note, lambda: None)
        if self._private["postgres"]:
            self._database = self._private_database()
        if self._private["nats"]:
            self._nats_url = self._private_nats()
        if self._database is None or self._nats_url is None:
            raise StackError("A cluster needs a database and a NATS, given or private")
        self._start_services()
        for name, is_ready in self._ready.items():
            wait_ready(self._supervisor.child(name), is_ready, READY_SECONDS)
        with Billing(self.billing[0], CREDENTIAL) as billing:
            billing.set_price(self._model)
        if self._project is None:
            self._project = self.create_project("default")
        if self._supervised:
            self._watcher = threading.Thread(target=self._tend, name="cluster", daemon=True)
            self._watcher.start()

    def _private_database(self) -> Database:
        log = self._log("postgres-1")
        self._postgres = postgres.prepare(self._folder, free_port(), postgres.new_password(), log, self._note)
        self._postgres.start(log, self._start_program)
        self._ready["postgres-1"] = self._postgres.is_ready
        name = "threadloom"
        postgres.create_database(self._postgres.url(), name)
        url = self._postgres.url(name)
        databases.migrate(url)
        return Database(name, url)

    def _private_nats(self) -> str:
        server = Nats(free_port(), postgres.new_password())
        server.start(self._folder, self._log("nats-1"), self._start_program)
        self._ready["nats-1"] = server.is_ready
        return server.url

    def _wire(self) -> Wiring:
        return Wiring(
            admin_url=self.database.admin_url,
            passwords=databases.PASSWORDS,
            nats_url=self._nats_url or "",
            provider_url=self._provider_url,
            provider_key="key-of-tests",
            model=self._model,
            credential=CREDENTIAL,
            secret_keys=SECRET_KEYS,
            conversations=tuple(self.grpc),
            billings=tuple(self.billing),
            conversation_drain_seconds=self._drain,
        )

    def _start_services(self) -> None:
        for service, count in self._counts.items():
            for number in range(1, count + 1):
                self._new_port(f"{service}-{number}")
        wiring = self._wire()
        for name, port in self._ports.items():
            service = name.rpartition("-")[0]
            environ, log = {**os.environ, **self._environ.get(service, {})}, self._log(name)
            self._ready[name] = partial(readiness.is_serving, f"127.0.0.1:{port}")
            match service:
                case "billing":
                    program = service_programs.billing(name, wiring, environ, log)
                case "conversation":
                    program = service_programs.conversation(name, wiring, environ, log)
                case _:
                    program = service_programs.gateway(name, port, wiring, environ, log)
                    self._ready[name] = partial(readiness.answers_ok, f"http://127.0.0.1:{port}/readyz")
            self._start_program(program)

    def _start_program(self, program: Program) -> Child:
        return self._supervisor.start(program)

    def _new_port(self, name: str) -> None:
        self._ports[name] = free_port(frozenset(self._ports.values()))

    def _addresses(self, service: str) -> list[str]:
        return [f"127.0.0.1:{port}" for name, port in self._ports.items() if name.rpartition("-")[0] == service]

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _child(self, service: str, index: int) -> Child:
        return self._supervisor.child(f"{service}-{index}")

    def _send_to_tree(self, service: str, index: int, number: signal.Signals) -> None:
        process = psutil.Process(self.pid(service, index))
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def _tend(self) -> None:
        while not self._ending.wait(TEND_SECONDS):
            self._supervisor.tend()

    def _note(self, line: str) -> None:
        print(f"[cluster] {line}")

    def _close(self) -> None:
        self._ending.set()
        if self._supervised and hasattr(self, "_watcher"):
            self._watcher.join()
        if hasattr(self, "_supervisor"):
            self._supervisor.stop(lambda: True)
            self._show_logs()
        self._resources.close()

    def _show_logs(self) -> None:
        """pytest shows this of failed tests only."""
        for log in sorted(self._folder.glob("*.log")):
            print(f"--- the end of {log.name}")
            print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]))
