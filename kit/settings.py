"""Settings: the environment, read once into a frozen dataclass.

A settings class is a frozen dataclass whose fields are made by `setting()`. All
problems are reported together, so a deployment is not debugged one variable at a
time. docs/configuration.md is generated from the same fields.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d+)")


class SettingsError(Exception):
    """One or more variables are missing or malformed; the message lists every one."""


def setting(
    env: str, doc: str, default: str | None = None, parse: Callable[[str], Any] = str, secret: bool = False
) -> Any:
    """A field read from `env`. Without a default it must be set; an empty value counts as unset."""
    metadata = {"env": env, "doc": doc, "default": default, "parse": parse, "secret": secret}
    return dataclasses.field(repr=not secret, metadata=metadata)


def load(cls: type[T], environ: Mapping[str, str]) -> T:
    """Reads `cls` from the environment; raises SettingsError listing all problems."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        env, default = field.metadata["env"], field.metadata["default"]
        raw = environ.get(env) or default
        if raw is None:
            problems.append(f"{env} is not set: {field.metadata['doc']}")
            continue
        try:
            values[field.name] = field.metadata["parse"](raw)
        except ValueError as error:
            shown = "its value" if field.metadata["secret"] else repr(raw)
            problems.append(f"{env}: {shown} is not usable: {error}")
    if problems:
        raise SettingsError("\n".join(problems))
    return cls(**values)


def comma_list(raw: str) -> tuple[str, ...]:
    """Values separated by commas, blanks around them ignored."""
    return tuple(part.strip() for part in raw.split(",") if part.strip())


def one_of(*values: str) -> Callable[[str], str]:
    """One of a few words."""

    def parse(raw: str) -> str:
        if raw not in values:
            raise ValueError(f"must be {' or '.join(values)}")
        return raw

    return parse


def positive(raw: str) -> float:
    """A number above zero."""
    try:
        value = float(raw)
    except ValueError:
        raise ValueError("must be a number above 0") from None
    if not value > 0 or value == float("inf"):
        raise ValueError("must be a number above 0")
    return value


def count(raw: str) -> int:
    """A whole number, at least 1."""
    value = int(raw)
    if value < 1:
        raise ValueError("must be a whole number from 1")
    return value


def port(raw: str) -> int:
    """0 to 65535; 0 lets the kernel choose."""
    value = int(raw)
    if not 0 <= value <= 65535:
        raise ValueError("must be 0 to 65535")
    return value


def address(raw: str) -> tuple[str, int]:
    """Host and port of `host:port`, an IPv6 host in brackets. Raises ValueError."""
    found = ADDRESS.fullmatch(raw)
    if found is None:
        raise ValueError("must be host:port, for example 127.0.0.1:8080 or [::1]:8080")
    return found["v6"] or found["host"], port(found["port"])


def addresses(raw: str) -> tuple[str, ...]:
    """A comma list of `host:port`, at least one. Raises ValueError."""
    found = comma_list(raw)
    if not found:
        raise ValueError("must name at least one host:port")
    for one in found:
        address(one)
    return found
