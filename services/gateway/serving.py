"""Runs the application under uvicorn: start, drain, stop."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from services.gateway.app import App
from services.gateway.limits import CLOSE_SECONDS, IDLE_CONNECTION_SECONDS
from services.gateway.middleware import ClientLeft, TransferBroken
from services.gateway.protocol import BoundedProtocol

BACKLOG = 2048  # connections the kernel holds while the loop is busy; the kernel's own bound is lower


class Server(uvicorn.Server):
    """A uvicorn server that leaves the signals to us: the drain comes before its shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def make_server(app: App) -> Server:
    """The server around the application."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Nothing here depends on the client's address, so nobody's word for it is taken.
        proxy_headers=False,
        timeout_keep_alive=IDLE_CONNECTION_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    logging.getLogger("uvicorn.error").addFilter(is_news)
    return Server(config)


def is_news(record: logging.LogRecord) -> bool:
    """Whether uvicorn reports something that our own log does not: broken transfers are on purpose, and logged."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, TransferBroken | ClientLeft | asyncio.CancelledError)


async def serve(app: App, sock: socket.socket, stopped: asyncio.Event, drain_seconds: float) -> None:
    """Serves until `stopped` is set, then drains and stops."""
    server = make_server(app)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await app.drain(drain_seconds)
    server.should_exit = True
    await serving
