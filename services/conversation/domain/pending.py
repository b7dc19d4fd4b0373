"""What a run has to say and has not committed yet. Pure.

Text grows in place: a delta that waits is joined with its neighbour before it is an
event at all, so a fast writer costs a few list operations a delta. Never across
another event, so the order of parts is kept; never beyond what a row may hold.
"""

from services.conversation.limits import EVENT_TEXT_CHARS
from threadloom.conversation.v1.run_event_pb2 import RunEvent


class _Growing:
    """Text of one step, or of one thinking trace."""

    __slots__ = ("chars", "pieces", "size", "step", "trace")

    def __init__(self, step: int, trace: str) -> None:
        self.step, self.trace = step, trace
        self.pieces: list[str] = []
        self.chars = self.size = 0

    def event(self) -> RunEvent:
        """As one delta."""
        event = RunEvent()
        if self.trace:
            event.trace_delta.trace_id = self.trace
            event.trace_delta.text = "".join(self.pieces)
        else:
            event.text_delta.step = self.step
            event.text_delta.text = "".join(self.pieces)
        return event


class Pending:
    """Events and text in order. `bytes` is about their size as events."""

    def __init__(self) -> None:
        self._items: list[RunEvent | _Growing] = []
        self._sealed = 0  # so many, from the front, may be stored, their answer lost: they stay as they are cut
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, event: RunEvent) -> None:
        """Puts an event behind the others."""
        self._items.append(event)
        self.bytes += event.ByteSize()

    def add_text(self, text: str, size: int, *, step: int = 0, trace: str = "") -> None:
        """Puts text of a step, or of a thinking trace, behind the others. `size`: its bytes in UTF-8."""
        items = self._items
        last = items[-1] if items else None
        if (
            type(last) is not _Growing
            or last.trace != trace
            or last.step != step
            or last.chars + len(text) > EVENT_TEXT_CHARS
        ):
            last = _Growing(step, trace)
            items.append(last)
        last.pieces.append(text)
        last.chars += len(text)
        last.size += size
        self.bytes += size

    def take(self, max_bytes: int | None = None) -> list[RunEvent]:
        """Takes everything, or from the front about so many bytes, one event at least."""
        count = len(self._items)
        if max_bytes is not None and self.bytes > max_bytes:
            count, size = self._first(max_bytes)
            self.bytes -= size
        else:
            self.bytes = 0
        taken, self._items = self._items[:count], self._items[count:]
        self._sealed = max(0, self._sealed - count)
        return [item.event() if type(item) is _Growing else item for item in taken]  # type: ignore[misc]

    def put_back(self, events: list[RunEvent]) -> None:
        """Puts events back to the front, sealed."""
        self._items[:0] = events
        self._sealed = len(events)
        self.bytes += sum(event.ByteSize() for event in events)

    def keep_sealed(self) -> None:
        """Drops all that was never sent to be stored."""
        kept = [item for item in self._items[: self._sealed] if isinstance(item, RunEvent)]
        self.clear()
        if kept:
            self.put_back(kept)

    def clear(self) -> None:
        """Drops everything."""
        self._items.clear()
        self._sealed = self.bytes = 0

    def _first(self, max_bytes: int) -> tuple[int, int]:
        """How many items, at least one, make up about so many bytes, and how many bytes they are."""
        size = 0
        for at, item in enumerate(self._items):
            if size >= max_bytes:
                return at, size
            size += item.size if type(item) is _Growing else item.ByteSize()  # type: ignore[union-attr]
        return len(self._items), size
