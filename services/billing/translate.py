"""Between stored rows, the numbers of kit.pricing and the messages of billing.v1; checks what callers send."""

import re
from datetime import datetime
from uuid import UUID

from google.protobuf.timestamp_pb2 import Timestamp

from kit import pages
from kit.errors import ServiceError, invalid
from kit.ids import is_model_slug, parse_id
from kit.money import CREDITS_PER_USD_MAX, NANO_MAX
from kit.pricing import TOKENS_MAX, Rates, Usage
from kit.rates import from_message
from services.billing import limits
from services.billing.domain.calls import Call
from services.billing.domain.granting import Wish
from services.billing.domain.terms import Terms
from services.billing.store.holds import HoldRow
from services.billing.store.ledger import LedgerEntry
from services.billing.store.rules import EVERY_PROJECT, PriceRow
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.hold_pb2 import Hold, HoldState
from threadloom.billing.v1.price_pb2 import Price
from threadloom.billing.v1.price_pb2 import Terms as TermsMessage
from threadloom.billing.v1.usage_pb2 import LedgerEntry as EntryMessage
from threadloom.billing.v1.usage_pb2 import Period, PeriodUsage, TokenUsage
from threadloom.common.v1.money_pb2 import Money
from threadloom.common.v1.rates_pb2 import Rates as RatesMessage

STATES = {
    "open": HoldState.HOLD_STATE_OPEN,
    "settled": HoldState.HOLD_STATE_SETTLED,
    "released": HoldState.HOLD_STATE_RELEASED,
    "expired": HoldState.HOLD_STATE_EXPIRED,
}
PERIODS = {"day": Period.PERIOD_DAY, "month": Period.PERIOD_MONTH, "total": Period.PERIOD_TOTAL}
PERIOD_NAMES = {number: name for name, number in PERIODS.items()}
# What a shell and make take as it is. A slug is a caller's text, and an operator types what we print.
TYPED_AS_IT_IS = re.compile(r"[\w.:/@+-]+", re.ASCII)


def money(nano: int) -> Money:
    """An amount."""
    return Money(nano_usd=nano)


def timestamp(at: datetime) -> Timestamp:
    """A time."""
    found = Timestamp()
    found.FromDatetime(at)
    return found


def id_in(text: str, field: str) -> UUID:
    """A UUID a caller sent."""
    found = parse_id(text)
    if found is None:
        raise invalid(field, f"{field} must be a UUID.")
    return found


def model_in(text: str) -> str:
    """A model's slug a caller sent."""
    if not is_model_slug(text) or len(text) > limits.MODEL_CHARS:
        raise invalid("model", f"model must be 1 to {limits.MODEL_CHARS} printable characters.")
    return text


def limit_in(given: Money) -> int:
    """A limit a caller sent."""
    if not 0 <= given.nano_usd <= NANO_MAX:
        raise invalid("limit", "limit must not be negative.")
    return given.nano_usd


def period_in(number: int) -> str:
    """A period a caller sent."""
    if number not in PERIOD_NAMES:
        raise invalid("period", "period must be PERIOD_DAY, PERIOD_MONTH or PERIOD_TOTAL.")
    return PERIOD_NAMES[Period.ValueType(number)]


def call_in(request: api.PlaceHoldRequest | api.ReleaseRequest, user: str) -> Call:
    """Whose call a request is about."""
    return Call(
        id_in(request.api_call_id, "api_call_id"),
        id_in(request.project_id, "project_id"),
        user,
        id_in(request.run_id, "run_id"),
        id_in(request.thread_id, "thread_id"),
        id_in(request.message_id, "message_id"),
        model_in(request.model),
    )


def wish_in(request: api.PlaceHoldRequest) -> Wish:
    """The tokens a hold is asked for."""
    wish = Wish(request.input_tokens_max, request.max_output_tokens, request.min_output_tokens)
    if not 0 <= wish.input_max <= TOKENS_MAX:
        raise invalid("input_tokens_max", f"input_tokens_max must be 0 to {TOKENS_MAX}.")
    if not 1 <= wish.output_max <= TOKENS_MAX:
        raise invalid("max_output_tokens", f"max_output_tokens must be 1 to {TOKENS_MAX}.")
    if not 1 <= wish.output_min <= wish.output_max:
        raise invalid("min_output_tokens", "min_output_tokens must be 1 to max_output_tokens.")
    return wish


def terms_in(given: TermsMessage) -> tuple[int | None, int | None]:
    """(credits for a USD, runs a minute) a caller sent; None where it sent none."""
    credits = given.credits_per_usd if given.HasField("credits_per_usd") else None
    runs = given.runs_per_minute if given.HasField("runs_per_minute") else None
    if credits is not None and not 0 <= credits <= CREDITS_PER_USD_MAX:
        raise invalid("credits_per_usd", f"credits_per_usd must be 0 to {CREDITS_PER_USD_MAX}.")
    if runs is not None and not 1 <= runs <= limits.RUNS_PER_MINUTE_MAX:
        raise invalid("runs_per_minute", f"runs_per_minute must be 1 to {limits.RUNS_PER_MINUTE_MAX}.")
    return credits, runs


