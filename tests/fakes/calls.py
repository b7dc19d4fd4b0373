"""What the fake provider remembers of its calls, readable from any thread while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from tests.fakes.counting import bill, count_tokens

Outcome = Literal["open", "finished", "closed_by_client", "cut", "refused"]


@dataclass
class Call:
    """One request for a completion. Times are seconds of the machine's monotonic clock."""

    id: int
    client_request_id: str | None
    headers: dict[str, str]
    body: dict[str, Any]
    arrived: float
    status: int | None = None
    answered: float | None = None
    first_delta: float | None = None
    client_closed: float | None = None
    ended: float | None = None
    outcome: Outcome = "open"
    deltas_sent: int = 0
    prompt_tokens: int = 0
    whole: dict[str, Any] = field(default_factory=dict)  # the usage of the whole answer
    held: str = ""  # the gate it waits at
    _pieces: list[str] = field(default_factory=list, repr=False)
    _changed: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def text(self) -> str:
        """The answer's text sent so far; two deltas that halve a character read as that character."""
        joined = "".join(list(self._pieces))
        if joined.isascii():
            return joined
        return joined.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")

    @property
    def bill(self) -> dict[str, int] | None:
        """What the provider charges: tokens by kind, of a broken answer those that were sent; None if refused."""
        if self.outcome == "refused" or not self.whole:
            return None
        if self.outcome == "finished":
            return bill(self.whole)
        return {"input": self.prompt_tokens, "output": count_tokens(self.text), "cached": 0, "reasoning": 0}

    def answer(self, status: int) -> None:
        self.status, self.answered = status, time.monotonic()
        self._changed()

    def hold(self, gate: str) -> None:
        self.held = gate
        self._changed()

    def send(self, texts: Sequence[str]) -> None:
        """Count deltas that were written; a delta that is not text (reasoning, tool call) is ''."""
        if not texts:
            return
        if self.first_delta is None:
            self.first_delta = time.monotonic()
        self._pieces.extend(texts)
        self.deltas_sent += len(texts)
        self._changed()

    def leave(self) -> None:
        """The client closed its connection, whether or not that ends the call."""
        if self.outcome == "open" and self.client_closed is None:
            self.client_closed = time.monotonic()
            self._changed()

    def end(self, outcome: Outcome) -> None:
        """The first outcome stands."""
        if self.outcome == "open":
            self.ended, self.outcome = time.monotonic(), outcome
            self._changed()

    def as_json(self) -> dict[str, Any]:
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return public | {"text": self.text}


class CallLog:
    """All calls since the last reset, in the order of their arrival."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._numbers = count(1)  # goes on over a reset: no two calls of a provider say the same
        self._change = threading.Condition()
        self._waiting = 0

    def open(self, headers: dict[str, str]) -> Call:
        """Enter a call that has just arrived; its body follows once it is read."""
        call = Call(
            id=next(self._numbers),
            client_request_id=headers.get("x-client-request-id"),
            headers=headers,
            body={},
            arrived=time.monotonic(),
            _changed=self._notify,
        )
        self._calls.append(call)
        self._notify()
        return call

    def clear(self) -> None:
        self._calls = []
        self._notify()

    def all(self) -> list[Call]:
        return list(self._calls)

    def wait_for(self, predicate: Callable[[list[Call]], object], timeout_seconds: float) -> list[Call]:
        """The calls as they were when `predicate` first held of them; TimeoutError if it never does."""
        deadline = time.monotonic() + timeout_seconds
        with self._change:
            self._waiting += 1
            try:
                while not predicate(calls := self.all()):
                    if not self._change.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                        raise TimeoutError(f"not so after {timeout_seconds} s; the calls: {_summary(calls)}")
                return calls
            finally:
                self._waiting -= 1

    def _notify(self) -> None:
        # Most deltas have nobody waiting for them; then the lock is spared.
        if self._waiting:
            with self._change:
                self._change.notify_all()


def _summary(calls: Iterable[Call]) -> str:
    return ", ".join(f"#{call.id} {call.outcome} after {call.deltas_sent}" for call in calls) or "none"
