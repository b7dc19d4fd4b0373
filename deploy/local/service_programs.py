"""How the services are started, also by tests: commands and environments, no decisions."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from deploy.local.processes import Program

ROOT = Path(__file__).parents[2]
# The services that have tables: each a schema and two roles of its own.
CONVERSATION, BILLING = "conversation", "billing"
WITH_TABLES = (CONVERSATION, BILLING)
# What one process gets must not leak into the others by inheritance.
NOT_INHERITED = (
    "DATABASE_URL",
    "NATS_URL",
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "THREADLOOM_SECRET_KEYS",
    "THREADLOOM_METRICS_PORT",
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
)
LOCAL_HOSTS = "127.0.0.1,localhost"


@dataclass(frozen=True)
class RolePasswords:
    """The passwords of a service's two database roles."""

    request: str
    engine: str


@dataclass(frozen=True)
class Wiring:
    """What the services of one stack share."""

    admin_url: str
    # By service, for those that have tables.
    passwords: Mapping[str, RolePasswords]
    nats_url: str
    provider_url: str
    provider_key: str
    model: str
    credential: str
    # The key ring that stored provider keys are encrypted with: `id:base64`.
    secret_keys: str
    # The replicas' addresses, host:port.
    conversations: tuple[str, ...]
    billings: tuple[str, ...]
    conversation_drain_seconds: float = 5.0
    # Nothing is lost with a gateway: its clients resume.
    gateway_drain_seconds: float = 1.5


def request_url(service: str, admin_url: str, passwords: RolePasswords) -> str:
    """The database as a service's request role."""
    return as_role(admin_url, f"threadloom_{service}", passwords.request)


def engine_url(service: str, admin_url: str, passwords: RolePasswords) -> str:
    """The database as a service's engine role."""
    return as_role(admin_url, f"threadloom_{service}_engine", passwords.engine)


def as_role(url: str, role: str, password: str) -> str:
    """The same database for another role."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}:{password}@{parts.netloc.rpartition('@')[2]}"))


def migrations(wiring: Wiring, environ: Mapping[str, str], log: Callable[[str], Path]) -> list[Program]:
    """Makes the roles of each service with tables, and migrates its schema. `log` names a program's log file."""
    return [_migration(service, wiring, environ, log(f"migrate-{service}")) for service in WITH_TABLES]


def conversation(name: str, wiring: Wiring, environ: Mapping[str, str], log: Path) -> Program:
    """One replica of the conversation service."""
    added = {
        **_with_tables(name, wiring.conversations, wiring, environ, first_metrics=0),
        "BILLING_ADDRESSES": ",".join(wiring.billings),
        "NATS_URL": wiring.nats_url,
        "OPENAI_BASE_URL": wiring.provider_url,
        "OPENAI_API_KEY": wiring.provider_key,
        "THREADLOOM_MODEL": wiring.model,
        "THREADLOOM_SECRET_KEYS": wiring.secret_keys,
        "THREADLOOM_DRAIN_SECONDS": f"{wiring.conversation_drain_seconds:g}",
        "THREADLOOM_ENVIRONMENT": "local",
    }
    return _module(name, "services.conversation", (), log, environ, added)


def billing(name: str, wiring: Wiring, environ: Mapping[str, str], log: Path) -> Program:
    """One replica of the billing service."""
    added = _with_tables(name, wiring.billings, wiring, environ, first_metrics=len(wiring.conversations))
    return _module(name, "services.billing", (), log, environ, added)


def gateway(name: str, port: int, wiring: Wiring, environ: Mapping[str, str], log: Path) -> Program:
    """One replica of the gateway."""
    added = {
        "THREADLOOM_HTTP_LISTEN": f"127.0.0.1:{port}",
        "CONVERSATION_ADDRESSES": ",".join(wiring.conversations),
        "BILLING_ADDRESSES": ",".join(wiring.billings),
        "THREADLOOM_SERVICE_CREDENTIAL": wiring.credential,
        "THREADLOOM_DRAIN_SECONDS": f"{wiring.gateway_drain_seconds:g}",
    }
    return _module(name, "services.gateway", (), log, environ, added)


def demo_model(name: str, port: int, environ: Mapping[str, str], log: Path) -> Program:
    """The demo model."""
    return _module(name, "deploy.local.demo_model", ("--port", str(port)), log, environ, {})


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """What every service takes over from our environment."""
    found = {name: value for name, value in environ.items() if name not in NOT_INHERITED}
    # A proxy of the environment would swallow the calls between processes of this machine.
    for name in ("no_proxy", "NO_PROXY"):
        found[name] = ",".join(filter(None, (found.get(name), LOCAL_HOSTS)))
    return found


def _migration(service: str, wiring: Wiring, environ: Mapping[str, str], log: Path) -> Program:
    prefix, passwords = service.upper(), wiring.passwords[service]
    added = {
        f"{prefix}_MIGRATION_URL": wiring.admin_url,
        f"{prefix}_ROLE_PASSWORD": passwords.request,
        f"{prefix}_ENGINE_ROLE_PASSWORD": passwords.engine,
    }
    return _module(f"migrate-{service}", f"services.{service}.migrate", (), log, environ, added)


def _with_tables(
    name: str, addresses: Sequence[str], wiring: Wiring, environ: Mapping[str, str], *, first_metrics: int
) -> dict[str, str]:
    """What a replica of a service with tables gets, whichever it is; `name` is the service and its number."""
    service, _, number = name.rpartition("-")
    index, prefix, passwords = int(number) - 1, service.upper(), wiring.passwords[service]
    added = {
        "THREADLOOM_GRPC_LISTEN": addresses[index],
        f"{prefix}_DATABASE_URL": request_url(service, wiring.admin_url, passwords),
        f"{prefix}_ENGINE_DATABASE_URL": engine_url(service, wiring.admin_url, passwords),
        "THREADLOOM_SERVICE_CREDENTIAL": wiring.credential,
    }
    metrics_port = int(environ.get("THREADLOOM_METRICS_PORT") or 0)
    if metrics_port:  # one process a port: conversation-1 has the one that is named, the others those behind it
        added["THREADLOOM_METRICS_PORT"] = str(metrics_port + first_metrics + index)
    return added


def _module(
    name: str, module: str, arguments: Sequence[str], log: Path, environ: Mapping[str, str], added: Mapping[str, str]
) -> Program:
    # Unbuffered: a killed process has its last words in its log.
    merged = {**inherited(environ), **added, "PYTHONUNBUFFERED": "1", "PATH": environ.get("PATH", os.defpath)}
    return Program(name, (sys.executable, "-m", module, *arguments), log, merged, cwd=ROOT)
