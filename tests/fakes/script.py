"""The script language: what a request asks the fake provider to answer, and how to fail.

Pairs `key=value` stand in the model name (`fake:chunks=3,delay=20`) or in the last user message
(`[fake chunks=3 delay=20]`). README.md beside this file explains every key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints


class BadScript(ValueError):
    """A script that cannot be read; answered with 400, so that a typo never passes silently."""


@dataclass(frozen=True)
class Script:
    """One answer's script. Times are milliseconds, positions count deltas of any kind from 0."""

    # What is said.
    chunks: int = 5
    size: int = 0
    text: str | None = None
    echo: int = 0
    reasoning: int = 0
    empty: int = 0
    surrogates: int = 0
    finish: str = ""
    # Tool calls.
    tools: int = 0
    tool: str = ""
    args: str = "{}"
    pieces: int = 4
    rounds: int = 1
    preamble: int = 0
    # The figures; -1 is an estimate.
    usage: str = "auto"
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = 0
    reasoning_tokens: int = -1
    cache_write_tokens: int = 0
    unlimited: int = 0
    # Pace.
    delay: float = 0.0
    first: float = 0.0
    gate: str = ""
    gate_at: int = 0
    # Faults.
    error: int = 0
    retry_after: str = ""
    cut: int | None = None
    close: int | None = None
    hang: int | None = None
    error_at: int | None = None
    garbage_at: int | None = None
    ignore_close: int = 0
    leak: int = 0
    times: int = 0
    key: str = ""
    # Bytes.
    split: int = 0
    crlf: int = 0
    comments: int = 0

    @property
    def fails(self) -> bool:
        return self != self.healthy()

    def healthy(self) -> Script:
        """The same script without the faults that `times` counts."""
        return replace(self, error=0, cut=None, close=None, hang=None, error_at=None, garbage_at=None)


def _value_types() -> dict[str, Callable[[str], Any]]:
    hints = get_type_hints(Script)
    return {field.name: (get_args(hints[field.name]) or (hints[field.name],))[0] for field in fields(Script)}


_TYPES = _value_types()
_KEY = re.compile(r"(\w+)=")
_GAP = re.compile(r"[\s,]*")
_BARE = re.compile(r"[^\s,\]]*")
_DECODER = json.JSONDecoder()


def parse_script(source: str) -> dict[str, Any]:
    """Read the pairs of `source` up to its end or the first `]` outside a value."""
    values: dict[str, Any] = {}
    at = _after_gap(source, 0)
    while at < len(source) and source[at] != "]":
        found = _KEY.match(source, at)
        if found is None:
            raise BadScript(f"expected key=value at {source[at : at + 30]!r}")
        raw, at = _raw_value(source, found.end())
        values[found[1]] = _typed(found[1], raw)
        at = _after_gap(source, at)
    return values


def _after_gap(source: str, at: int) -> int:
    gap = _GAP.match(source, at)
    return gap.end() if gap else at


def _raw_value(source: str, at: int) -> tuple[str, int]:
    """The value's text and where it ends. JSON values may hold spaces and brackets."""
    if source[at : at + 1] in {'"', "{", "["}:
        try:
            value, end = _DECODER.raw_decode(source, at)
        except ValueError as error:
            raise BadScript(f"broken JSON value: {error}") from None
        return (value if isinstance(value, str) else source[at:end]), end
    bare = _BARE.match(source, at)
    return (bare[0], bare.end()) if bare else ("", at)


def _typed(key: str, raw: str) -> Any:
    if key not in _TYPES:
        raise BadScript(f"no such key: {key!r}; there are {', '.join(sorted(_TYPES))}")
    try:
        return _TYPES[key](raw)
    except ValueError:
        raise BadScript(f"{key!r} cannot be {raw!r}") from None


def default_script(**keys: Any) -> Script:
    """A script from Python values; an unknown key is an error here too."""
    if unknown := keys.keys() - _TYPES.keys():
        raise BadScript(f"no such key: {', '.join(sorted(unknown))}")
    return replace(Script(), **keys)


def script_of_request(default: Script, model: str, user_text: str) -> Script:
    """The script of one request: the user message wins over the model name, that over `default`."""
    _, in_model, of_model = model.partition("fake:")
    _, in_message, of_message = user_text.partition("[fake ")
    pairs = parse_script(of_model) if in_model else {}
    if in_message:
        pairs |= parse_script(of_message)
    return replace(default, **pairs)
