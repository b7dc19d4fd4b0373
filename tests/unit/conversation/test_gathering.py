"""When a batch of the journal waits for more (durability.md 3)."""

from services.conversation import limits
from services.conversation.domain import gathering


def test_a_batch_gathers_only_under_load() -> None:
    assert gathering.pause_seconds(limits.GATHER_RUNS - 1) == 0.0
    assert gathering.pause_seconds(limits.GATHER_RUNS) == limits.GATHER_SECONDS


def test_a_full_batch_does_not_wait() -> None:
    assert not gathering.is_full(limits.BATCH_RUNS - 1, limits.YIELD_PENDING_BYTES - 1)
    assert gathering.is_full(limits.BATCH_RUNS, 1)
    assert gathering.is_full(1, limits.YIELD_PENDING_BYTES)


def test_a_batch_full_by_bytes_always_counts_as_full() -> None:
    assert limits.BATCH_RUNS * limits.YIELD_PENDING_BYTES <= limits.BATCH_BYTES
