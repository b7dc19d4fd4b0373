"""The settings of the local stack, all problems reported together (`kit.settings`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.local.postgres import check_url
from kit.settings import setting

# Beyond it a typo is likelier than a wish: each replica is a process of 100 MB.
REPLICAS_MAX = 16
# Two of those that answers stream through, so that the first thing a newcomer kills is missed by nobody. Of billing
# one is enough: it is asked for an instant before a call and told afterwards, whoever calls it tries again until it is
# back, and holds of a project queue at the same rows of Postgres however many processes place them.
REPLICAS_DEFAULT = {"billing": 1, "conversation": 2, "gateway": 2}
DEFAULT_DATA_DIR = ".threadloom"
DEMO_MODEL = "threadloom-demo"
DEFAULT_MODEL = "gpt-4o-mini"
OPENAI_URL = "https://api.openai.com/v1"
# Providers that ask for no key (a model on this machine) still get a header.
UNSET_KEY = "unset"


def data_dir(environ: Mapping[str, str]) -> Path:
    """The one setting every command needs."""
    return Path(environ.get("THREADLOOM_DATA_DIR") or DEFAULT_DATA_DIR)


def parse_port(raw: str) -> int:
    """1 to 65535."""
    if not raw.isascii() or not raw.isdigit() or not 1 <= int(raw) <= 65535:
        raise ValueError("must be a number from 1 to 65535")
    return int(raw)


def parse_replicas(raw: str) -> dict[str, int]:
    """How many processes of each service, as in `conversation=3`; one that is not named keeps its default."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in raw.split(","))):
        name, _, count = (word.strip() for word in part.partition("="))
        if name not in REPLICAS_DEFAULT:
            raise ValueError(f"there is no service {name!r}, only {', '.join(REPLICAS_DEFAULT)}")
        if name in found:
            raise ValueError(f"{name} is named twice")
        if not count.isascii() or not count.isdigit() or not 1 <= int(count) <= REPLICAS_MAX:
            raise ValueError(f"{name} needs a count from 1 to {REPLICAS_MAX}, as in {name}=2")
        found[name] = int(count)
    return REPLICAS_DEFAULT | found


def check_nats_url(raw: str) -> str:
    """The address of an outside NATS, or nothing."""
    if raw and not raw.startswith(("nats://", "tls://")):
        raise ValueError("must look like nats://user:password@host:4222")
    return raw


def check_base_url(raw: str) -> str:
    """The base address of an OpenAI-compatible provider without a slash at its end, or nothing."""
    if raw and not raw.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    return raw.rstrip("/")


@dataclass(frozen=True)
class StackSettings:
    """What `make run` reads from the environment."""

    port: int = setting("THREADLOOM_PORT", "Port of the first gateway.", "8080", parse_port)
    data_dir: Path = setting("THREADLOOM_DATA_DIR", "Folder of the data.", DEFAULT_DATA_DIR, Path)
    replicas: dict[str, int] = setting(
        "THREADLOOM_REPLICAS",
        "Processes of each service, as in conversation=3; a service that is not named keeps its default.",
        ",".join(f"{name}={count}" for name, count in REPLICAS_DEFAULT.items()),
        parse_replicas,
    )
    database_url: str = setting(
        "DATABASE_URL",
        "An outside Postgres, as the owner of its database; without it one is started.",
        "",
        check_url,
        secret=True,
    )
    nats_url: str = setting("NATS_URL", "An outside NATS; without it one is started.", "", check_nats_url, secret=True)
    api_key: str = setting(
        "OPENAI_API_KEY", "The provider's key; without it and OPENAI_BASE_URL a demo model answers.", "", secret=True
    )
    base_url: str = setting("OPENAI_BASE_URL", "Base address of an OpenAI-compatible provider.", "", check_base_url)
    chosen_model: str = setting(
        "THREADLOOM_MODEL", f"The model; {DEFAULT_MODEL} unless set, {DEMO_MODEL} when the demo model answers.", ""
    )

    @property
    def is_demo(self) -> bool:
        """Whether the demo model answers."""
        return not self.api_key and not self.base_url

    @property
    def model(self) -> str:
        """The model in use."""
        return self.chosen_model or (DEMO_MODEL if self.is_demo else DEFAULT_MODEL)
