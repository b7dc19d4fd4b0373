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
        self._buffer = bytearray()
        self._scanned = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._skip_lf = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads this chunk completes; raises LineTooLong."""
        self._buffer += chunk
        found: list[bytes] = []
        start, buffer = 0, self._buffer
        while True:
            end = _line_end(buffer, max(start, self._scanned))
            if end < 0:
                break
            line = bytes(buffer[start:end])
            was_cr = buffer[end] == 0x0D
            start = end + 1
            self._scanned = start
            if self._skip_lf and not line and buffer[end] == 0x0A:
                self._skip_lf = False
                continue  # the LF of a CRLF
            self._skip_lf = was_cr
            self._line(line, found)
        del buffer[:start]
        self._scanned = len(buffer)
        if len(buffer) + self._data_bytes > self._max_bytes:
            raise LineTooLong
        return found

    def rest(self) -> list[bytes]:
        """What a stream that ended without a blank line still holds."""
        found: list[bytes] = []
        if self._buffer:
            self._line(bytes(self._buffer), found)
            self._buffer.clear()
        self._line(b"", found)
        return found

    def _line(self, line: bytes, found: list[bytes]) -> None:
        if not line:
            if self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        elif line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            self._data_bytes += len(line)


def _line_end(buffer: bytearray, start: int) -> int:
    lf = buffer.find(b"\n", start)
    cr = buffer.find(b"\r", start, lf if lf >= 0 else len(buffer))
    return cr if cr >= 0 else lf
