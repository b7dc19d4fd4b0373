"""How long somebody may say nothing."""

import asyncio

import pytest

from services.conversation.silence import Silence

SECONDS = 0.1


async def test_silence_ends_what_waits() -> None:
    with pytest.raises(TimeoutError):
        async with Silence(SECONDS):
            await asyncio.sleep(20 * SECONDS)


async def test_whoever_speaks_in_time_may_go_on_for_ever() -> None:
    async with Silence(SECONDS) as silence:
        for _ in range(8):
            await asyncio.sleep(SECONDS / 2)
            silence.heard()


async def test_silence_counts_from_what_was_heard_last() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with Silence(SECONDS) as silence:
            await asyncio.sleep(SECONDS * 0.8)
            silence.heard()
            heard = loop.time()
            await asyncio.sleep(20 * SECONDS)
    assert SECONDS <= loop.time() - heard < 10 * SECONDS


async def test_a_pause_is_not_silence_and_ends_with_what_is_heard() -> None:
    with pytest.raises(TimeoutError):
        async with Silence(SECONDS) as silence:
            silence.pause()
            await asyncio.sleep(3 * SECONDS)
            silence.heard()
            await asyncio.sleep(20 * SECONDS)
