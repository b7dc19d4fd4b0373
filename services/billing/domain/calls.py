"""Whose a model call is: what every request about it must say alike."""

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True)
class Call:
    """A call somebody wants to make, made, or did not make."""

    id: UUID
    project: UUID
    user: str
    run: UUID
    thread: UUID
    message: UUID
    model: str
