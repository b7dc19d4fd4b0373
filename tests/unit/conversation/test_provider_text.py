"""A provider's text becomes whole code points that Postgres can store."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.conversation.providers.text import REPLACEMENT, TextRepair, repaired

HOSTILE = st.lists(
    st.sampled_from(
        ["a", "\u00e9", "\U0001f600", "\ud83d", "\ude00", "\ud800", "\udfff", "\x00", "\u5b57", "\U0010ffff"]
    ),
    max_size=12,
).map("".join)


def expected(text: str) -> str:
    """By hand: pairs joined, everything else that cannot be stored replaced one by one."""
    found, at = [], 0
    while at < len(text):
        char, following = text[at], text[at + 1 : at + 2]
        if "\ud800" <= char <= "\udbff" and following and "\udc00" <= following <= "\udfff":
            found.append(chr(0x10000 + ((ord(char) - 0xD800) << 10) + (ord(following) - 0xDC00)))
            at += 2
            continue
        found.append(REPLACEMENT if "\ud800" <= char <= "\udfff" or char == "\x00" else char)
        at += 1
    return "".join(found)


def fed(pieces: list[str]) -> list[str]:
    repair = TextRepair()
    return [*(repair.feed(piece) for piece in pieces), repair.rest()]


@given(HOSTILE)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_each_part_that_cannot_be_stored_is_replaced_once(text: str) -> None:
    assert repaired(text) == expected(text)


@given(HOSTILE, st.lists(st.integers(0, 12), max_size=5))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_text_split_anywhere_is_repaired_as_if_it_were_whole(text: str, places: list[int]) -> None:
    borders = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    found = fed(pieces)
    assert "".join(found) == expected(text)
    for piece in found:
        piece.encode()
        assert "\x00" not in piece


@pytest.mark.parametrize("text", ["plain", "caf\u00e9 \u20ac \u5b57 \U0001f600", ""])
def test_good_text_passes_untouched_and_at_once(text: str) -> None:
    assert fed([text]) == [text, ""]


def test_a_pair_split_over_two_deltas_is_one_character() -> None:
    assert fed(["a\ud83d", "\ude00b"]) == ["a", "\U0001f600b", ""]


def test_a_half_at_the_end_is_replaced_at_the_end() -> None:
    assert fed(["a\ud83d"]) == ["a", REPLACEMENT]


def test_a_held_half_is_not_swallowed_by_plain_text_or_nothing() -> None:
    assert "".join(fed(["\ud83d", "", "a"])) == REPLACEMENT + "a"
