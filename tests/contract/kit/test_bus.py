"""The bus over a real NATS that goes away and comes back."""

import asyncio

from kit.bus import Bus
from tests.support import servers

SECONDS = 10.0


async def heard(publisher: Bus, got: list[bytes], payload: bytes = b"x") -> None:
    """Publishes until something arrives."""
    async with asyncio.timeout(SECONDS):
        while not got:
            publisher.post("a.b", payload)
            await asyncio.sleep(0.02)


async def connected(bus: Bus, wanted: bool) -> None:
    """Waits until the bus knows that NATS is there, or away."""
    async with asyncio.timeout(SECONDS):
        while bus.is_connected is not wanted:  # noqa: ASYNC110 - the client tells nobody
            await asyncio.sleep(0.02)


async def test_a_subject_that_is_wanted_while_nats_is_away_is_heard_when_it_is_back() -> None:
    with servers.running_nats() as nats:
        listener, publisher = Bus(nats.url), Bus(nats.url)
        early: list[bytes] = []
        late: list[bytes] = []
        try:
            for bus in (listener, publisher):
                bus.start()
                await connected(bus, True)
            listener.subscribe("a.b", early.append)
            await heard(publisher, early)
            await asyncio.to_thread(nats.kill)
            await connected(listener, False)
            listener.subscribe("a.b", late.append)
            early.clear()
            await asyncio.to_thread(nats.start)
            await heard(publisher, late)
            await heard(publisher, early)
        finally:
            await listener.close()
            await publisher.close()


async def test_a_process_does_not_hear_itself() -> None:
    with servers.running_nats() as nats:
        itself, other = Bus(nats.url), Bus(nats.url)
        own: list[bytes] = []
        others: list[bytes] = []
        try:
            for bus in (itself, other):
                bus.start()
                await connected(bus, True)
            itself.subscribe("a.b", own.append)
            other.subscribe("a.b", others.append)
            await heard(itself, others, b"from itself")
            await heard(other, own, b"from other")
            assert set(own) == {b"from other"}
            assert set(others) == {b"from itself"}
        finally:
            await itself.close()
            await other.close()


async def test_publishing_while_nats_is_away_drops_and_does_not_fail() -> None:
    bus = Bus("nats://127.0.0.1:1")
    bus.start()
    bus.post("a.b", b"x")
    await bus.close()
