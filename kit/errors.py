"""The one error type of the services, and its form on the wire.

An error is raised once as a ServiceError, turned once into a gRPC status (by
`kit.interceptors`) and once into HTTP (by the gateway). This module imports no
grpc, so that pure code may raise; status codes are plain numbers here.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from threadloom.common.v1 import error_pb2

DOMAIN = "threadloom"


class Class(NamedTuple):
    """How a reason looks outside: a google.rpc.Code, an HTTP status, and whether a retry can help."""

    grpc: int
    http: int
    retryable: bool


# One row a reason; tests/unit/kit/test_errors.py holds it against error_reason.proto.
CLASSES: dict[str, Class] = {
    "THREAD_NOT_FOUND": Class(5, 404, False),
    "NOT_FOUND": Class(5, 404, False),
    "IDEMPOTENCY_KEY_REUSED": Class(3, 422, False),
    "CURSOR_EXPIRED": Class(11, 410, False),
    "INVALID_OPTIONS": Class(3, 400, False),
    "NO_USER_MESSAGE": Class(9, 400, False),
    "CONTENT_TOO_LARGE": Class(3, 413, False),
    "RUN_IN_PROGRESS": Class(10, 409, True),
    "AI_PROVIDER_NOT_CONFIGURED": Class(9, 409, False),
    "AI_PROVIDER_ERROR": Class(14, 502, True),
    "AI_PROVIDER_TIMEOUT": Class(4, 504, True),
    "AI_RATE_LIMITED": Class(8, 429, True),
    "CONTEXT_TOO_LARGE": Class(3, 400, False),
    "TURN_TIMEOUT": Class(4, 504, True),
    "UNAUTHENTICATED": Class(16, 401, False),
    "FORBIDDEN": Class(7, 403, False),
    "UNAVAILABLE": Class(14, 503, True),
    "INTERNAL": Class(13, 500, False),
    "ALREADY_EXISTS": Class(6, 409, False),
    "MODEL_NOT_PRICED": Class(9, 409, False),
    "QUOTA_EXCEEDED": Class(8, 402, False),
    "AI_BUDGET_EXCEEDED": Class(8, 402, False),
}


@dataclass
class ServiceError(Exception):
    """A failure with a reason a client can branch on and a sentence a human can read.

    `metadata` holds the keys error_reason.proto lists for the reason; `retry_after`
    is in seconds.
    """

    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)
    retry_after: float | None = None

    def __post_init__(self) -> None:
        super().__init__(self.reason, self.message)

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    @property
    def kind(self) -> Class:
        """The reason's class; an unknown reason counts as INTERNAL."""
        return CLASSES.get(self.reason, CLASSES["INTERNAL"])


def invalid(field_name: str, message: str) -> ServiceError:
    """INVALID_OPTIONS naming the field."""
    return ServiceError("INVALID_OPTIONS", message, {"field": field_name})


def not_found(what: str) -> ServiceError:
    """NOT_FOUND naming the kind of thing."""
    return ServiceError("NOT_FOUND", f"This {what} does not exist.", {"kind": what})


def thread_not_found() -> ServiceError:
    """THREAD_NOT_FOUND, also for a thread of somebody else: no existence leaks."""
    return ServiceError("THREAD_NOT_FOUND", "This conversation does not exist.")


def unauthenticated(message: str) -> ServiceError:
    """UNAUTHENTICATED; the message says what to send."""
    return ServiceError("UNAUTHENTICATED", message)


def unavailable(message: str, retry_after: float | None = 1.0) -> ServiceError:
    """UNAVAILABLE: a part of the system is away and the same call may work later."""
    return ServiceError("UNAVAILABLE", message, retry_after=retry_after)


def internal() -> ServiceError:
    """INTERNAL with a neutral message; the cause belongs in the log."""
    return ServiceError("INTERNAL", "Something went wrong on our side.")


def to_status(error: ServiceError) -> status_pb2.Status:
    """The rich gRPC status: ErrorInfo, and RetryInfo when a wait is known."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_pack(info)]
    if error.retry_after is not None:
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=seconds(error.retry_after))))
    return status_pb2.Status(code=error.kind.grpc, message=error.message, details=details)


def from_status(status: status_pb2.Status) -> ServiceError | None:
    """The ServiceError inside a status, or None when it carries none of ours."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    found, retry_after = False, None
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            found = info.domain == DOMAIN
        elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    if not found:
        return None
    return ServiceError(info.reason, status.message, dict(info.metadata), retry_after)


def to_event_error(error: ServiceError) -> error_pb2.Error:
    """The error object events and messages carry."""
    found = error_pb2.Error(
        code=error.reason,
        message=error.message,
        provider=error.metadata.get("provider", ""),
        provider_status=int(error.metadata.get("status", 0)),
    )
    if error.retry_after is not None:
        found.retry_after.CopyFrom(seconds(error.retry_after))
    return found


def from_event_error(error: error_pb2.Error) -> ServiceError:
    """The ServiceError an event's error object stands for."""
    metadata = {}
    if error.provider:
        metadata["provider"] = error.provider
    if error.provider_status:
        metadata["status"] = str(error.provider_status)
    wait = error.retry_after.ToNanoseconds() / 1e9 if error.HasField("retry_after") else None
    return ServiceError(error.code, error.message, metadata, wait)


def seconds(value: float) -> duration_pb2.Duration:
    """A Duration of so many seconds."""
    found = duration_pb2.Duration()
    found.FromNanoseconds(round(value * 1e9))
    return found


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
