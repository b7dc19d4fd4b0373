"""What the runner asks of a model and what it gets back, whichever provider answers."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kit.errors import ServiceError


@dataclass(frozen=True)
class ModelRequest:
    """One call. `call_id` is the api_calls row; it travels to the provider as its request id."""

    call_id: str
    model: str
    messages: list[dict[str, Any]]
    api_key: str = field(default="", repr=False)  # of the run's project; set when the call is made
    temperature: float | None = None
    max_output_tokens: int | None = None
    reasoning_effort: str = ""


@dataclass(frozen=True)
class Answered:
    """The provider accepted the call (2xx). First, once."""

    model: str
    provider: str


@dataclass(frozen=True)
class Reasoning:
    """Thinking was added; never empty, whole code points."""

    text: str


@dataclass(frozen=True)
class Text:
    """Reply text was added; never empty, whole code points."""

    text: str


@dataclass(frozen=True)
class TokenUsage:
    """What the provider says the call consumed; totals, the last one holds.

    Adapters normalise: thinking is a part of the output, cached and written to the cache are
    disjoint parts of the input.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    thinking_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    """The model stopped, and why in the provider's word."""

    reason: str


ModelEvent = Answered | Reasoning | Text | TokenUsage | Finished


@dataclass
class ProviderFailure(Exception):
    """The call failed. `http_status` is 0 when no answer came.

    `may_be_billed`: the request was sent and nobody refused it, so the provider may have worked on it.
    """

    error: ServiceError
    is_retryable: bool
    http_status: int = 0
    retry_after: float | None = None
    may_be_billed: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.error.reason)


class ModelClient(Protocol):
    """A provider adapter."""

    @property
    def provider(self) -> str:
        """The provider's name."""
        ...

    def stream(self, request: ModelRequest) -> AsyncGenerator[list[ModelEvent], None]:
        """Calls the model; yields what each network read brought, in order.

        Closing the iterator closes the provider's connection. Raises ProviderFailure;
        never retries by itself.
        """
        ...
