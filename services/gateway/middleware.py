"""What every request passes, as plain ASGI: its id, log line and metrics; errors as JSON.

No BaseHTTPMiddleware: it costs 20 to 30 µs for each piece of a stream.
"""

import re
import time
from dataclasses import dataclass

import structlog
from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kit.errors import ServiceError, internal
from kit.ids import new_id
from kit.telemetry import UNEXPECTED_ERRORS, log
from services.gateway.limits import LOGGED_PATH_CHARS, REQUEST_ID_CHARS
from services.gateway.problems import to_response

REQUESTS = Counter(
    "threadloom_http_requests_total", "Requests by route, method and status.", ["route", "method", "status"]
)
REQUEST_SECONDS = Histogram("threadloom_http_seconds", "Time of a request, a stream to its end.", ["route"])

REQUEST_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{REQUEST_ID_CHARS}}}")
# Anything else a client makes up would be a new time series.
METHODS = frozenset(("GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS"))
# What the log and the metrics call a request whose client left before its status (nginx's number).
LEFT = 499

# Asked every second by machines: logged only when something is wrong, or at DEBUG.
PROBES = frozenset(("/healthz", "/readyz", "/metrics"))

# Logged by their pattern: a key pasted into the wrong place would stand in the path.
LOGGED_BY_ROUTE = frozenset(("/v1/admin/provider-keys/{provider}",))

EXCHANGE = "threadloom.exchange"


class TransferBroken(Exception):
    """Ends a response that has begun so that the client sees a broken transfer, not the end."""


class ClientLeft(Exception):
    """The client closed its connection: nobody reads what would come."""


@dataclass
class Exchange:
    """One request and what became of it. `status` is 0 until the head is sent."""

    request_id: str
    status: int = 0
    route: str = "unknown"
    run_id: str = ""
    outcome: str = "complete"


def exchange_of(scope: Scope) -> Exchange:
    """The exchange of a request that came through Observe."""
    found: Exchange = scope[EXCHANGE]
    return found


class Observe:
    """Outermost: gives the request its id, puts it on the response, logs and counts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request."""
        exchange = scope[EXCHANGE] = Exchange(request_id_of(Headers(scope=scope)))
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)
        header = (b"x-request-id", exchange.request_id.encode())

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        start = time.monotonic()
        try:
            await self._app(scope, receive, sending)
        except TransferBroken:
            exchange.outcome = "broken"
            raise
        except ClientLeft:
            exchange.outcome = "client left"
        finally:
            _report(scope, exchange, time.monotonic() - start)


def _report(scope: Scope, exchange: Exchange, elapsed_seconds: float) -> None:
    """The access log holds the path and nothing a client could have put a secret into."""
    path = exchange.route if exchange.route in LOGGED_BY_ROUTE else scope["path"]
    status = exchange.status or LEFT
    method = scope["method"] if scope["method"] in METHODS else "other"
    REQUESTS.labels(exchange.route, method, status).inc()
    REQUEST_SECONDS.labels(exchange.route).observe(elapsed_seconds)
    run = {"run_id": exchange.run_id} if exchange.run_id else {}
    write = log.debug if exchange.route in PROBES and status < LEFT else log.info
    write(
        "request",
        method=method,
        path=path[:LOGGED_PATH_CHARS],
        status=status,
        seconds=round(elapsed_seconds, 4),
        outcome=exchange.outcome,
        **run,
    )


def request_id_of(headers: Headers) -> str:
    """The client's request id where it can be taken over, else a new one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else str(new_id())


class Errors:
    """Turns what the routes raise into a response; the gateway's only catch-all."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request."""
        exchange = exchange_of(scope)
        try:
            await self._app(scope, receive, send)
        except (TransferBroken, ClientLeft):
            raise
        except ServiceError as error:
            await _answer(error, exchange, scope, receive, send)
        except Exception as error:  # a bug: it must not leave, and must not pass unseen
            UNEXPECTED_ERRORS.labels("http").inc()
            log.error("request failed", route=exchange.route, exc_info=error)
            await _answer(internal(), exchange, scope, receive, send)


async def _answer(error: ServiceError, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
    if exchange.status:
        raise TransferBroken
    await to_response(error, exchange.request_id)(scope, receive, send)
