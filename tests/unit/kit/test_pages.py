"""Page tokens come back as they were given out, and nothing else is taken for one."""

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import pages
from kit.errors import ServiceError

ID = UUID("01900000-0000-7000-8000-000000000001")
PLACES = st.lists(st.integers(0, 10**18 - 1), min_size=1, max_size=3)
TIMES = st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC))
DECODERS: list[Callable[[str], object]] = [
    pages.decode_time,
    lambda token: pages.decode_numbers(token, 1),
    lambda token: pages.decode_numbers(token, 2),
]
GARBAGE = [
    "x",
    "====",
    "Zm9v\n",
    "caf\u00e9",
    "\U0001f600",
    "AAAAA",
    "//8=",
    "_w",
    "-" * 1000,
    pages.encode("a"),
    pages.encode(-1),
    pages.encode("+1"),
    pages.encode("1_0"),
    pages.encode("\u0661"),
    pages.encode(10**18),
    pages.encode("9" * 5000),
    pages.encode(1, 2, 3, 4),
    pages.encode("1\x00"),
]


@given(PLACES)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_numbers_come_back(place: list[int]) -> None:
    assert pages.decode_numbers(pages.encode(*place), len(place)) == place


@given(TIMES, st.uuids())
@settings(derandomize=True, max_examples=100, deadline=None)
def test_a_place_in_time_comes_back_to_the_microsecond(at: datetime, id: UUID) -> None:
    assert pages.decode_time(pages.encode_time(at, id)) == (at, id)


def test_tokens_are_safe_in_a_url() -> None:
    token = pages.encode_time(datetime.now(UTC), ID)
    assert token.replace("-", "a").replace("_", "a").isalnum()


def test_no_token_is_the_first_page() -> None:
    assert pages.decode_numbers("", 2) == [0, 0]
    assert pages.decode_time("") is None


@pytest.mark.parametrize("token", GARBAGE)
def test_garbage_is_refused_with_its_field(token: str) -> None:
    for decode in DECODERS:
        with pytest.raises(ServiceError) as caught:
            decode(token)
        assert (caught.value.reason, caught.value.metadata) == ("INVALID_OPTIONS", {"field": "page_token"})


@given(st.text(min_size=1, max_size=40))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_any_text_is_a_place_or_refused(token: str) -> None:
    for decode in DECODERS:
        with contextlib.suppress(ServiceError):
            decode(token)


def test_a_token_of_another_list_is_refused() -> None:
    with pytest.raises(ServiceError):
        pages.decode_numbers(pages.encode_time(datetime.now(UTC), ID), 2)
    with pytest.raises(ServiceError):
        pages.decode_time(pages.encode(1, 2))


def test_a_time_beyond_the_calendar_is_refused() -> None:
    end = (datetime.max.replace(tzinfo=UTC) - pages.EPOCH) // timedelta(microseconds=1)
    assert pages.decode_time(pages.encode(end, ID)) is not None
    with pytest.raises(ServiceError):
        pages.decode_time(pages.encode(end + 1, ID))


def test_a_page_ends_at_its_bytes_or_its_entries_and_holds_at_least_one() -> None:
    assert pages.fitting([], 10, 100) == 0
    assert pages.fitting([1000], 10, 100) == 1
    assert pages.fitting([50, 50], 10, 100) == 2
    assert pages.fitting([50, 51], 10, 100) == 1
    assert pages.fitting([1] * 20, 10, 100) == 10
