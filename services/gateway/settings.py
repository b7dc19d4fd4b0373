"""The gateway's settings, read once from the environment by `__main__`."""

import re
from dataclasses import dataclass

from kit.outbound import AllowedHosts, allowed_hosts
from kit.settings import address, addresses, comma_list, positive, setting

ORIGIN = re.compile(r"https?://[^/\s]+")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

# In the list of origins: this machine, on any port.
LOCALHOST = "localhost"


def origins(raw: str) -> tuple[str, ...]:
    """A comma list of origins, `localhost` or `*`. Raises ValueError."""
    found = tuple(one.rstrip("/") for one in comma_list(raw))
    for one in found:
        if one not in (LOCALHOST, "*") and not ORIGIN.fullmatch(one):
            raise ValueError(f"{one!r} is not an origin such as https://app.example.com")
    return found


def level(raw: str) -> str:
    """A log level. Raises ValueError."""
    if raw.upper() not in LEVELS:
        raise ValueError(f"must be one of {', '.join(LEVELS)}")
    return raw.upper()


@dataclass(frozen=True)
class Settings:
    """Settings of the gateway."""

    listen: tuple[str, int] = setting(
        "THREADLOOM_HTTP_LISTEN", "Where HTTP is served, host:port.", "127.0.0.1:8080", address
    )
    conversation: tuple[str, ...] = setting(
        "CONVERSATION_ADDRESSES",
        "The replicas of the conversation service, a comma list of host:port.",
        parse=addresses,
    )
    billing: tuple[str, ...] = setting(
        "BILLING_ADDRESSES",
        "The replicas of the billing service, a comma list of host:port.",
        "127.0.0.1:50052",
        addresses,
    )
    credential: str = setting("THREADLOOM_SERVICE_CREDENTIAL", "The secret the services show each other.", secret=True)
    origins: tuple[str, ...] = setting(
        "THREADLOOM_ALLOWED_ORIGINS",
        "Web origins that may call, a comma list; `localhost` means this machine on any port, `*` any origin.",
        LOCALHOST,
        origins,
    )
    drain_seconds: float = setting(
        "THREADLOOM_DRAIN_SECONDS", "How long open streams may go on after SIGTERM.", "5", positive
    )
    log_level: str = setting("THREADLOOM_LOG_LEVEL", "The least level that is logged.", "INFO", level)
    allowed_hosts: AllowedHosts = setting(
        "THREADLOOM_ALLOWED_HOSTS",
        "Hosts of JWKS addresses that may be called although they are not public, also over http: as the conversation"
        " service has it.",
        "-",
        allowed_hosts,
    )
