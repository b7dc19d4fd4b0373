"""The JSON of the conversations dialect: what comes in, what goes out. OpenAPI is made from these.

Absent values are null; a field that belongs to some kinds only is left out of the others.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Time = Annotated[str, Meta(description="RFC 3339, UTC, microseconds.", extra_json_schema={"format": "date-time"})]
Id = Annotated[str, Meta(extra_json_schema={"format": "uuid"})]
MessageId = Annotated[str, Meta(description="`msg_` and a UUID.")]
Usd = Annotated[str, Meta(description="USD with 9 decimals.", pattern=r"^-?(0|[1-9][0-9]*)\.[0-9]{9}$")]
# The bounds of an int32 are shape (it could not be passed on); what is allowed within is the service's rule.
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class NewConversation(Struct, forbid_unknown_fields=True):
    """A new conversation. Every field is optional."""

    title: Annotated[str, Meta(description="At most 200 characters; without it the first message gives it.")] | None = (
        None
    )
    system_prompt: Annotated[str, Meta(description="At most 200,000 characters.")] | None = None
    default_model_slug: Annotated[str, Meta(description="The model of messages that name none.")] | None = None
    user_id: Annotated[str, Meta(description="Service role only: the user to create it for.")] | None = None


class ConversationChange(Struct, forbid_unknown_fields=True):
    """The fields to change; null clears one."""

    title: str | UnsetType | None = UNSET
    system_prompt: str | UnsetType | None = UNSET
    default_model_slug: str | UnsetType | None = UNSET


class TextPart(Struct, forbid_unknown_fields=True):
    """A piece of text."""

    type: Literal["text"]
    text: str


class CancelAfter(Struct, forbid_unknown_fields=True):
    """Cancels an answer nobody follows."""

    cancel_after_s: Annotated[
        float, Meta(description="1 to 3600, to the millisecond.", extra_json_schema={"minimum": 1, "maximum": 3600})
    ]


class NewMessage(Struct, forbid_unknown_fields=True):
    """A user message and how to answer it."""

    content: Annotated[
        str | list[TextPart], Meta(description="Text, or 1 to 50 parts; 200,000 characters over all of them.")
    ]
    model: Annotated[str, Meta(description="Instead of the conversation's.")] | None = None
    system: Annotated[str, Meta(description="Added to the system prompt for this answer.")] | None = None
    temperature: Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 2})] | None = None
    max_output_tokens: Annotated[Int32, Meta(extra_json_schema={"minimum": 1})] | None = None
    min_output_tokens: (
        Annotated[
            Int32,
            Meta(
                description="The fewest worth an answer: refused when quota and caps do not pay for so many.",
                extra_json_schema={"minimum": 1},
            ),
        ]
        | None
    ) = None
    reasoning_effort: Annotated[str, Meta(description="`minimal`, `low`, `medium`, `high`.")] | None = None
    fallback_models: Annotated[
        list[str], Meta(description="Models to go on with, in this order, when one fails before it wrote. At most 5.")
    ] = []
    if_running: Annotated[
        Literal["reject", "enqueue", "interrupt"],
        Meta(
            description="When the conversation already runs: `reject` answers 409; `enqueue` waits for its turn, at"
            " most 10 may wait; `interrupt` cancels the running answer, which keeps its text, and is next."
        ),
    ] = "reject"
    on_disconnect: Annotated[
        Literal["continue"] | CancelAfter,
        Meta(description="When no client follows the answer any more: it goes on, or is cancelled after a while."),
    ] = "continue"
    background: Annotated[
        bool, Meta(description="Answers 202 at once instead of streaming; follow it with `GET …/stream`.")
    ] = False


class Cancel(Struct, forbid_unknown_fields=True):
    """Which run to cancel; without `run_id` the one in progress."""

    run_id: str | None = None
    queued: Annotated[bool, Meta(description="Also those that wait for their turn; only without `run_id`.")] = False


class NewTicket(Struct, forbid_unknown_fields=True):
    """Nothing is asked."""


class Conversation(Struct):
    """A conversation."""

    id: Id
    user_id: str
    title: str | None
    system_prompt: str | None
    default_model_slug: str | None
    created_at: Time
    updated_at: Time
    active_run_id: Annotated[Id, Meta(description="The run in progress.")] | None
    queued_runs: Annotated[int, Meta(description="How many messages wait for the answers before theirs.")]
    input_tokens: int
    output_tokens: int
    thinking_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    cost_usd: Annotated[Usd, Meta(description="All model calls that ended, those of failed answers included.")]
    usage_estimated: Annotated[bool, Meta(description="Whether some figure was estimated because a call was cut.")]


class ConversationPage(Struct):
    """Conversations, newest change first."""

    data: list[Conversation]
    next_cursor: str | None


class ErrorInfo(Struct, omit_defaults=True):
    """Why a message failed."""

    code: str
    message: str
    retry_after: int | float | None = None
    provider: str | None = None


class Message(Struct):
    """One message. What only an answer has is null on a user's message."""

    id: MessageId
    conversation_id: Id
    role: Literal["user", "assistant"]
    status: Literal["streaming", "complete", "error", "cancelled"]
    content: Annotated[str | list[TextPart], Meta(description="Parts when the user gave several, else text.")]
    model: str | None
    provider: str | None
    input_tokens: int | None
    output_tokens: int | None
    thinking_tokens: int | None
    cached_tokens: int | None
    cache_write_tokens: int | None
    cost_usd: Annotated[Usd, Meta(description="All model calls of its run.")] | None
    cost_credits: Annotated[int, Meta(description="`cost_usd` at the project's rate, rounded once.")] | None
    cost_cents_usd: Annotated[int, Meta(description="`cost_usd` in 10⁻⁶ USD, rounded once.")] | None
    usage_estimated: bool | None
    latency_ms: int | None
    finish_reason: str | None
    error: ErrorInfo | None
    created_at: Time
    run_id: Id | None
    cursor: (
        Annotated[
            str, Meta(description="Streaming only: `GET …/stream?after=` goes on with exactly the next character.")
        ]
        | None
    )


