"""What the model is given: the system prompt and as much of the newest history as fits. Pure."""

from dataclasses import dataclass
from typing import Any

from services.conversation.limits import CHARS_PER_TOKEN


@dataclass(frozen=True)
class PastMessage:
    """A stored message as history sees it. role: user or assistant."""

    role: str
    text: str


def estimate_tokens(text: str) -> int:
    """About four characters a token (R92), rounded up."""
    return -(-len(text) // CHARS_PER_TOKEN)


def system_text(thread_prompt: str, run_prompt: str) -> str:
    """The one system message: the thread's, then the run's (C16)."""
    return "\n\n".join(part for part in (thread_prompt, run_prompt) if part)


def select_recent(newest_first: list[PastMessage], budget_tokens: int) -> list[PastMessage]:
    """The newest messages that fit, oldest first; the newest always stays (R90).

    Replies without text (a run that failed or was cancelled at once) are left out:
    providers refuse empty assistant messages, and there is nothing to remember.
    """
    kept: list[PastMessage] = []
    left = budget_tokens
    for message in newest_first:
        if not message.text and message.role == "assistant":
            continue
        left -= estimate_tokens(message.text)
        if kept and left < 0:
            break
        kept.append(message)
    return kept[::-1]


def to_chat_messages(system: str, recent: list[PastMessage]) -> list[dict[str, Any]]:
    """The request's messages, in the Chat Completions form."""
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    found.extend({"role": message.role, "content": message.text} for message in recent)
    return found
