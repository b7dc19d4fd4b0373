"""Both sides of every limit on what a caller may send."""

import pytest

from kit.errors import ServiceError
from services.conversation.domain import checks
from threadloom.conversation.v1.message_pb2 import ContentPart
from threadloom.conversation.v1.run_pb2 import RunOptions

CONTROLS = sorted({*range(0x20), 0x7F} - {0x09, 0x0A, 0x0D})


def texts(*given: str) -> list[ContentPart]:
    return [ContentPart(text=text) for text in given]


def refusal(call: object, *arguments: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value


def test_a_text_may_be_as_long_as_its_limit_in_code_points() -> None:
    assert checks.check_text("system", "\U0001f600" * 10, 10) == "\U0001f600" * 10
    error = refusal(checks.check_text, "system", "x" * 11, 10)
    assert (error.reason, error.metadata) == (
        "CONTENT_TOO_LARGE",
        {"field": "system", "limit": "10", "unit": "characters"},
    )


@pytest.mark.parametrize("code", CONTROLS)
def test_control_characters_are_refused_by_name(code: int) -> None:
    error = refusal(checks.check_text, "system", f"a{chr(code)}b", 10)
    assert error.reason == "INVALID_OPTIONS"
    assert error.metadata == {"field": "system"}
    assert f"U+{code:04X}" in error.message


@pytest.mark.parametrize("char", ["\t", "\n", "\r", " ", "\u00a0", "\u200d", "\ufffd", "\U0010ffff"])
def test_every_other_character_is_taken(char: str) -> None:
    assert checks.check_text("system", f"a{char}b", 10)


@pytest.mark.parametrize("char", ["\t", "\n", "\r"])
def test_a_word_is_a_single_line(char: str) -> None:
    assert refusal(checks.check_word, "title", f"a{char}b", 10).metadata == {"field": "title"}


def test_parts_are_joined_by_blank_lines_and_empty_ones_dropped() -> None:
    assert checks.check_parts(texts("a", "", "b")) == "a\n\nb"


def test_1_to_50_parts_are_taken() -> None:
    assert checks.check_parts(texts(*["x"] * 50)).count("x") == 50
    assert refusal(checks.check_parts, texts(*["x"] * 51)).metadata == {
        "field": "content",
        "limit": "50",
        "unit": "parts",
    }
    assert refusal(checks.check_parts, []).reason == "INVALID_OPTIONS"


def test_the_characters_of_all_parts_count_together() -> None:
    assert checks.check_parts(texts("x" * 100_000, "y" * 100_000))
    assert refusal(checks.check_parts, texts("x" * 100_000, "y" * 100_001)).reason == "CONTENT_TOO_LARGE"


@pytest.mark.parametrize("text", ["", " ", "\n\t\r ", "\u3000"])
def test_blank_content_is_refused(text: str) -> None:
    assert refusal(checks.check_parts, texts(text, text)).metadata == {"field": "content"}


def test_a_part_of_an_unknown_kind_is_refused_by_its_place() -> None:
    error = refusal(checks.check_parts, [*texts("a"), ContentPart()])
    assert "content[1]" in error.message


@pytest.mark.parametrize("value", [0, -0.0, 0.7, 2])
def test_a_temperature_from_0_to_2_is_taken(value: float) -> None:
    checks.check_options(RunOptions(temperature=value))


@pytest.mark.parametrize("value", [-0.001, 2.001, float("nan"), float("inf"), float("-inf")])
def test_any_other_temperature_is_refused(value: float) -> None:
    assert refusal(checks.check_options, RunOptions(temperature=value)).metadata == {"field": "temperature"}


@pytest.mark.parametrize("value", [1, 1_000_000])
def test_output_tokens_from_1_to_a_million_are_taken(value: int) -> None:
    checks.check_options(RunOptions(max_output_tokens=value))


@pytest.mark.parametrize("value", [0, -1, 1_000_001, 2**31 - 1])
def test_any_other_number_of_output_tokens_is_refused(value: int) -> None:
    assert refusal(checks.check_options, RunOptions(max_output_tokens=value)).metadata == {"field": "max_output_tokens"}


LENGTHS = [("model", 200), ("system", 200_000), ("reasoning_effort", 32)]


@pytest.mark.parametrize(("field", "limit"), LENGTHS)
def test_an_option_may_be_as_long_as_its_limit(field: str, limit: int) -> None:
    checks.check_options(RunOptions(**{field: "x" * limit}))  # type: ignore[arg-type]
    error = refusal(checks.check_options, RunOptions(**{field: "x" * (limit + 1)}))  # type: ignore[arg-type]
    assert (error.reason, error.metadata["field"]) == ("CONTENT_TOO_LARGE", field)


@pytest.mark.parametrize("slug", ["a", "0", "a-b", "a--b", "x" * 63])
def test_a_slug_of_1_to_63_letters_digits_and_dashes_is_taken(slug: str) -> None:
    assert checks.check_slug(slug) == slug


@pytest.mark.parametrize("slug", ["", "-", "-a", "a-", "A", "a_b", "a.b", "\u00e9", "a\n", "x" * 64, "a b", "a\x00"])
def test_any_other_slug_is_refused(slug: str) -> None:
    assert refusal(checks.check_slug, slug).metadata == {"field": "slug"}


@pytest.mark.parametrize(("asked", "given"), [(0, 20), (1, 1), (100, 100), (101, 100), (2**31 - 1, 100)])
def test_page_sizes_default_and_are_clamped(asked: int, given: int) -> None:
    assert checks.page_size(asked, 20, 100) == given


def test_a_negative_page_size_is_refused() -> None:
    assert refusal(checks.page_size, -1, 20, 100).metadata == {"field": "page_size"}


@pytest.mark.parametrize("key", ["8-chars!", "k" * 4096, "".join(chr(code) for code in range(0x21, 0x7F))])
def test_a_key_of_printable_ascii_is_taken(key: str) -> None:
    assert checks.check_api_key(key) == key


@pytest.mark.parametrize(
    "key", ["", "7-chars", "k" * 4097, "a key with blanks", "line-break\n", "umlaut-ü", "\x7f" * 8]
)
def test_another_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ServiceError) as caught:
        checks.check_api_key(key)
    assert caught.value.metadata == {"field": "api_key"}
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize("provider", ["", "OPENAI", "openai ", "somebody"])
def test_a_provider_without_an_adapter_is_refused(provider: str) -> None:
    assert checks.check_provider("openai") == "openai"
    with pytest.raises(ServiceError, match="must be one of: openai"):
        checks.check_provider(provider)
