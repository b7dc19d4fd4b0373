"""What a caller may send. Pure; each refusal names its field and says what would be right."""

import math
import re

from google.protobuf.duration_pb2 import Duration

from kit.errors import ServiceError, invalid
from kit.ids import is_model_slug
from services.conversation import limits
from threadloom.conversation.v1.message_pb2 import ContentPart
from threadloom.conversation.v1.run_pb2 import IfRunning, RunOptions

# C0 without tab, line feed and carriage return, DEL and C1: Postgres cannot store the first
# of them and no message of a human needs the rest.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# The providers there are adapters for.
PROVIDERS = ("openai",)
API_KEY = re.compile(rf"[!-~]{{{limits.API_KEY_CHARS_MIN},{limits.API_KEY_CHARS}}}")
SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def check_text(field: str, text: str, max_chars: int) -> str:
    """The text itself; raises CONTENT_TOO_LARGE or INVALID_OPTIONS."""
    if len(text) > max_chars:
        raise too_large(field, f"{field} holds {len(text):,} characters; at most {max_chars:,} are taken.", max_chars)
    found = CONTROL.search(text)
    if found:
        raise invalid(field, f"{field} holds the control character U+{ord(found.group()):04X}, which is not taken.")
    return text


def check_word(field: str, text: str, max_chars: int) -> str:
    """A single line: a title, a model slug, a key."""
    check_text(field, text, max_chars)
    if "\n" in text or "\r" in text or "\t" in text:
        raise invalid(field, f"{field} must be a single line.")
    return text


def check_model(field: str, slug: str) -> str:
    """A model's name as billing takes it, or none."""
    check_word(field, slug, limits.MODEL_CHARS)
    if slug and not is_model_slug(slug):
        raise invalid(field, f"{field} must hold printable characters, and not only blanks.")
    return slug


def check_parts(parts: list[ContentPart]) -> str:
    """The parts' text, joined by blank lines; raises when there is none or too much (R122)."""
    if not parts:
        raise invalid("content", "content must be a text or 1 to 50 parts.")
    if len(parts) > limits.MESSAGE_PARTS:
        message = f"content has {len(parts)} parts; at most {limits.MESSAGE_PARTS} are taken."
        raise too_large("content", message, limits.MESSAGE_PARTS, "parts")
    texts = []
    for at, part in enumerate(parts):
        if part.WhichOneof("kind") != "text":
            raise invalid("content", f"content[{at}] is of a kind this version does not know.")
        texts.append(part.text)
    check_text("content", "".join(texts), limits.TEXT_CHARS)
    joined = "\n\n".join(text for text in texts if text)
    if not joined.strip():
        raise invalid("content", "content must hold some text.")
    return joined


def check_options(options: RunOptions) -> None:
    """Raises INVALID_OPTIONS or CONTENT_TOO_LARGE naming the option."""
    check_model("model", options.model)
    check_text("system", options.system, limits.TEXT_CHARS)
    check_word("reasoning_effort", options.reasoning_effort, limits.EFFORT_CHARS)
    _check_fallbacks(options)
    _check_if_running(options)
    if options.HasField("cancel_after_disconnect"):
        _check_cancel_after(options.cancel_after_disconnect)
    if options.HasField("temperature"):
        value = options.temperature
        if not math.isfinite(value) or not 0 <= value <= 2:
            raise invalid("temperature", "temperature must be 0 to 2.")
    if options.HasField("max_output_tokens") and not 1 <= options.max_output_tokens <= limits.OUTPUT_TOKENS_MAX:
        raise invalid("max_output_tokens", f"max_output_tokens must be 1 to {limits.OUTPUT_TOKENS_MAX:,}.")
    if options.HasField("min_output_tokens"):
        most = options.max_output_tokens if options.HasField("max_output_tokens") else limits.OUTPUT_TOKENS_MAX
        if not 1 <= options.min_output_tokens <= most:
            raise invalid("min_output_tokens", f"min_output_tokens must be 1 to {most:,}, max_output_tokens at most.")


def _check_fallbacks(options: RunOptions) -> None:
    models = list(options.fallback_models)
    if len(models) > limits.FALLBACK_MODELS:
        raise invalid("fallback_models", f"fallback_models may name {limits.FALLBACK_MODELS} models at most.")
    for model in models:
        if not check_model("fallback_models", model):
            raise invalid("fallback_models", "fallback_models must not hold an empty name.")
    if len({options.model, *models}) <= len(models):
        raise invalid("fallback_models", "fallback_models must name each model once, and not the model itself.")


def _check_if_running(options: RunOptions) -> None:
    if options.if_running not in IfRunning.values():
        raise invalid("if_running", "if_running must be reject, enqueue or interrupt.")


def _check_cancel_after(value: Duration) -> None:
    least, most = limits.CANCEL_AFTER_SECONDS_MIN, limits.CANCEL_AFTER_SECONDS_MAX
    is_whole = value.nanos % 1_000_000 == 0
    if not is_whole or not least * 1000 <= value.seconds * 1000 + value.nanos // 1_000_000 <= most * 1000:
        raise invalid(
            "on_disconnect", f"on_disconnect must cancel after {least:g} to {most:g} seconds, in whole milliseconds."
        )


def check_slug(slug: str) -> str:
    """A project's name."""
    if not SLUG.fullmatch(slug):
        raise invalid("slug", "A project's name is 1 to 63 of a-z, 0-9 and -, with no - at an end.")
    return slug


def check_provider(provider: str) -> str:
    """A provider's name. What was sent instead is not repeated: it may be a key in the wrong field."""
    if provider not in PROVIDERS:
        raise invalid("provider", f"provider must be one of: {', '.join(PROVIDERS)}.")
    return provider


def check_api_key(key: str) -> str:
    """A provider's key; a refusal never repeats it."""
    if not API_KEY.fullmatch(key):
        sizes = f"{limits.API_KEY_CHARS_MIN} to {limits.API_KEY_CHARS:,}"
        raise invalid("api_key", f"api_key must be {sizes} printable ASCII characters without spaces.")
    return key


def page_size(asked: int, default: int, largest: int) -> int:
    """The size of a page: the default for 0, clamped to the largest; negative is refused."""
    if asked < 0:
        raise invalid("page_size", "page_size must not be negative.")
    return min(asked or default, largest)


def too_large(field: str, message: str, limit: int, unit: str = "characters") -> ServiceError:
    """CONTENT_TOO_LARGE naming the field and its limit."""
    return ServiceError("CONTENT_TOO_LARGE", message, {"field": field, "limit": str(limit), "unit": unit})
