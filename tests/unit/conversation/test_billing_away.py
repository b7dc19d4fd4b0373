"""How long a run waits for billing."""

import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest

from kit.errors import ServiceError
from kit.ids import new_id
from services.conversation import limits
from services.conversation.billing import Billing, Payer

REPLICAS = 2
WAIT_SECONDS = 0.3
SLACK_SECONDS = 0.7  # far less than one try


@pytest.fixture
async def frozen() -> AsyncIterator[Billing]:
    """Replicas that take connections and never say a word."""
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(REPLICAS)]
        billing = Billing([f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners], "credential")
        yield billing
        await billing.close()


async def test_a_frozen_billing_is_waited_for_no_longer_than_an_absent_one(
    frozen: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HOLD_WAIT_SECONDS", WAIT_SECONDS)
    payer = Payer(new_id(), "alice", new_id(), new_id(), new_id(), "fake-model")
    begun = time.monotonic()
    with pytest.raises(ServiceError) as refusal:
        await frozen.place_hold(new_id(), payer, input_tokens_max=1, max_output=1, min_output=1)
    assert refusal.value.reason == "UNAVAILABLE"
    assert time.monotonic() - begun < WAIT_SECONDS + SLACK_SECONDS < limits.BILLING_SECONDS
