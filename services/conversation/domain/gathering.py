"""When the journal's lane waits a moment for more, and what cuts that wait short (durability.md 3)."""

from services.conversation import limits


def pause_seconds(active_runs: int) -> float:
    """How long a batch gathers before it is committed: not at all while few runs are active."""
    return limits.GATHER_SECONDS if active_runs >= limits.GATHER_RUNS else 0.0


def is_full(runs_waiting: int, run_bytes: int) -> bool:
    """Whether waiting would gain nothing: a batch of runs is there, or one run has much to tell.

    64 runs below YIELD_PENDING_BYTES each are less than BATCH_BYTES, so a batch that is
    full by bytes always holds such a run.
    """
    return runs_waiting >= limits.BATCH_RUNS or run_bytes >= limits.YIELD_PENDING_BYTES
