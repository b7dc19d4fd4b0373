"""Reads server-sent events from bytes that arrive in any pieces. Knows the format, not the dialects."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Frame:
    """One event of a stream: its id, its name, its data decoded from JSON."""

    id: str
    event: str
    data: dict[str, Any]


class FrameReader:
    """Collects bytes; gives whole frames. Comments are counted, not returned."""

    def __init__(self) -> None:
        self.comments = 0
        self._rest = b""
        self._fields: dict[str, str] = {}

    def feed(self, received: bytes) -> list[Frame]:
        """The frames that these bytes complete."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [frame for line in lines if (frame := self._line(line.removesuffix(b"\r").decode()))]

    def _line(self, line: str) -> Frame | None:
        if line.startswith(":"):
            self.comments += 1
            return None
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            self._fields[name] = f"{self._fields[name]}\n{value}" if name in self._fields else value
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        return Frame(fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"]))
