"""Whether a call may be made, and how much output it may have (durability.md 26)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kit.errors import ServiceError
from kit.pricing import Rates, largest_output, upper_bound


@dataclass(frozen=True)
class Limit:
    """A quota or a cap, and what of it is gone, in nano-USD."""

    is_quota: bool
    period: str
    limit: int
    used: int  # spent and held

    @property
    def left(self) -> int:
        """What remains; negative after a call that cost more than its hold."""
        return self.limit - self.used


@dataclass(frozen=True)
class Wish:
    """What a call needs: tokens at most, and the fewest output tokens worth it."""

    input_max: int
    output_max: int
    output_min: int


@dataclass(frozen=True)
class Grant:
    """Output tokens the call may have, and the nano-USD to set aside for it."""

    output: int
    amount: int


def grant(rates: Rates, wish: Wish, limits: Sequence[Limit]) -> Grant:
    """The largest output every limit pays for. Raises QUOTA_EXCEEDED before AI_BUDGET_EXCEEDED."""
    output = wish.output_max
    for limit in sorted(limits, key=lambda limit: not limit.is_quota):
        paid = largest_output(rates, wish.input_max, limit.left)
        if paid is None or paid < wish.output_min:
            raise _refusal(limit)
        output = min(output, paid)
    return Grant(output, upper_bound(rates, wish.input_max, output))


def _refusal(limit: Limit) -> ServiceError:
    span = {"day": "for today", "month": "for this month", "total": "in total"}[limit.period]
    if limit.is_quota:
        return ServiceError("QUOTA_EXCEEDED", f"Your quota {span} does not pay for this.", {"period": limit.period})
    message = f"The project's budget {span} does not pay for this."
    return ServiceError("AI_BUDGET_EXCEEDED", message, {"period": limit.period})
