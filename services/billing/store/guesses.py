"""The prices this process met last: with what is guessed, so that a move of money is one round trip.

A guess is never believed: Postgres compares it with the price in force, under which the
move is made or nothing at all, and answers with the right one.
"""

from collections import OrderedDict
from functools import lru_cache
from typing import TypeVar
from uuid import UUID

from kit.pricing import Rates
from kit.rates import from_message
from services.billing import limits
from threadloom.common.v1.rates_pb2 import Rates as RatesMessage

Key = TypeVar("Key")
Value = TypeVar("Value")


@lru_cache(limits.RATES_KNOWN)
def rates_of(stored: bytes) -> Rates:
    """Stored rates to compute with."""
    return from_message(RatesMessage.FromString(stored))


class Guesses:
    """What was in force when last asked, by project and model, and the rates used last."""

    def __init__(self) -> None:
        self._set: OrderedDict[tuple[UUID, str], bytes | None] = OrderedDict()
        self._used: OrderedDict[bytes, None] = OrderedDict()

    def set_price(self, project: UUID, model: str) -> bytes | None:
        """The price somebody set; None: nobody did, as far as is known."""
        return self._set.get((project, model))

    def learn_set_price(self, project: UUID, model: str, stored: bytes | None) -> None:
        """Keeps what Postgres answered."""
        _keep(self._set, (project, model), stored, limits.PRICES_GUESSED)

    def used(self) -> list[bytes]:
        """The rates of the newest moves, each once."""
        return list(self._used)

    def learn_used(self, stored: bytes) -> None:
        """Keeps the rates a move was made with."""
        _keep(self._used, stored, None, limits.RATES_GUESSED)


def _keep(where: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    where[key] = value
    where.move_to_end(key)
    if len(where) > most:
        where.popitem(last=False)
