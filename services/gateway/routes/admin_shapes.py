"""The JSON of money and of a project's settings: what comes in, what goes out. OpenAPI is made from these."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from services.gateway.routes.shapes import Id, Int32, MessageId, Time

WrittenUsd = Annotated[
    str,
    Meta(
        description="USD as a string of digits with at most 9 decimals, such as `0.15`.",
        extra_json_schema={"pattern": r"^[0-9]+(\.[0-9]{1,9})?$"},
    ),
]
Usd = Annotated[
    str, Meta(description="USD with exactly 9 decimals.", extra_json_schema={"pattern": r"^-?[0-9]+\.[0-9]{9}$"})
]
# As Int32: what could not be passed on is refused here, what is allowed within is the service's rule.
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Period = Literal["day", "month", "total"]


class NewTier(Struct, kw_only=True, forbid_unknown_fields=True):
    """Prices of a call with more input than so many tokens, for all of its tokens. See NewPrice."""

    above_input_tokens: Annotated[Int64, Meta(description="1 to 1,000,000,000.")]
    input_usd: WrittenUsd
    output_usd: WrittenUsd
    cached_input_usd: WrittenUsd | None = None
    cache_write_usd: WrittenUsd | None = None


class NewPrice(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a million tokens of a model cost. Input tokens of a class without a price have that of `input_usd`."""

    model: Annotated[str, Meta(description="As messages name it, 1 to 200 characters.")]
    input_usd: WrittenUsd
    output_usd: Annotated[WrittenUsd, Meta(description="Output, reasoning included.")]
    cached_input_usd: Annotated[WrittenUsd, Meta(description="Input read from the provider's cache.")] | None = None
    cache_write_usd: Annotated[WrittenUsd, Meta(description="Input written to the provider's cache.")] | None = None
    request_fee_usd: Annotated[WrittenUsd, Meta(description="What each call costs besides its tokens.")] | None = None
    tiers: Annotated[list[NewTier], Meta(description="At most 10, rising by `above_input_tokens`.")] = []


class Tier(Struct):
    """Prices of a call with more input than so many tokens, for all of its tokens."""

    above_input_tokens: int
    input_usd: Usd
    output_usd: Usd
    cached_input_usd: Usd
    cache_write_usd: Usd


class Price(Struct):
    """What a million tokens of a model cost, and what each call costs besides."""

    model: str
    scope: Annotated[
        Literal["project", "every_project"],
        Meta(description="Whose it is: this project's own, which counts before one for every project."),
    ]
    input_usd: Usd
    output_usd: Usd
    cached_input_usd: Usd
    cache_write_usd: Usd
    request_fee_usd: Usd
    tiers: list[Tier]
    updated_at: Time


class PricePage(Struct):
    """Prices that were set, by model."""

    data: list[Price]
    next_cursor: str | None


class NewQuota(Struct, forbid_unknown_fields=True):
    """What a user may spend."""

    period: Annotated[Period, Meta(description="By UTC; `total` is all time.")]
    limit_usd: WrittenUsd


class NewCap(Struct, forbid_unknown_fields=True):
    """What the whole project may spend in the period."""

    limit_usd: WrittenUsd


class SpendLimit(Struct):
    """A quota or a cap, and what of it is used in the period that runs now."""

    period: Period
    limit_usd: Usd
    spent_usd: Annotated[Usd, Meta(description="Calls that were made.")]
    held_usd: Annotated[Usd, Meta(description="Set aside for calls that are being made.")]


class Caps(Struct):
    """The project's caps, at most one for each period."""

    data: list[SpendLimit]


class TermsChange(Struct, forbid_unknown_fields=True):
    """The terms to change."""

    credits_per_usd: Annotated[Int64, Meta(description="0 to 1,000,000,000.")] | UnsetType = UNSET
    runs_per_minute: Annotated[Int32, Meta(description="1 to 1,000,000.")] | UnsetType = UNSET


class Terms(Struct):
    """The terms in force, the deployment's where the project has none of its own."""

    credits_per_usd: Annotated[int, Meta(description="Credits for a USD, by which `cost_credits` is shown.")]
    runs_per_minute: Annotated[int, Meta(description="Runs with model calls a user may begin in a minute.")]


class PeriodSpend(Struct):
    """What was spent in a period that runs now."""

    period: Period
    limit_usd: Usd | None
    spent_usd: Usd
    held_usd: Usd


class Usage(Struct):
    """What a user, or with `user_id` null the whole project, spent: day, month and total."""

    user_id: str | None
    periods: list[PeriodSpend]


class OwnUsage(Struct):
    """What the caller spent, and its quota; null when it has none."""

    user_id: str
    periods: list[PeriodSpend]
    quota: SpendLimit | None