def terms_out(terms: Terms) -> TermsMessage:
    """Terms as a message."""
    return TermsMessage(credits_per_usd=terms.credits_per_usd, runs_per_minute=terms.runs_per_minute)


def usage_in(given: TokenUsage) -> Usage:
    """The tokens a caller sent."""
    try:
        return Usage(
            given.input_tokens,
            given.output_tokens,
            given.cached_input_tokens,
            given.cache_write_tokens,
            given.reasoning_tokens,
        )
    except ValueError as error:
        raise invalid("usage", f"usage: {error}.") from None


def rates_in(given: RatesMessage) -> Rates:
    """Rates a caller sent."""
    if not given.base.HasField("input") or not given.base.HasField("output"):
        raise invalid("rates", "rates.base needs a price for input and for output.")
    if len(given.tiers) > limits.TIERS_MAX or any(tier.above_input_tokens < 1 for tier in given.tiers):
        raise invalid("rates", f"rates: at most {limits.TIERS_MAX} tiers, each above at least 1 token.")
    if not all(tier.prices.HasField("input") and tier.prices.HasField("output") for tier in given.tiers):
        raise invalid("rates", "rates: each tier needs a price for input and for output.")
    try:
        return from_message(given)
    except ValueError as error:
        raise invalid("rates", f"rates: {error}.") from None


def hold_out(row: HoldRow) -> Hold:
    """A hold as a message."""
    return Hold(
        api_call_id=str(row.api_call_id),
        state=STATES[row.status],
        granted_output_tokens=row.output_granted,
        amount=money(row.amount_nano),
        rates=None if row.rates is None else RatesMessage.FromString(row.rates),
        expire_time=timestamp(row.expires_at),
        credits_per_usd=row.credits_per_usd,
    )


def entry_out(row: LedgerEntry) -> EntryMessage:
    """A booked call as a message."""
    usage = row.usage
    return EntryMessage(
        api_call_id=str(row.api_call_id),
        project_id=str(row.project_id),
        user_id=row.user_id,
        run_id=str(row.run_id),
        thread_id=str(row.thread_id),
        model=row.model,
        usage=TokenUsage(
            input_tokens=usage.input,
            cached_input_tokens=usage.cached_input,
            cache_write_tokens=usage.cache_write,
            output_tokens=usage.output,
            reasoning_tokens=usage.reasoning,
        ),
        cost=money(row.cost_nano),
        estimated=row.estimated,
        above_hold=row.above_hold,
        late=row.late,
        create_time=timestamp(row.booked_at),
        message_id=str(row.message_id),
    )


def price_out(row: PriceRow) -> Price:
    """A price as a message."""
    project = "" if row.project_id == EVERY_PROJECT else str(row.project_id)
    rates = RatesMessage.FromString(row.rates)
    return Price(model=row.model, project_id=project, rates=rates, update_time=timestamp(row.updated_at))


def price_place_out(row: PriceRow) -> str:
    """The page token of a place in the list of prices. Slugs hold slashes, so they go as hex."""
    return pages.encode(row.project_id, row.model.encode().hex())


def price_place_in(token: str) -> tuple[str, UUID] | None:
    """(model, project) of a page token; None for the first page."""
    if not token:
        return None
    project, model = pages.decode(token, 2)
    try:
        return bytes.fromhex(model).decode(), UUID(project)
    except ValueError:
        raise invalid("page_token", "This page token is not one we gave out.") from None


def default_quota_out(period: str, limit: int) -> PeriodUsage:
    """The quota of every user who has none: a limit without an account."""
    return PeriodUsage(period=PERIODS[period], limit=money(limit))


def period_out(period: str, held: int, spent: int, limit: int | None) -> PeriodUsage:
    """An account's sums as a message."""
    found = PeriodUsage(period=PERIODS[period], spent=money(spent), held=money(held))
    if limit is not None:
        found.limit.CopyFrom(money(limit))
    return found


def not_priced(model: str) -> ServiceError:
    """MODEL_NOT_PRICED; its message says what to do: a model without a price is refused, never free."""
    named = model if TYPED_AS_IT_IS.fullmatch(model) else "<model>"
    command = f"make price MODEL={named} IN=<USD per million input tokens> OUT=<USD per million output tokens>"
    message = f"No price is known for the model {model}. Set one: {command}"
    return ServiceError("MODEL_NOT_PRICED", message, {"model": model})
