"""How long somebody may say nothing."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.conversation.silence import Silence

SECONDS = 0.1


async def listening(speak: Callable[[Silence], Awaitable[None]]) -> None:
    async with Silence(SECONDS) as silence:
        await speak(silence)


async def test_silence_ends_what_waits() -> None:
    with pytest.raises(TimeoutError):
        await listening(lambda _: asyncio.sleep(20 * SECONDS))


async def test_whoever_speaks_in_time_may_go_on_for_ever() -> None:
    async with Silence(SECONDS) as silence:
        for _ in range(8):
            await asyncio.sleep(SECONDS / 2)
            silence.heard()


async def test_silence_counts_from_what_was_heard_last() -> None:
    loop = asyncio.get_running_loop()
    heard = loop.time()

    async def speak_once(silence: Silence) -> None:
        nonlocal heard
        await asyncio.sleep(SECONDS * 0.8)
        silence.heard()
        heard = loop.time()
        await asyncio.sleep(20 * SECONDS)

    with pytest.raises(TimeoutError):
        await listening(speak_once)
    assert SECONDS <= loop.time() - heard < 10 * SECONDS


async def test_a_pause_is_not_silence_and_ends_with_what_is_heard() -> None:
    async def pause(silence: Silence) -> None:
        silence.pause()
        await asyncio.sleep(3 * SECONDS)
        silence.heard()

    async def pause_then_say_nothing(silence: Silence) -> None:
        await pause(silence)
        await asyncio.sleep(20 * SECONDS)

    await listening(pause)
    with pytest.raises(TimeoutError):
        await listening(pause_then_say_nothing)
