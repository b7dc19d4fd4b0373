"""The ASGI application: middleware, router, and the pipeline every operation passes."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kit.errors import ServiceError
from kit.outbound import Outbound
from services.gateway import incoming, openapi
from services.gateway.clients import Clients
from services.gateway.context import Context
from services.gateway.incoming import Incoming
from services.gateway.jwks import JwksCache
from services.gateway.limits import Patience
from services.gateway.middleware import Errors, Observe, exchange_of
from services.gateway.problems import in_dialect, method_not_allowed
from services.gateway.routes import (
    caps,
    conversations,
    identity,
    ledger,
    messages,
    prices,
    provider_keys,
    quotas,
    runs,
    system,
    terms,
    usage,
    webhooks,
)
from services.gateway.routes.operations import OpenOperation, Operation
from services.gateway.settings import LOCALHOST, Settings

# Any port of this machine: what a developer's web app is served from.
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"

OPERATIONS: tuple[Operation | OpenOperation, ...] = (
    *conversations.OPERATIONS,
    *messages.OPERATIONS,
    *runs.OPERATIONS,
    *usage.OPERATIONS,
    *prices.OPERATIONS,
    *quotas.OPERATIONS,
    *caps.OPERATIONS,
    *terms.OPERATIONS,
    *ledger.OPERATIONS,
    *provider_keys.OPERATIONS,
    *webhooks.OPERATIONS,
    *identity.OPERATIONS,
    *system.OPERATIONS,
)


class App:
    """The gateway as an ASGI application that can be drained."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        await self._app(scope, receive, send)

    async def drain(self, seconds: float) -> None:
        """Turns readiness off, lets open streams end for so long, then breaks them."""
        self._context.is_draining = True
        await self._context.streams.drain(seconds)

    async def close(self) -> None:
        """Lets go of all that it holds, when nothing is served any more."""
        await self._context.jwks.close()


def create_app(settings: Settings, clients: Clients, patience: Patience | None = None) -> App:
    """The application. Call it inside the running loop."""
    jwks = JwksCache(lambda: Outbound(settings.allowed_hosts))
    context = Context(clients, patience or Patience(), openapi.document(OPERATIONS), jwks)
    router = Router(routes(context), redirect_slashes=False, default=not_found)
    # Errors inside CORS, so that a web app can read them; Observe around all, so that every answer has an id.
    return App(Observe(_with_cors(Errors(router), settings.origins)), context)


def routes(context: Context) -> list[Route]:
    """One Starlette route per path: so a 405 can name every method the path knows."""
    paths: dict[str, dict[str, Operation | OpenOperation]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = operation
    # A user id may hold a slash, which a client writes as %2F and the router sees in clear.
    return [
        Route(path.replace("{user_id}", "{user_id:path}"), Endpoint(context, path, methods))
        for path, methods in paths.items()
    ]


class Endpoint:
    """All operations of one path."""

    def __init__(self, context: Context, path: str, methods: dict[str, Operation | OpenOperation]) -> None:
        self._context, self._path, self._methods = context, path, methods
        self._allowed = ", ".join(sorted(methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the operation of the request's method."""
        # The `$` of a route's pattern also fits before a last line break, and a user id's may be empty.
        if scope["path"].endswith("\n") or "" in scope["path_params"].values():
            raise unknown_path()
        exchange_of(scope).route = self._path
        method = scope["method"]
        operation = self._methods.get(method)
        if operation is None and method == "HEAD":
            operation = self._head()
        if operation is None:
            raise method_not_allowed(self._allowed)
        try:
            response = await self._handle(operation, scope, receive)
            await response(scope, receive, send)
        except ServiceError as error:
            raise in_dialect(error, scope["path_params"].get("conversation_id", "")) from None

    def _head(self) -> Operation | OpenOperation | None:
        """HEAD is GET without its body, which the server leaves out; a stream has nothing else."""
        found = self._methods.get("GET")
        is_stream = found is not None and any(answer.media_type == "text/event-stream" for answer in found.answers)
        return None if is_stream else found

    async def _handle(self, operation: Operation | OpenOperation, scope: Scope, receive: Receive) -> ASGIApp:
        if isinstance(operation, OpenOperation):
            return await operation.handler(self._context)
        return await operation.handler(self._context, await read(self._context, operation, scope, receive))


async def read(context: Context, operation: Operation, scope: Scope, receive: Receive) -> Incoming:
    """The request, caller first: who may not ask is not told what is wrong with the question."""
    headers, request_id = Headers(scope=scope), exchange_of(scope).request_id
    ticket = incoming.ticket_of(scope["query_string"]) if operation.takes_ticket else ""
    if ticket:
        caller = await context.auth.ticket(ticket, request_id)
    elif operation.is_for_admins:
        caller = await context.auth.admin(headers, request_id)
    else:
        caller = await context.auth.caller(headers, request_id)
    query = incoming.parse_query(scope["query_string"], [parameter.name for parameter in operation.query])
    body = None
    if operation.body is not None:
        raw = await incoming.read_body(scope, receive)
        body = incoming.decode(raw or b"{}" if operation.body_is_optional else raw, operation.body)
    return Incoming(caller, request_id, headers, scope["path_params"], query, body)


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Any path no route has."""
    raise unknown_path()


def unknown_path() -> ServiceError:
    """NOT_FOUND naming the kind `path`."""
    return ServiceError("NOT_FOUND", "This path does not exist. See /openapi.json for those that do.", {"kind": "path"})


def _with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=[origin for origin in origins if origin != LOCALHOST],
        allow_origin_regex=LOCAL_ORIGINS if LOCALHOST in origins else None,
        allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
        # No cookies are used, so any header may come; client libraries add their own.
        allow_headers=("*",),
        expose_headers=("X-Request-Id", "Retry-After", "X-Run-Id", "Content-Disposition"),
        max_age=600,
    )
