"""The billing service's settings, read once in __main__."""

from collections.abc import Callable
from dataclasses import dataclass

from kit.money import CREDITS_PER_USD_MAX
from kit.settings import count, one_of, port, setting
from services.billing.limits import RUNS_PER_MINUTE_MAX


def between(least: int, most: int) -> Callable[[str], int]:
    """A whole number within bounds."""

    def parse(raw: str) -> int:
        value = int(raw)
        if not least <= value <= most:
            raise ValueError(f"must be {least} to {most}")
        return value

    return parse


@dataclass(frozen=True)
class Settings:
    """Environment variables of `python -m services.billing`."""

    listen: str = setting("THREADLOOM_GRPC_LISTEN", "Address the gRPC server listens on.", "127.0.0.1:50052")
    database_url: str = setting("BILLING_DATABASE_URL", "Postgres, as the role threadloom_billing.", secret=True)
    engine_database_url: str = setting(
        "BILLING_ENGINE_DATABASE_URL", "Postgres, as the role threadloom_billing_engine.", secret=True
    )
    credential: str = setting(
        "THREADLOOM_SERVICE_CREDENTIAL", "Shared secret by which services believe each other.", secret=True
    )
    runs_per_minute: int = setting(
        "BILLING_RUNS_PER_MINUTE",
        "Runs with model calls a user may begin in a minute, where the project's terms do not say.",
        "60",
        between(1, RUNS_PER_MINUTE_MAX),
    )
    credits_per_usd: int = setting(
        "BILLING_CREDITS_PER_USD",
        "Credits for a USD, where the project's terms do not say.",
        "1000",
        between(0, CREDITS_PER_USD_MAX),
    )
    pool_size: int = setting("THREADLOOM_POOL_SIZE", "Postgres connections that move money.", "10", count)
    metrics_port: int = setting("THREADLOOM_METRICS_PORT", "Port of /metrics; 0: none.", "0", port)
    log_level: str = setting(
        "THREADLOOM_LOG_LEVEL", "How much is logged.", "INFO", one_of("DEBUG", "INFO", "WARNING", "ERROR")
    )
