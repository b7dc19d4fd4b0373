"""What a batch that gathers must not hold up (durability.md 3)."""

import asyncio

import pytest

from services.conversation import limits
from tests.contract.conversation.harness import Service
from tests.contract.conversation.test_journal import appends
from tests.fakes.provider import FakeProvider


async def test_a_pause_delays_neither_the_first_text_nor_the_end(
    service: Service, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GATHER_SECONDS", 60.0)  # whatever waits for the pause does not come at all
    monkeypatch.setattr(limits, "GATHER_RUNS", 2)
    alice = service.alice
    held = alice.run(await alice.thread(), "[fake chunks=2 gate=g gate_at=1]")
    await held.until(lambda reading: reading.text)  # one active run: nothing gathers

    run = alice.run(await alice.thread(), "[fake chunks=40 delay=2 gate=h gate_at=20]")
    before = appends()
    await run.until(lambda reading: reading.text)  # its first text comes at once
    provider.open_gate("h")
    await run.end()  # and so does its end, with all that waited
    assert run.text == provider.calls[1].text
    assert appends() - before < 10  # while the other forty pieces did gather

    provider.open_gate("g")
    await asyncio.wait_for(held.end(), 10)
