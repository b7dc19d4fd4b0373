"""What every gRPC call passes on the server: request id, log and metrics, the caller, errors."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import structlog
from grpc import aio
from grpc_status import rpc_status

from kit import callers
from kit.errors import ServiceError, internal, to_status, unauthenticated
from kit.ids import new_id
from kit.telemetry import GRPC_SECONDS, UNEXPECTED_ERRORS, log

Handler = Any  # grpc's RpcMethodHandler is a bare namedtuple of callables
Request = TypeVar("Request")

# Methods that need no credential: probes and tools call them.
OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1.", "/grpc.reflection.v1alpha.")


class Guard(aio.ServerInterceptor):
    """Wraps every method but client-streaming ones; errors become rich statuses in one place."""

    def __init__(self, credential: str) -> None:
        self._credential = credential.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Puts the guard around the method's handler."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method.startswith(OPEN_SERVICES):
            return handler
        if handler.request_streaming:
            wrapped = self._guard_stream(method, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(
                wrapped, handler.request_deserializer, handler.response_serializer
            )
        if handler.response_streaming:
            wrapped = self._guard_stream(method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(
                wrapped, handler.request_deserializer, handler.response_serializer
            )
        wrapped = self._guard_unary(method, handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(wrapped, handler.request_deserializer, handler.response_serializer)

    def _guard_unary(self, method: str, inner: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            with Call(method) as call:
                try:
                    self._enter(context)
                    return await inner(request, context)
                except Exception as error:
                    await call.refuse(context, error)

        return guarded

    def _guard_stream(self, method: str, inner: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
        async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            with Call(method) as call:
                try:
                    self._enter(context)
                    async for response in inner(request, context):
                        yield response
                except Exception as error:
                    await call.refuse(context, error)

        return guarded

    def _enter(self, context: aio.ServicerContext[Any, Any]) -> None:
        """Believes the caller named in the metadata, or refuses."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        given = metadata.get(callers.CREDENTIAL_KEY, "").encode()
        if not hmac.compare_digest(given, self._credential):
            raise unauthenticated(f"Metadata {callers.CREDENTIAL_KEY} must hold the service credential.")
        request_id = metadata.get(callers.REQUEST_ID_KEY) or str(new_id())
        structlog.contextvars.bind_contextvars(request_id=request_id)
        callers.current_caller.set(callers.from_metadata(metadata))


class Call:
    """One call's time and outcome, for metrics and the log."""

    def __init__(self, method: str) -> None:
        self._method, self._code = method, "OK"

    def __enter__(self) -> "Call":
        self._start = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # grpc cancels the handler's task when the peer leaves, and aborts by raising.
        code = "CANCELLED" if kind and self._code == "OK" else self._code
        elapsed = time.monotonic() - self._start
        GRPC_SECONDS.labels(self._method, code).observe(elapsed)
        log.info("call", method=self._method, code=code, seconds=round(elapsed, 4))

    async def refuse(self, context: aio.ServicerContext[Any, Any], error: Exception) -> None:
        """Ends the call with a rich status. The catch-all of the servers: what is not ours becomes INTERNAL."""
        if isinstance(error, aio.AbortError):
            raise error
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # The peer left or its time was up: libraries make other errors of the cancellation, and nobody is told.
            self._code = "CANCELLED"
            raise asyncio.CancelledError from error
        await context.abort_with_status(rpc_status.to_status(to_status(self.failed(error))))

    def failed(self, error: Exception) -> ServiceError:
        """Notes the failure; returns what may be told of it."""
        if not isinstance(error, ServiceError):
            UNEXPECTED_ERRORS.labels("grpc").inc()
            log.error("call failed", method=self._method, exc_info=error)
            error = internal()
        self._code = error.reason
        return error
