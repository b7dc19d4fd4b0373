"""Runs the conversation service: `python -m services.conversation`."""

import os
import sys

import uvloop

from kit.serving import stop_signal
from kit.settings import SettingsError, load
from kit.telemetry import serve_metrics, start_logging
from services.conversation.server import serve
from services.conversation.settings import Settings


async def _main(settings: Settings) -> None:
    await serve(settings, stop_signal())


def main() -> int:
    """Reads the settings, serves until SIGTERM, drains."""
    try:
        settings = load(Settings, os.environ)
        settings.check()
    except SettingsError as error:
        print(f"The conversation service cannot start:\n{error}", file=sys.stderr)
        return 1
    start_logging("conversation", settings.log_level)
    try:
        serve_metrics("0.0.0.0", settings.metrics_port)
    except OSError as error:
        print(f"THREADLOOM_METRICS_PORT: port {settings.metrics_port} cannot be used: {error}", file=sys.stderr)
        return 1
    uvloop.run(_main(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
