"""What a project agreed to besides prices."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """In force for a project: its own, and the deployment's where it has none."""

    credits_per_usd: int
    runs_per_minute: int
