"""Titles are cut on a grapheme border (reports.md 109)."""

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from services.conversation.domain.titles import derive_title

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
FLAG = "\U0001f1e9\U0001f1ea"
LONG = st.text(
    st.sampled_from(["a", " ", "\n", "\u0301", "\u200d", "\U0001f468", "\U0001f1e9", "\u0e33"]), max_size=200
)


@pytest.mark.parametrize("tail", [FAMILY, FLAG, "e\u0301", "\u0e01\u0e33", "\u1112\u1161\u11ab"])
def test_a_grapheme_that_does_not_fit_whole_is_left_out_whole(tail: str) -> None:
    assert derive_title("x" * 79 + tail + " and more") == "x" * 79


def test_a_grapheme_that_just_fits_stays() -> None:
    text = "x" * (80 - len(FAMILY)) + FAMILY
    assert derive_title(text + "more") == text


@pytest.mark.parametrize("length", [1, 79, 80])
def test_a_short_text_is_its_own_title(length: int) -> None:
    assert derive_title("x" * length) == "x" * length


def test_81_characters_are_cut_to_80() -> None:
    assert derive_title("x" * 81) == "x" * 80


def test_white_space_of_any_kind_becomes_one_blank() -> None:
    assert derive_title(" \n Plan\t\ta  trip\r\nto\u3000Rome \n") == "Plan a trip to Rome"


def test_a_title_does_not_end_in_a_blank() -> None:
    assert derive_title("x" * 79 + " yyy") == "x" * 79


def test_one_endless_grapheme_still_gives_a_title() -> None:
    assert derive_title("a" + "\u0301" * 500)


@given(LONG)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_a_title_is_a_prefix_of_whole_graphemes_and_valid_text(text: str) -> None:
    title = derive_title(text)
    flat = " ".join(text.split())
    assert len(title) <= 80
    assert flat.startswith(title)
    assert bool(title) == bool(flat)
    title.encode()
    borders = {match.end() for match in regex.finditer(r"\X", flat)}
    first = next(iter(sorted(borders)), 0)
    # A title that lost a blank at its end still ends where the grapheme before the blank does.
    assert not title or first > 80 or len(title) in borders
