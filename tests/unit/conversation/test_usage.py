"""What calls consume and cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.pricing import TOKENS_MAX, Prices, Rates
from services.conversation.domain import tokens, usage
from services.conversation.domain.meter import BATCH_BYTES, OutputMeter
from services.conversation.domain.tokens import Tokenizer, tokenizer_of
from threadloom.common.v1.money_pb2 import Money
from threadloom.conversation.v1.message_pb2 import Usage

NANO = 1_000_000_000
RATES = Rates(Prices(1 * NANO, NANO // 10, 5 * NANO // 4, 2 * NANO))
FIGURES = st.integers(-(10**12), 10**12)


tokens.load()  # a second, which is no test's own
OWN, GUESS = tokenizer_of("gpt-4o-mini"), tokenizer_of("somebody-elses-model")
# A sentence of scripts for which vocabularies differ most: Gujarati, Hindi, Arabic, Russian, Chinese.
SCRIPTS = ("તમે કેમ છો આજે", "आप आज कैसे हैं", "كيف حالك اليوم", "Как у вас дела сегодня", "今天天气怎么样")


def test_tokens_are_counted_as_published() -> None:
    # Figures of OpenAI's own tokenizer page.
    assert OWN.count("tiktoken is great!") == 6
    assert tokenizer_of("gpt-4").count("tiktoken is great!") == 6
    assert OWN.count("") == 0
    assert OWN.count("<|endoftext|>") > 1  # a user's text, not a command


@pytest.mark.parametrize(
    ("model", "name", "is_own"),
    [
        ("gpt-4o", "o200k_base", True),
        ("openai/gpt-5-mini", "o200k_base", True),
        ("ft:gpt-4o-mini-2024-07-18:acme::x", "o200k_base", True),
        ("o3-mini", "o200k_base", True),
        ("gpt-4-turbo", "cl100k_base", True),
        ("gpt-3.5-turbo", "cl100k_base", True),
        ("claude-sonnet-4-5", "o200k_base", False),
        ("fake-model", "o200k_base", False),
    ],
)
def test_a_model_is_counted_by_its_own_vocabulary_where_that_is_public(model: str, name: str, is_own: bool) -> None:
    assert tokenizer_of(model) == Tokenizer(name, is_own)


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("theirs", ["gpt-4", "gpt-4o"])
def test_no_vocabulary_makes_more_of_a_text_than_a_hold_of_an_unknown_model_is_for(text: str, theirs: str) -> None:
    messages = [{"content": text * 50}]
    bound = GUESS.input_bound(messages, GUESS.count_input(messages))
    assert tokenizer_of(theirs).count_input(messages) <= bound


def test_four_characters_a_token_would_undercount_chinese() -> None:
    text = "今天天气怎么样" * 10
    assert OWN.count(text) > len(text) / 4


def test_lone_surrogates_are_counted() -> None:
    assert OWN.count("\ud83d") > 0
    assert GUESS.input_bound([{"content": "\ud83d"}], 0) > 0


def test_a_character_of_many_tokens_is_counted() -> None:
    assert OWN.count("\U00013000" * 200_000) > 200_000


@pytest.mark.parametrize("chars", [tokens.PIECE_CHARS, tokens.PIECE_CHARS + 1, tokens.LONG_CHARS, 1_000_000])
def test_long_texts_are_counted_in_pieces(chars: int) -> None:
    found = OWN.count("word " * (chars // 5) + "x" * (chars % 5))
    assert chars // 5 <= found <= chars // 5 + chars // tokens.PIECE_CHARS + 5


def test_a_request_counts_what_is_around_its_messages() -> None:
    one = {"role": "user", "content": "Hello"}
    assert OWN.count_input([]) == tokens.FRAME_TOKENS
    assert OWN.count_input([one, one]) == tokens.FRAME_TOKENS + 2 * (tokens.MESSAGE_TOKENS + OWN.count("Hello"))


@pytest.mark.parametrize(("counted", "bound"), [(0, 0), (1, 2), (10, 11), (11, 13), (100, 110), (101, 112)])
def test_the_bound_is_a_tenth_more_rounded_up(counted: int, bound: int) -> None:
    assert OWN.input_bound([], counted) == bound


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
    found = usage.estimated(OWN, 9, "Hello world", "Hmm")
    assert found.input_tokens == 9
    assert found.output_tokens == OWN.count("Hello world") + OWN.count("Hmm")
    assert found.thinking_tokens == OWN.count("Hmm")
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


@given(st.lists(st.text(min_size=1, max_size=40), max_size=60), st.integers(1, 200))
def test_the_meter_says_what_counting_the_whole_says(pieces: list[str], granted: int) -> None:
    """But for a few tokens near the limit: a batch counted apart may be longer or, excused, shorter by one."""
    meter = OutputMeter(granted, OWN)
    for at, piece in enumerate(pieces, 1):
        meter.add(piece, len(piece.encode("utf-8", "surrogatepass")))
        whole = OWN.count("".join(pieces[:at]))
        if meter.is_passed:
            assert whole > granted - at
            return
        assert whole <= granted + at


def test_the_meter_counts_nothing_while_the_bytes_alone_fit() -> None:
    counted: list[str] = []

    class Counting(Tokenizer):
        def count(self, text: str) -> int:
            counted.append(text)
            return len(text)

    meter = OutputMeter(1000, Counting("bytes", is_own=True))
    for _ in range(1000):
        meter.add("x", 1)
        assert not meter.is_passed
    assert not counted
    meter.add("x", 1)
    assert meter.is_passed


def test_the_meter_counts_batches_that_stop_nothing_else() -> None:
    sizes: list[int] = []

    class Counting(Tokenizer):
        def count(self, text: str) -> int:
            sizes.append(len(text))
            return 1

    meter = OutputMeter(10**6, Counting("words", is_own=True))
    for _ in range(10_000):
        meter.add("word", 4)
        assert not meter.is_passed
    assert set(sizes) == {BATCH_BYTES}


def test_an_answer_counted_by_another_vocabulary_may_pass_its_limit_a_little() -> None:
    for granted, slack in ((100, 10), (1, 1), (16_384, 1_639)):
        assert (GUESS.output_slack(granted), OWN.output_slack(granted)) == (slack, 0)
