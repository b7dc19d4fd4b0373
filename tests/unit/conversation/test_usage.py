"""What calls consume and cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.pricing import TOKENS_MAX, Prices, Rates
from services.conversation.domain import tokens, usage
from services.conversation.domain.meter import OutputMeter
from threadloom.common.v1.money_pb2 import Money
from threadloom.conversation.v1.message_pb2 import Usage

NANO = 1_000_000_000
RATES = Rates(Prices(1 * NANO, NANO // 10, 5 * NANO // 4, 2 * NANO))
FIGURES = st.integers(-(10**12), 10**12)


def test_tokens_are_counted_as_published() -> None:
    # Figures of OpenAI's own tokenizer page for this vocabulary.
    assert tokens.count("tiktoken is great!") == 6
    assert tokens.count("") == 0
    assert tokens.count("<|endoftext|>") > 1  # a user's text, not a command


def test_four_characters_a_token_would_undercount_chinese() -> None:
    text = "今天天气怎么样" * 10
    assert tokens.count(text) > len(text) / 4


def test_lone_surrogates_are_counted() -> None:
    assert tokens.count("\ud83d") > 0


def test_a_character_of_many_tokens_is_counted() -> None:
    assert tokens.count("\U00013000" * 200_000) > 200_000


@pytest.mark.parametrize("chars", [tokens.PIECE_CHARS, tokens.PIECE_CHARS + 1, 1_000_000, 2_000_001])
def test_long_texts_are_counted_in_pieces(chars: int) -> None:
    found = tokens.count("word " * (chars // 5) + "x" * (chars % 5))
    assert chars // 5 <= found <= chars // 5 + chars // tokens.PIECE_CHARS + 5


def test_a_request_counts_what_is_around_its_messages() -> None:
    one = {"role": "user", "content": "Hello"}
    assert tokens.count_input([]) == tokens.FRAME_TOKENS
    assert tokens.count_input([one, one]) == tokens.FRAME_TOKENS + 2 * (tokens.MESSAGE_TOKENS + tokens.count("Hello"))


@pytest.mark.parametrize(("counted", "bound"), [(0, 0), (1, 2), (10, 11), (11, 13), (100, 110), (101, 112)])
def test_the_bound_is_a_tenth_more_rounded_up(counted: int, bound: int) -> None:
    assert tokens.upper_bound(counted) == bound


def test_each_class_has_its_price_and_the_sum_is_rounded_once() -> None:
    consumed = Usage(input_tokens=10, cached_tokens=4, cache_write_tokens=1, output_tokens=3, thinking_tokens=2)
    found = usage.priced(RATES, consumed)
    # 5 × 1 + 4 × 0.1 + 1 × 1.25 + 3 × 2 USD a million, in nano-USD.
    assert found.cost.nano_usd == 12_650
    assert (found.input_tokens, found.thinking_tokens) == (10, 2)


def test_what_costs_nothing_has_no_cost() -> None:
    assert usage.priced(RATES, Usage()) == Usage()
    assert usage.is_nothing(Usage(estimated=True))
    assert not usage.is_nothing(Usage(cost=Money(nano_usd=1)))


def test_an_estimate_counts_thinking_as_output() -> None:
    found = usage.estimated(9, "Hello world", "Hmm")
    assert found.input_tokens == 9
    assert found.output_tokens == tokens.count("Hello world") + tokens.count("Hmm")
    assert found.thinking_tokens == tokens.count("Hmm")
    assert found.estimated


def test_a_count_in_mid_answer_is_a_lower_bound() -> None:
    """Report 67: one placeholder token, then two hundred deltas."""
    found = usage.at_least(Usage(input_tokens=30, output_tokens=1), Usage(input_tokens=25, output_tokens=200))
    assert (found.input_tokens, found.output_tokens, found.estimated) == (30, 200, True)


@given(FIGURES, FIGURES, FIGURES, FIGURES, FIGURES)
def test_whatever_is_reported_can_be_priced(read: int, written: int, thought: int, cached: int, stored: int) -> None:
    found = usage.bounded(
        Usage(
            input_tokens=read,
            output_tokens=written,
            thinking_tokens=thought,
            cached_tokens=cached,
            cache_write_tokens=stored,
        )
    )
    usage.priced(RATES, found)
    assert found.cached_tokens + found.cache_write_tokens <= found.input_tokens <= TOKENS_MAX
    assert found.thinking_tokens <= found.output_tokens <= TOKENS_MAX


def test_figures_that_fit_stay_as_they_are() -> None:
    given_ = Usage(input_tokens=11125, cached_tokens=7441, output_tokens=429, thinking_tokens=409)
    assert usage.bounded(given_) == given_


@given(st.lists(st.text(min_size=1, max_size=40), max_size=30), st.integers(1, 60))
def test_the_meter_says_what_counting_the_whole_says(pieces: list[str], granted: int) -> None:
    meter = OutputMeter(granted, tokens.count)
    for at, piece in enumerate(pieces, 1):
        meter.add(piece, len(piece.encode("utf-8", "surrogatepass")))
        assert meter.is_passed == (tokens.count("".join(pieces[:at])) > granted)
        if meter.is_passed:
            return


def test_the_meter_counts_nothing_while_the_bytes_alone_fit() -> None:
    counts: list[str] = []

    def count(text: str) -> int:
        counts.append(text)
        return len(text)

    meter = OutputMeter(1000, count)
    for _ in range(1000):
        meter.add("x", 1)
        assert not meter.is_passed
    assert not counts
    meter.add("x", 1)
    assert meter.is_passed