class LedgerEntry(Struct):
    """One model call in the books; never changed. The columns of the CSV are these fields, new ones at the end."""

    api_call_id: Id
    created_at: Annotated[Time, Meta(description="When it was booked.")]
    user_id: str
    conversation_id: Id
    message_id: Annotated[MessageId, Meta(description="The answer it was made for.")] | None
    run_id: Id
    model: str
    input_tokens: Annotated[int, Meta(description="All input, cached or not.")]
    cached_tokens: Annotated[int, Meta(description="The part of the input that was read from a cache.")]
    cache_write_tokens: Annotated[int, Meta(description="The part of the input that was written to a cache.")]
    output_tokens: Annotated[int, Meta(description="All output, thinking included.")]
    thinking_tokens: int
    usage_estimated: Annotated[bool, Meta(description="The call was cut, and its tokens are an estimate.")]
    cost_usd: Usd
    above_hold: Annotated[bool, Meta(description="It cost more than was set aside for it.")]
    late: Annotated[bool, Meta(description="It was booked after its money had been freed again.")]


class LedgerPage(Struct):
    """Ledger entries, newest first."""

    data: list[LedgerEntry]
    next_cursor: str | None


class NewProviderKey(Struct, forbid_unknown_fields=True):
    """A key of a model provider."""

    api_key: Annotated[
        str, Meta(description="8 to 4,096 printable ASCII characters. Kept encrypted, never shown again.")
    ]

    def __repr__(self) -> str:  # one that is logged by accident holds no secret
        return "NewProviderKey(api_key=…)"


class ProviderKey(Struct):
    """That the project has a key of the provider. The key itself is never shown."""

    provider: str
    updated_at: Time


class ProviderKeys(Struct):
    """The project's provider keys, by provider."""

    data: list[ProviderKey]


WebhookEvent = Literal["run.finished", "run.failed"]
WebhookUrl = Annotated[str, Meta(description="https, of a host on the public internet, at most 2,048 characters.")]


class NewWebhook(Struct, forbid_unknown_fields=True):
    """An address to tell of events."""

    url: WebhookUrl
    events: Annotated[list[WebhookEvent], Meta(description="At least one.")]


class WebhookChange(Struct, forbid_unknown_fields=True):
    """What is given is changed."""

    url: WebhookUrl | UnsetType = UNSET
    events: Annotated[list[WebhookEvent], Meta(min_length=1)] | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


class Webhook(Struct):
    """A webhook without its secret."""

    id: Id
    url: str
    events: list[WebhookEvent]
    enabled: bool
    disabled_reason: Annotated[str | None, Meta(description="`gone`: the receiver answered 410.")]
    created_at: Time
    updated_at: Time


class CreatedWebhook(Struct):
    """A webhook, and its signing secret, which is shown this once."""

    webhook: Webhook
    secret: str

    def __repr__(self) -> str:
        return f"CreatedWebhook(webhook={self.webhook!r}, secret=…)"


class WebhookSecret(Struct):
    """A new signing secret, which is shown this once."""

    secret: str

    def __repr__(self) -> str:
        return "WebhookSecret(secret=…)"


class Webhooks(Struct):
    """The project's webhooks, oldest first."""

    data: list[Webhook]


class WebhookDelivery(Struct):
    """One event for one webhook."""

    id: Annotated[str, Meta(description="The `webhook-id` of every try.")]
    webhook_id: Id
    type: str
    run_id: Id | None
    state: Literal["pending", "delivered", "failed"]
    attempts: int
    last_status: Annotated[int | None, Meta(description="HTTP status of the last try, if an answer came.")]
    last_error: str | None
    next_attempt_at: Time | None
    created_at: Time


class WebhookDeliveryPage(Struct):
    """Deliveries, newest first."""

    data: list[WebhookDelivery]
    next_cursor: str | None


JwksUrl = Annotated[
    str, Meta(description="Address of the JWKS: https, of a host on the public internet, at most 2,048 characters.")
]
Jwks = Annotated[
    dict[str, Any],
    Meta(description='The JWKS itself, such as `{"keys": […]}`: public keys, at most 16 KiB, RSA or P-256.'),
]
Issuer = Annotated[str, Meta(description="What `iss` must be; left out: it is not looked at.", min_length=1)]
Audience = Annotated[str, Meta(description="What `aud` must be or hold; left out: not looked at.", min_length=1)]
Hs256 = Annotated[bool, Meta(description="Whether tokens signed with the project's secret are taken as well.")]


class NewIdentity(Struct, kw_only=True, forbid_unknown_fields=True):
    """How tokens of the project's identity provider are verified: `jwks_url` or `jwks`, and what they must claim."""

    jwks_url: JwksUrl | None = None
    jwks: Jwks | None = None
    issuer: Issuer | None = None
    audience: Audience | None = None
    hs256: Hs256 = True


class Identity(Struct, kw_only=True):
    """How tokens of the project's identity provider are verified."""

    jwks_url: JwksUrl | None
    jwks: Jwks | None
    issuer: Issuer | None
    audience: Audience | None
    hs256: Hs256
    updated_at: Time
