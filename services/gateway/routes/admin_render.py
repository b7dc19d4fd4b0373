"""Between billing's messages and the JSON shapes, amounts as text on one side and nano-USD on the other. Pure."""

from typing import Literal, cast

import msgspec

from kit.errors import invalid
from kit.money import NANO_MAX, NANO_PER_USD, format_usd, read_usd
from kit.pricing import FEE_MAX, PRICE_MAX
from services.gateway.routes import admin_shapes as shapes
from services.gateway.routes.render import time
from services.gateway.wire.conversations import MESSAGE_PREFIX
from threadloom.billing.v1 import price_pb2, usage_pb2
from threadloom.common.v1 import rates_pb2
from threadloom.common.v1.money_pb2 import Money
from threadloom.conversation.v1 import project_service_pb2, webhook_service_pb2

PERIODS: dict[str, usage_pb2.Period.ValueType] = {
    "day": usage_pb2.PERIOD_DAY,
    "month": usage_pb2.PERIOD_MONTH,
    "total": usage_pb2.PERIOD_TOTAL,
}
PERIOD_NAMES: dict[int, shapes.Period] = {
    usage_pb2.PERIOD_DAY: "day",
    usage_pb2.PERIOD_MONTH: "month",
    usage_pb2.PERIOD_TOTAL: "total",
}


def period_in(text: str) -> usage_pb2.Period.ValueType:
    """The period a path names. Raises INVALID_OPTIONS."""
    if text not in PERIODS:
        raise invalid("period", f"period must be one of {', '.join(PERIODS)}.")
    return PERIODS[text]


def money_in(field: str, text: str, most: int = NANO_MAX) -> Money:
    """An amount a client wrote, at most `most` nano-USD. Raises INVALID_OPTIONS.

    Billing has the same bounds, for its gRPC callers; here they are told in the client's unit and under the
    name the client used.
    """
    try:
        nano = read_usd(text)
    except ValueError as error:
        raise invalid(field, f"{field} {error}.") from None
    if nano > most:
        raise invalid(field, f"{field} must be at most {most // NANO_PER_USD} USD.")
    return Money(nano_usd=nano)


def usd(amount: Money) -> str:
    """An amount as clients see it."""
    return format_usd(amount.nano_usd)


def rates_in(given: shapes.NewPrice) -> rates_pb2.Rates:
    """The rates a client wrote. Raises INVALID_OPTIONS."""
    tiers = [
        rates_pb2.PriceTier(
            above_input_tokens=tier.above_input_tokens, prices=_prices_in(tier, prefix=f"tiers[{number}].")
        )
        for number, tier in enumerate(given.tiers)
    ]
    return rates_pb2.Rates(
        base=_prices_in(given, prefix=""),
        tiers=tiers,
        request_fee=_money_or_none("request_fee_usd", given.request_fee_usd, FEE_MAX),
    )


def _prices_in(given: shapes.NewPrice | shapes.NewTier, prefix: str) -> rates_pb2.TokenPrices:
    return rates_pb2.TokenPrices(
        input=money_in(f"{prefix}input_usd", given.input_usd, PRICE_MAX),
        output=money_in(f"{prefix}output_usd", given.output_usd, PRICE_MAX),
        cached_input=_money_or_none(f"{prefix}cached_input_usd", given.cached_input_usd, PRICE_MAX),
        cache_write=_money_or_none(f"{prefix}cache_write_usd", given.cache_write_usd, PRICE_MAX),
    )


def _money_or_none(field: str, text: str | None, most: int) -> Money | None:
    return None if text is None else money_in(field, text, most)


def price(found: price_pb2.Price) -> shapes.Price:
    """A price; a class without one of its own shows the one that counts."""
    base = _Prices(found.rates.base)
    return shapes.Price(
        model=found.model,
        scope="project" if found.project_id else "every_project",
        input_usd=base.input,
        output_usd=base.output,
        cached_input_usd=base.cached_input,
        cache_write_usd=base.cache_write,
        request_fee_usd=usd(found.rates.request_fee),
        tiers=[_tier(tier) for tier in found.rates.tiers],
        updated_at=time(found.update_time),
    )


def _tier(found: rates_pb2.PriceTier) -> shapes.Tier:
    prices = _Prices(found.prices)
    return shapes.Tier(
        above_input_tokens=found.above_input_tokens,
        input_usd=prices.input,
        output_usd=prices.output,
        cached_input_usd=prices.cached_input,
        cache_write_usd=prices.cache_write,
    )


