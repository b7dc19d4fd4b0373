"""The whole stack, started in order: servers, schema, services, the first project."""

import hmac
import os
import shlex
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psycopg

from deploy.local import postgres, readiness, service_programs
from deploy.local.data_folder import DataFolder
from deploy.local.nats import Nats
from deploy.local.ports import PortBook
from deploy.local.prices import DEMO_RATES, Prices
from deploy.local.private_files import write_json
from deploy.local.processes import Child, StackError, run_all_to_end, wait_ready
from deploy.local.projects import ProjectExists, Projects, user_token
from deploy.local.secret_file import ProjectKeys, SecretFile
from deploy.local.service_programs import WITH_TABLES, RolePasswords, Wiring
from deploy.local.settings import OPENAI_URL, UNSET_KEY, StackSettings
from deploy.local.supervisor import StopRequests, Supervisor
from threadloom.conversation.v1 import project_service_pb2 as pb

DATABASE = "threadloom"
FIRST_PROJECT = "default"
USERS = ("alice", "bob")
QUESTION = "Hello! What can you do?"
MIGRATE_SECONDS = 120.0
# A service imports for a second or two; an old laptop may take ten times that.
READY_SECONDS = 60.0
CONNECT_SECONDS = 10
# The names in the secrets of a service's two roles, request and engine.
ROLE_SECRETS = {
    "conversation": ("request_role", "engine_role"),
    "billing": ("billing_request_role", "billing_engine_role"),
}


