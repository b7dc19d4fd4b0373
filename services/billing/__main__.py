"""Runs the billing service: `python -m services.billing`."""

import os
import sys

import uvloop

from kit.serving import stop_signal
from kit.settings import SettingsError, load
from kit.telemetry import serve_metrics, start_logging
from services.billing.server import serve
from services.billing.settings import Settings


async def _main(settings: Settings) -> None:
    await serve(settings, stop_signal())


def main() -> int:
    """Reads the settings, serves until SIGTERM."""
    try:
        settings = load(Settings, os.environ)
    except SettingsError as error:
        print(f"The billing service cannot start:\n{error}", file=sys.stderr)
        return 1
    start_logging("billing", settings.log_level)
    try:
        serve_metrics("0.0.0.0", settings.metrics_port)
    except OSError as error:
        print(f"THREADLOOM_METRICS_PORT: port {settings.metrics_port} cannot be used: {error}", file=sys.stderr)
        return 1
    uvloop.run(_main(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
