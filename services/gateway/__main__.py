"""Runs the gateway: `python -m services.gateway`."""

import os
import sys

import uvloop

from kit.serving import stop_signal
from kit.settings import SettingsError, load
from kit.telemetry import log, start_logging
from services.gateway.app import create_app
from services.gateway.clients import Clients
from services.gateway.serving import listen, serve
from services.gateway.settings import Settings


async def run(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError when the address is taken."""
    stopped = stop_signal()
    with listen(*settings.listen) as sock:
        clients = Clients(settings.conversation, settings.billing, settings.credential)
        host, port = sock.getsockname()[:2]
        log.info("listening", host=host, port=port)
        app = create_app(settings, clients)
        await serve(app, sock, stopped, settings.drain_seconds)
        await app.close()
        await clients.close()
        log.info("stopped")


def main() -> None:
    """Reads the settings and runs."""
    try:
        settings = load(Settings, os.environ)
    except SettingsError as error:
        sys.exit(f"The gateway cannot start:\n{error}")
    start_logging("gateway", settings.log_level)
    try:
        uvloop.run(run(settings))
    except OSError as error:
        host, port = settings.listen
        sys.exit(f"The gateway cannot listen on {host}:{port} (THREADLOOM_HTTP_LISTEN): {error.strerror}")


if __name__ == "__main__":
    main()