class MessagePage(Struct):
    """Messages, oldest first."""

    data: list[Message]
    next_cursor: str | None


class Trace(Struct, omit_defaults=True):
    """One trace. Which figures it has depends on its type."""

    id: Annotated[str, Meta(description="`evt_001`, unique within the run.")]
    run_id: Id
    message_id: MessageId | None
    type: Annotated[
        str, Meta(description="`thinking`, `llm_request`, `error`, `retry`, `model_switch`, and others to come.")
    ]
    step: int
    started_at: Time
    ended_at: Time | None
    text: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    input_tokens: int | UnsetType = UNSET
    output_tokens: int | UnsetType = UNSET
    thinking_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    cache_write_tokens: int | UnsetType = UNSET
    cost_usd: Usd | UnsetType = UNSET
    usage_estimated: bool | UnsetType = UNSET
    latency_ms: int | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    provider: str | UnsetType = UNSET
    retry_after: int | float | UnsetType = UNSET
    attempt: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    delay_ms: int | UnsetType = UNSET
    withdrawn_chars: int | UnsetType = UNSET
    from_model: str | UnsetType = UNSET
    to_model: str | UnsetType = UNSET


class TracePage(Struct):
    """Traces in the order they were opened."""

    data: list[Trace]
    next_cursor: str | None


class AcceptedRun(Struct):
    """A run that was accepted, in the background."""

    run_id: Id
    user_message_id: MessageId
    message_id: Annotated[MessageId, Meta(description="The answer's, once there is one.")]
    status: Literal["running", "queued", "succeeded", "failed", "cancelled"]


class CancelledRun(Struct):
    """What became of the wish to cancel. A run that still ends is `cancelling`; `idle`: none was in progress."""

    run_id: Id | None
    status: Literal["cancelling", "cancelled", "succeeded", "failed", "idle"]


class Ticket(Struct):
    """Opens one event stream, once."""

    ticket: str
    expires_at: Time


class Health(Struct):
    """Whether this gateway lives, or can serve."""

    status: Literal["ok", "draining", "unavailable"]


class Links(Struct):
    """Where to go from here."""

    name: str
    conversations: str
    openapi: str
    health: str
    ready: str
