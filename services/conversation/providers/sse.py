"""Splits a provider's byte stream into the payloads of its SSE events."""

from services.conversation.limits import LINE_BYTES


class LineTooLong(ValueError):
    """A line, or the data of one event, passed the bound."""


class DataLines:
    """Feeds on bytes cut anywhere and gives whole `data:` payloads.

    Understands LF, CRLF and CR line ends, comments, other fields, events of several
    data lines, and a last event without its blank line (`rest`).
    """

    def __init__(self, max_bytes: int = LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._open: list[bytes] = []  # pieces of a line without its end
        self._open_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._skip_lf = False  # the last byte was the CR of what may be a CRLF

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads this chunk completes; raises LineTooLong."""
        found: list[bytes] = []
        if b"\r" in chunk or self._skip_lf:
            chunk = self._unified(chunk)
        if b"\n" in chunk:
            first, *lines = chunk.split(b"\n")
            self._open.append(first)
            self._line(b"".join(self._open), found)
            last = lines.pop()
            for line in lines:
                self._line(line, found)
            self._open, self._open_bytes = [last], len(last)
        else:
            self._open.append(chunk)
            self._open_bytes += len(chunk)
        if self._open_bytes + self._data_bytes > self._max_bytes:
            raise LineTooLong
        return found

    def rest(self) -> list[bytes]:
        """What a stream that ended without a blank line still holds."""
        found: list[bytes] = []
        line = b"".join(self._open)
        self._open.clear()
        if line:
            self._line(line, found)
        self._line(b"", found)
        return found

    def _unified(self, chunk: bytes) -> bytes:
        """The chunk with every line end as LF."""
        if self._skip_lf and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._skip_lf = False
        if chunk:
            self._skip_lf = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _line(self, line: bytes, found: list[bytes]) -> None:
        if not line:
            if self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        elif line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            self._data_bytes += len(line)
