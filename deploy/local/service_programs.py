"""How the services are started, also by tests: commands and environments, no decisions."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from deploy.local.processes import Program

ROOT = Path(__file__).parents[2]
REQUEST_ROLE = "threadloom_conversation"
ENGINE_ROLE = "threadloom_conversation_engine"
# What one process gets must not leak into the others by inheritance.
NOT_INHERITED = ("DATABASE_URL", "NATS_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
LOCAL_HOSTS = "127.0.0.1,localhost"


@dataclass(frozen=True)
class Wiring:
    """What the services of one stack share."""

    admin_url: str
    request_password: str
    engine_password: str
    nats_url: str
    provider_url: str
    provider_key: str
    model: str
    credential: str
    conversation_drain_seconds: float = 5.0
    # Nothing is lost with a gateway: its clients resume.
    gateway_drain_seconds: float = 1.5

    @property
    def request_url(self) -> str:
        """The database as the request role."""
        return as_role(self.admin_url, REQUEST_ROLE, self.request_password)

    @property
    def engine_url(self) -> str:
        """The database as the engine role."""
        return as_role(self.admin_url, ENGINE_ROLE, self.engine_password)


def as_role(url: str, role: str, password: str) -> str:
    """The same database for another role."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}:{password}@{parts.netloc.rpartition('@')[2]}"))


def migration(wiring: Wiring, environ: Mapping[str, str], log: Path) -> Program:
    """Makes the roles and migrates."""
    added = {
        "CONVERSATION_MIGRATION_URL": wiring.admin_url,
        "CONVERSATION_ROLE_PASSWORD": wiring.request_password,
        "CONVERSATION_ENGINE_ROLE_PASSWORD": wiring.engine_password,
    }
    return _module("migrate", "services.conversation.migrate", (), log, environ, added)


def conversation(name: str, port: int, wiring: Wiring, environ: Mapping[str, str], log: Path) -> Program:
    """One replica of the conversation service."""
    added = {
        "THREADLOOM_GRPC_LISTEN": f"127.0.0.1:{port}",
        "CONVERSATION_DATABASE_URL": wiring.request_url,
        "CONVERSATION_ENGINE_DATABASE_URL": wiring.engine_url,
        "NATS_URL": wiring.nats_url,
        "THREADLOOM_SERVICE_CREDENTIAL": wiring.credential,
        "OPENAI_BASE_URL": wiring.provider_url,
        "OPENAI_API_KEY": wiring.provider_key,
        "THREADLOOM_MODEL": wiring.model,
        "THREADLOOM_DRAIN_SECONDS": f"{wiring.conversation_drain_seconds:g}",
        "THREADLOOM_ENVIRONMENT": "local",
    }
    metrics_port = int(environ.get("THREADLOOM_METRICS_PORT") or 0)
    if metrics_port:  # one process a port: the first replica has the one that is named, the others those behind it
        added["THREADLOOM_METRICS_PORT"] = str(metrics_port + int(name.rpartition("-")[2]) - 1)
    return _module(name, "services.conversation", (), log, environ, added)


def gateway(
    name: str, port: int, conversations: Sequence[str], wiring: Wiring, environ: Mapping[str, str], log: Path
) -> Program:
    """One replica of the gateway, and the conversation replicas it calls."""
    added = {
        "THREADLOOM_HTTP_LISTEN": f"127.0.0.1:{port}",
        "CONVERSATION_ADDRESSES": ",".join(conversations),
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


def _module(
    name: str, module: str, arguments: Sequence[str], log: Path, environ: Mapping[str, str], added: Mapping[str, str]
) -> Program:
    # Unbuffered: a killed process has its last words in its log.
    merged = {**inherited(environ), **added, "PYTHONUNBUFFERED": "1", "PATH": environ.get("PATH", os.defpath)}
    return Program(name, (sys.executable, "-m", module, *arguments), log, merged, cwd=ROOT)
