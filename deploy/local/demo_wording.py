"""What the demo model says. Pure: the random source is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

QUOTE_CHARACTERS = 40  # enough to be recognised, short enough not to fill the answer

_HELLO = (
    "Hello, and welcome to Threadloom!",
    "Nice to meet you, and thank you for trying Threadloom!",
    "Hi there! It is good to have you here.",
)
_QUOTE = (
    'You wrote "{quote}", and I would love to be clever about it,',
    'I read "{quote}" with great interest,',
    'Thank you for "{quote}",',
)
_NOTHING_TO_QUOTE = ("You sent me no words this time,",)
_MODEST = (
    "but I am only a small demo model with no intelligence at all: I just put friendly sentences together.",
    "but I must be honest: I am a demo model with no intelligence, here to show how an answer travels.",
    "but please do not expect wisdom: I am a demo model with no intelligence that runs on your machine.",
)
_COUNT = (
    "This is message number {count} of yours in this thread; the whole thread is given to me each time.",
    "I count {count} of your messages in this thread so far, and none has been forgotten.",
)
_DURABLE = (
    "While I write, try something rude: kill any of the processes in the middle of this answer, or close the tab, "
    "come back and reconnect with the last id. Nothing you saw is lost, and nothing appears twice.",
    "Here is a game for the next seconds: kill a process, any one, or drop the connection and reconnect with the "
    "last event id. The answer goes on where it stopped, and not one word of it is lost.",
    "Go on, pull a plug: kill a service in mid-answer or reload the page. With the last id you reconnect exactly "
    "where you were, and you lose nothing at all.",
)
_REAL = (
    "When you want real answers, set OPENAI_API_KEY and start me again with make run.",
    "For a model that can think, put your key into OPENAI_API_KEY and run make run once more.",
)
_BYE = ("Until then, write me anything you like.", "Have fun!", "I am happy to chat as long as you like.")
_THOUGHTS = (
    "The user asks me to think. I have nothing to think with, but I can show where a model's thoughts would appear.",
    "Let me look busy for a moment: thinking is shown apart from the answer, and it is kept just as safely.",
)


@dataclass(frozen=True)
class Answer:
    """Words with the space that follows them, so that joined they are the text."""

    thoughts: tuple[str, ...]
    words: tuple[str, ...]


def compose_answer(user_text: str, user_messages: int, chance: Random) -> Answer:
    """A friendly answer of 90 to 140 words (three to four seconds) to the newest of `user_messages` messages."""
    quote = _quote(user_text)
    sentences = (
        chance.choice(_HELLO),
        chance.choice(_QUOTE).format(quote=quote) if quote else chance.choice(_NOTHING_TO_QUOTE),
        chance.choice(_MODEST),
        chance.choice(_COUNT).format(count=user_messages),
        chance.choice(_DURABLE),
        chance.choice(_REAL),
        chance.choice(_BYE),
    )
    thoughts = chance.choice(_THOUGHTS) if "think" in user_text.lower() else ""
    return Answer(_words(thoughts), _words(" ".join(sentences)))


def _quote(text: str) -> str:
    line = " ".join(text.split()).replace('"', "'")
    if len(line) <= QUOTE_CHARACTERS:
        return line
    return line[:QUOTE_CHARACTERS].rsplit(" ", 1)[0] + " …"


def _words(text: str) -> tuple[str, ...]:
    words = text.split()
    return tuple(f"{word} " for word in words[:-1]) + tuple(words[-1:])
