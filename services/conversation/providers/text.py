"""Making a provider's text safe to store: whole code points, no NUL (durability.md 4)."""

REPLACEMENT = "\ufffd"


class TextRepair:
    """Joins surrogate pairs that were split over deltas and replaces lone ones and NUL."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is whole by now; a high surrogate at the end is held back."""
        if text.isascii() and not self._held and "\x00" not in text:
            return text
        text = self._held + text
        self._held = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._held, text = text[-1], text[:-1]
        return repaired(text)

    def rest(self) -> str:
        """What was held back, replaced."""
        held, self._held = self._held, ""
        return repaired(held)


def repaired(text: str) -> str:
    """Pairs joined, lone surrogates and NUL replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\x00", REPLACEMENT)
