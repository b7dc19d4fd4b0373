"""JSON logs and metrics.

A log line carries the request and run ids bound in the context, never user text.
"""

import logging
import re
import sys
from typing import Any

import structlog
from prometheus_client import Counter, Histogram, start_http_server

GRPC_SECONDS = Histogram("threadloom_grpc_seconds", "Time of a gRPC call, a stream to its end.", ["method", "code"])
UNEXPECTED_ERRORS = Counter("threadloom_unexpected_errors_total", "Exceptions nobody expected.", ["where"])

log = structlog.get_logger()

# What Postgres adds to an error in DETAIL and CONTEXT quotes the row: text of users, or a secret.
ROW_VALUES = re.compile(
    r"^(DETAIL|CONTEXT|WHERE): .*?(?=^(?:The above|During handling|Traceback|\[SQL|[\w.]+Error)|\Z)", re.M | re.S
)


def hide_row_values(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A processor that takes row values out of a logged exception."""
    if "exception" in event:
        event["exception"] = ROW_VALUES.sub(r"\1: [hidden]\n", event["exception"])
    return event


def start_logging(service: str, level: str = "INFO") -> None:
    """Sends every log line, also those of libraries, to stdout as one JSON object."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        hide_row_values,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stdout),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Per-request lines of libraries would repeat ours, and some hold URLs.
    for noisy in ("openai", "httpx2", "httpcore2", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def serve_metrics(address: str, port: int) -> None:
    """Serves /metrics on its own port from a thread; port 0 turns it off. Raises OSError when it is taken."""
    if port:
        start_http_server(port, addr=address)
