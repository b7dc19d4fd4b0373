"""What a settle or a release does to a hold, in every order they may arrive in."""

from dataclasses import dataclass

OPEN, SETTLED, RELEASED, EXPIRED = "open", "settled", "released", "expired"


@dataclass(frozen=True)
class Closing:
    """The hold's next status, and what changes in its accounts, in nano-USD."""

    status: str
    held: int  # added to what is held; never above 0
    spent: int  # added to what is spent
    late: bool = False
    above_hold: bool = False


def settle(status: str, amount: int, cost: int) -> Closing:
    """Books the cost whole. A call that was made is paid, even if its hold is gone by now."""
    late = status != OPEN
    return Closing(SETTLED, 0 if late else -amount, cost, late=late, above_hold=cost > amount)


def release(status: str, amount: int) -> Closing:
    """Frees an open hold; one that is closed stays as it is."""
    return Closing(RELEASED, -amount, 0) if status == OPEN else Closing(status, 0, 0)