@dataclass
class Stack:
    """A stack under construction, then running."""

    settings: StackSettings
    folder: DataFolder
    environ: Mapping[str, str]
    say: Callable[[str], None]
    stops: StopRequests
    _gateway_ports: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.folder.children, self.say, self._write_stack_file)
        self._ports = PortBook(self.folder.ports)
        self._secrets = SecretFile(self.folder.secrets)

    def start(self) -> None:
        """Starts everything and waits until it is ready. Raises StackError or Stopping."""
        admin_url = self.settings.database_url or self._start_postgres()
        nats_url = self.settings.nats_url or self._start_nats()
        self._wiring = self._wire(admin_url, nats_url)
        self._check_outside()
        self._migrate()
        self._start_services()
        self._project = self._first_project()
        self._see_to_a_price()
        self._thread = self._first_thread()
        self._write_stack_file()

    @property
    def address(self) -> str:
        """The first gateway's address."""
        return f"http://127.0.0.1:{self.settings.port}"

    def announcement(self) -> str:
        """The ready line and a command that works as it is."""
        body = shlex.quote(f'{{"content": "{QUESTION}"}}')
        headers = [f"{name}: {value}" for name, value in self._headers().items()]
        quoted = " ".join(f"-H {shlex.quote(header)}" for header in [*headers, "Content-Type: application/json"])
        # Only where the environment sends even this machine's own addresses through a proxy.
        has_proxy = "http" in urllib.request.getproxies() and not urllib.request.proxy_bypass("127.0.0.1")
        proxy = "--noproxy 127.0.0.1 " if has_proxy else ""
        url = f"{self.address}/v1/conversations/{self._thread}/messages"
        return (
            f"Threadloom is ready on {self.address} (model {self.settings.model})\n\n"
            f"Paste this to see an answer stream:\n\ncurl -N {proxy}{url} {quoted} -d {body}\n\n"
            f"Keys and tokens are in {self.folder.stack}. Ctrl-C stops everything."
        )

    def _start_postgres(self) -> str:
        self.say("Starting Postgres ...")
        log = self.folder.log("postgres-1")
        password = self._secrets.password("postgres")
        server = postgres.prepare(self.folder.path, self._ports.port("postgres-1"), password, log, self.say)
        self.stops.check()
        server.start(log, self.supervisor.start, self.stops.check)
        postgres.create_database(server.url(), DATABASE)
        return server.url(DATABASE)

    def _start_nats(self) -> str:
        self.say("Starting NATS ...")
        server = Nats(self._ports.port("nats-1"), self._secrets.password("nats"))
        server.start(self.folder.path, self.folder.log("nats-1"), self.supervisor.start, self.stops.check)
        return server.url

    def _wire(self, admin_url: str, nats_url: str) -> Wiring:
        base_url = self.settings.base_url or OPENAI_URL
        if self.settings.is_demo:
            base_url = f"http://127.0.0.1:{self._ports.port('provider-1')}/v1"
        return Wiring(
            admin_url=admin_url,
            passwords={service: self._role_passwords(service) for service in WITH_TABLES},
            nats_url=nats_url,
            provider_url=base_url,
            provider_key=self.settings.api_key or UNSET_KEY,
            model=self.settings.model,
            credential=self._secrets.password("service_credential"),
            secret_keys=self._secrets.key_ring,
            conversations=self._addresses("conversation"),
            billings=self._addresses("billing"),
        )

    def _addresses(self, service: str) -> tuple[str, ...]:
        """Where the replicas of a service will listen; all are told of each other before one is started."""
        names = (f"{service}-{number}" for number in range(1, self.settings.replicas[service] + 1))
        return tuple(f"127.0.0.1:{self._ports.port(name)}" for name in names)

    def _role_passwords(self, service: str) -> RolePasswords:
        return RolePasswords(*(self._role_password(role) for role in ROLE_SECRETS[service]))

    def _role_password(self, role: str) -> str:
        """Roles belong to a whole server: on an outside one every stack must come to the same passwords."""
        if not self.settings.database_url:
            return self._secrets.password(role)
        owner = urlsplit(self.settings.database_url).password or ""
        return hmac.digest(owner.encode(), role.encode(), "sha256").hex()

    def _check_outside(self) -> None:
        """An outside server that does not answer is named now, not by the services' logs."""
        if self.settings.database_url:
            try:
                psycopg.connect(self.settings.database_url, connect_timeout=CONNECT_SECONDS).close()
            except psycopg.Error as error:
                raise StackError(f"DATABASE_URL: the database does not let us in: {error}") from None
        if self.settings.nats_url:
            first = urlsplit(self.settings.nats_url.split(",")[0])
            if not readiness.is_listening(first.hostname or "", first.port or 4222):
                raise StackError(f"NATS_URL: nothing listens on {first.hostname}:{first.port or 4222}")

    def _migrate(self) -> None:
        self.say("Migrating the database ...")
        # Together: importing is most of it, and a lock of the database keeps them apart there.
        run_all_to_end(service_programs.migrations(self._wiring, self.environ, self.folder.log), MIGRATE_SECONDS)
        self.stops.check()

    def _start_services(self) -> None:
        counts = self.settings.replicas
        many = ", ".join(f"{count} x {name}" for name, count in counts.items())
        self.say(f"Starting the services ({many}) ...")
        if self.settings.is_demo:
            self.say("Neither OPENAI_API_KEY nor OPENAI_BASE_URL is set: a small demo model answers.")
        waits = [self._start_provider()] if self.settings.is_demo else []
        # Together: importing is most of their start, and each waits for the others by itself.
        waits += [self._start_billing(number) for number in range(1, counts["billing"] + 1)]
        waits += [self._start_conversation(number) for number in range(1, counts["conversation"] + 1)]
        waits += [self._start_gateway(number) for number in range(1, counts["gateway"] + 1)]
        for child, is_ready in waits:
            wait_ready(child, is_ready, READY_SECONDS, self.stops.check)

    def _start_provider(self) -> tuple[Child, Callable[[], bool]]:
        name, port = "provider-1", self._ports.port("provider-1")
        program = service_programs.demo_model(name, port, self.environ, self.folder.log(name))
        return self.supervisor.start(program), lambda: readiness.is_listening("127.0.0.1", port)

    def _start_billing(self, number: int) -> tuple[Child, Callable[[], bool]]:
        name, address = f"billing-{number}", self._wiring.billings[number - 1]
        program = service_programs.billing(name, self._wiring, self.environ, self.folder.log(name))
        return self.supervisor.start(program), lambda: readiness.is_serving(address)

    def _start_conversation(self, number: int) -> tuple[Child, Callable[[], bool]]:
        name, address = f"conversation-{number}", self._wiring.conversations[number - 1]
        program = service_programs.conversation(name, self._wiring, self.environ, self.folder.log(name))
        return self.supervisor.start(program), lambda: readiness.is_serving(address)

    def _start_gateway(self, number: int) -> tuple[Child, Callable[[], bool]]:
        name = f"gateway-{number}"
        port = self.settings.port if number == 1 else self._ports.port(name)
        self._gateway_ports.append(port)
        program = service_programs.gateway(name, port, self._wiring, self.environ, self.folder.log(name))
        return self.supervisor.start(program), lambda: readiness.answers_ok(f"http://127.0.0.1:{port}/readyz")

    def _database_name(self) -> str:
        """Names the database in the secrets: our own, or the outside one by its place."""
        if not self.settings.database_url:
            return "own"
        parts = urlsplit(self.settings.database_url)
        return f"{parts.hostname}:{parts.port or 5432}{parts.path}"

    def _first_project(self) -> ProjectKeys:
        projects = Projects(self._wiring.conversations[0], self._wiring.credential)
        known = self._secrets.project(self._database_name())
        if known and projects.resolve(pb.ResolveProjectRequest(key=known.anon_key)):
            return known
        try:
            made = projects.create(FIRST_PROJECT)
        except ProjectExists:
            raise StackError(
                f"The database already has a project `{FIRST_PROJECT}`, and its keys, which are told only once, "
                f"are not in {self.folder.secrets}.\nStart with the data folder that created it "
                "(THREADLOOM_DATA_DIR), or with an empty database (make reset, or another DATABASE_URL)."
            ) from None
        self._secrets.keep_project(self._database_name(), made)
        return made

    def _see_to_a_price(self) -> None:
        """A model without a price is refused. The demo model gets one; of another one only its user knows it."""
        prices, model = Prices(self._wiring.billings[0], self._wiring.credential), self.settings.model
        if prices.is_known(model, self._project.id):
            return
        if self.settings.is_demo:
            prices.set_price(model, DEMO_RATES)
            return
        self.say(
            f"The model {model} has no price, so its runs are refused (MODEL_NOT_PRICED) until you set one, in USD per "
            f"million tokens; 0 will do: make price MODEL={shlex.quote(model)} IN=0.15 OUT=0.60"
        )

    def _first_thread(self) -> str:
        """A thread of the first user for the printed command; the same one on every start."""
        known = self._secrets.thread(self._database_name())
        if known and readiness.exists(f"{self.address}/v1/conversations/{known}", self._headers()):
            return known
        made = readiness.post_json(f"{self.address}/v1/conversations", {}, self._headers())
        self._secrets.keep_thread(self._database_name(), str(made["id"]))
        return str(made["id"])

    def _headers(self) -> dict[str, str]:
        token = user_token(self._project.jwt_secret, self._project.slug, USERS[0])
        return {"apikey": self._project.anon_key, "Authorization": f"Bearer {token}"}

    def _write_stack_file(self) -> None:
        project, wiring = self._project, self._wiring
        content = {
            "http": [f"http://127.0.0.1:{port}" for port in self._gateway_ports],
            "grpc": {"conversation": wiring.conversations, "billing": wiring.billings},
            "postgres": wiring.admin_url,
            "nats": wiring.nats_url,
            "provider": wiring.provider_url,
            "model": wiring.model,
            "project": project.slug,
            "project_id": project.id,
            "anon_key": project.anon_key,
            "service_key": project.service_key,
            "jwt_secret": project.jwt_secret,
            "service_credential": wiring.credential,
            "tokens": {user: user_token(project.jwt_secret, project.slug, user) for user in USERS},
            "pids": {"stack": [os.getpid()], **self.supervisor.pids()},
        }
        write_json(self.folder.stack, content)