class _Prices:
    """Token prices as text."""

    def __init__(self, found: rates_pb2.TokenPrices) -> None:
        self.input, self.output = usd(found.input), usd(found.output)
        self.cached_input = usd(found.cached_input) if found.HasField("cached_input") else self.input
        self.cache_write = usd(found.cache_write) if found.HasField("cache_write") else self.input


def spend_limit(found: usage_pb2.PeriodUsage) -> shapes.SpendLimit:
    """A quota or a cap."""
    return shapes.SpendLimit(PERIOD_NAMES[found.period], usd(found.limit), usd(found.spent), usd(found.held))


def period_spend(found: usage_pb2.PeriodUsage) -> shapes.PeriodSpend:
    """What was spent in a period, with a limit or without."""
    limit = usd(found.limit) if found.HasField("limit") else None
    return shapes.PeriodSpend(PERIOD_NAMES[found.period], limit, usd(found.spent), usd(found.held))


def terms(found: price_pb2.Terms) -> shapes.Terms:
    """A project's terms."""
    return shapes.Terms(found.credits_per_usd, found.runs_per_minute)


def ledger_entry(found: usage_pb2.LedgerEntry) -> shapes.LedgerEntry:
    """One call in the books."""
    return shapes.LedgerEntry(
        api_call_id=found.api_call_id,
        created_at=time(found.create_time),
        user_id=found.user_id,
        conversation_id=found.thread_id,
        message_id=MESSAGE_PREFIX + found.message_id if found.message_id else None,
        run_id=found.run_id,
        model=found.model,
        input_tokens=found.usage.input_tokens,
        cached_tokens=found.usage.cached_input_tokens,
        cache_write_tokens=found.usage.cache_write_tokens,
        output_tokens=found.usage.output_tokens,
        thinking_tokens=found.usage.reasoning_tokens,
        usage_estimated=found.estimated,
        cost_usd=usd(found.cost),
        above_hold=found.above_hold,
        late=found.late,
    )


def provider_key(found: project_service_pb2.ProviderKey) -> shapes.ProviderKey:
    """That there is a key of a provider."""
    return shapes.ProviderKey(found.provider, time(found.update_time))


DELIVERY_STATES: dict[int, Literal["pending", "delivered", "failed"]] = {
    webhook_service_pb2.DELIVERY_STATE_PENDING: "pending",
    webhook_service_pb2.DELIVERY_STATE_DELIVERED: "delivered",
    webhook_service_pb2.DELIVERY_STATE_FAILED: "failed",
}


def webhook(found: webhook_service_pb2.Webhook) -> shapes.Webhook:
    """A webhook."""
    return shapes.Webhook(
        id=found.id,
        url=found.url,
        events=cast("list[shapes.WebhookEvent]", list(found.events)),
        enabled=found.enabled,
        disabled_reason=found.disabled_reason or None,
        created_at=time(found.create_time),
        updated_at=time(found.update_time),
    )


def webhook_delivery(found: webhook_service_pb2.WebhookDelivery) -> shapes.WebhookDelivery:
    """A delivery."""
    return shapes.WebhookDelivery(
        id=found.id,
        webhook_id=found.webhook_id,
        type=found.type,
        run_id=found.run_id or None,
        state=DELIVERY_STATES[found.state],
        attempts=found.attempts,
        last_status=found.last_status or None,
        last_error=found.last_error or None,
        next_attempt_at=time(found.next_attempt_time) if found.HasField("next_attempt_time") else None,
        created_at=time(found.create_time),
    )


def identity_in(given: shapes.NewIdentity) -> project_service_pb2.Identity:
    """The identity a client wrote. Raises INVALID_OPTIONS."""
    found = project_service_pb2.Identity(
        issuer=given.issuer or "", audience=given.audience or "", refuses_hs256=not given.hs256
    )
    if given.jwks_url is not None and given.jwks is not None:
        raise invalid("jwks", "Send either jwks_url or jwks, not both.")
    if given.jwks_url is not None:
        found.jwks_url = given.jwks_url
    elif given.jwks is not None:
        found.jwks = msgspec.json.encode(given.jwks).decode()
    return found


def identity(found: project_service_pb2.Identity) -> shapes.Identity:
    """An identity."""
    has_url = found.WhichOneof("keys") == "jwks_url"
    return shapes.Identity(
        jwks_url=found.jwks_url if has_url else None,
        jwks=None if has_url else msgspec.json.decode(found.jwks),
        issuer=found.issuer or None,
        audience=found.audience or None,
        hs256=not found.refuses_hs256,
        updated_at=time(found.update_time),
    )
