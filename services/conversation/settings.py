"""The conversation service's settings, read once in __main__."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kit.outbound import AllowedHosts, allowed_hosts
from kit.sealing import KeyRing, key_ring
from kit.settings import SettingsError, addresses, count, one_of, port, positive, setting
from threadloom.conversation.v1.run_pb2 import RunOptions


@dataclass(frozen=True)
class TurnLimits:
    """How long a turn may take, in seconds (C9)."""

    turn_seconds: float
    call_seconds: float
    idle_seconds: float


@dataclass(frozen=True)
class OutputLimits:
    """Output tokens of runs that do not say what they want."""

    most: int
    least: int

    def wish(self, options: RunOptions) -> tuple[int, int]:
        """(the most, the fewest worth a call) that a run wants."""
        most = options.max_output_tokens if options.HasField("max_output_tokens") else self.most
        least = options.min_output_tokens if options.HasField("min_output_tokens") else min(self.least, most)
        return max(most, least), least


@dataclass(frozen=True)
class Settings:
    """Environment variables of `python -m services.conversation`."""

    listen: str = setting("THREADLOOM_GRPC_LISTEN", "Address the gRPC server listens on.", "127.0.0.1:50051")
    database_url: str = setting(
        "CONVERSATION_DATABASE_URL", "Postgres, as the role threadloom_conversation.", secret=True
    )
    engine_database_url: str = setting(
        "CONVERSATION_ENGINE_DATABASE_URL", "Postgres, as the role threadloom_conversation_engine.", secret=True
    )
    nats_url: str = setting("NATS_URL", "NATS, with credentials.", "nats://127.0.0.1:4222", secret=True)
    credential: str = setting(
        "THREADLOOM_SERVICE_CREDENTIAL", "Shared secret by which services believe each other.", secret=True
    )
    openai_base_url: str = setting(
        "OPENAI_BASE_URL", "Any server that speaks OpenAI Chat Completions.", "https://api.openai.com/v1"
    )
    openai_api_key: str = setting(
        "OPENAI_API_KEY",
        "Key of the model provider for projects that set none of their own;"
        " `-` or unset: their runs fail with AI_PROVIDER_NOT_CONFIGURED.",
        "-",
        secret=True,
    )
    secret_keys: KeyRing = setting(
        "THREADLOOM_SECRET_KEYS",
        "Keys that encrypt the projects' provider keys: a comma list of `id:base64` of 32 bytes; the first"
        " encrypts, all decrypt. `-` or unset: projects cannot set provider keys.",
        "-",
        key_ring,
        secret=True,
    )
    model: str = setting("THREADLOOM_MODEL", "Model of runs and threads that name none.", "gpt-4o-mini")
    turn_seconds: float = setting(
        "THREADLOOM_TURN_SECONDS", "Seconds from the user's message to the end of the answer.", "120", positive
    )
    call_seconds: float = setting("THREADLOOM_MODEL_CALL_SECONDS", "Seconds one model call may take.", "120", positive)
    idle_seconds: float = setting(
        "THREADLOOM_MODEL_IDLE_SECONDS", "Seconds a model provider may be silent.", "60", positive
    )
    billing: tuple[str, ...] = setting(
        "BILLING_ADDRESSES",
        "The replicas of the billing service, a comma list of host:port.",
        "127.0.0.1:50052",
        addresses,
    )
    most_output: int = setting(
        "THREADLOOM_MAX_OUTPUT_TOKENS",
        "Output tokens of an answer whose run names no max_output_tokens. Held before each call, so a small"
        " quota refuses less with a small number; a provider refuses more than its model can write.",
        "16384",
        count,
    )
    least_output: int = setting(
        "THREADLOOM_MIN_OUTPUT_TOKENS",
        "The fewest output tokens worth a call, when a run names no min_output_tokens: what quota and caps"
        " must still pay for.",
        "256",
        count,
    )
    drain_seconds: float = setting(
        "THREADLOOM_DRAIN_SECONDS",
        "Seconds runs may take to finish after SIGTERM; then they are handed over.",
        "130",
        positive,
    )
    event_kept_seconds: float = setting(
        "THREADLOOM_EVENT_KEPT_SECONDS", "Seconds the events of a finished run are kept.", "7200", positive
    )
    event_kept_bytes: float = setting(
        "THREADLOOM_EVENT_KEPT_BYTES", "Bytes of events of finished runs that are kept.", "10e9", positive
    )
    pool_size: int = setting("THREADLOOM_POOL_SIZE", "Postgres connections of each role.", "10", count)
    metrics_port: int = setting("THREADLOOM_METRICS_PORT", "Port of /metrics; 0: none.", "0", port)
    allowed_hosts: AllowedHosts = setting(
        "THREADLOOM_ALLOWED_HOSTS",
        "What tenants may name in webhooks and JWKS addresses although it is not public, also over http: a comma list"
        " of host names, IP addresses and networks. `-` or unset: nothing but the public internet over https.",
        "-",
        allowed_hosts,
    )
    environment: str = setting(
        "THREADLOOM_ENVIRONMENT",
        "`local` allows what only one machine may do: a NATS without credentials.",
        "cluster",
        one_of("local", "cluster"),
    )
    log_level: str = setting(
        "THREADLOOM_LOG_LEVEL",
        "How much is logged.",
        "INFO",
        one_of("DEBUG", "INFO", "WARNING", "ERROR"),
    )

    def check(self) -> None:
        """Refuses combinations that are not safe outside one machine (durability.md 29)."""
        has_credentials = bool(urlsplit(self.nats_url).username)
        if self.environment != "local" and not has_credentials:
            raise SettingsError(
                "NATS_URL names no user: whoever reaches that NATS could read every conversation."
                " Give it credentials (nats://user:password@host), or set THREADLOOM_ENVIRONMENT=local on one machine."
            )

    @property
    def own_provider_keys(self) -> dict[str, str]:
        """The deployment's own keys by provider."""
        return {} if self.openai_api_key == "-" else {"openai": self.openai_api_key}

    @property
    def turn(self) -> TurnLimits:
        """The time limits of a turn."""
        return TurnLimits(self.turn_seconds, self.call_seconds, self.idle_seconds)

    @property
    def output(self) -> OutputLimits:
        """How much an answer may hold."""
        return OutputLimits(self.most_output, self.least_output)
