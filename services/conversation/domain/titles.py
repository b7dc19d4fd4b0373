"""A thread's title from its first user message (R127). Pure."""

import regex

from services.conversation.limits import DERIVED_TITLE_CHARS

GRAPHEME = regex.compile(r"\X")


def derive_title(text: str) -> str:
    """The first line's words, at most 80 characters, cut on a grapheme border (C21)."""
    flat = " ".join(text.split())
    if len(flat) <= DERIVED_TITLE_CHARS:
        return flat
    end = 0
    for grapheme in GRAPHEME.finditer(flat[: DERIVED_TITLE_CHARS * 2]):
        if grapheme.end() > DERIVED_TITLE_CHARS:
            break
        end = grapheme.end()
    return flat[: end or DERIVED_TITLE_CHARS].rstrip()
