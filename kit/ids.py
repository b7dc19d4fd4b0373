"""Ids and names: UUIDv7, which sort by the time they were made. Order never relies on that (durability.md 10)."""

from uuid import UUID

from uuid_utils.compat import uuid7


def new_id() -> UUID:
    """A new UUIDv7."""
    return uuid7()


def is_model_slug(text: str) -> bool:
    """Whether a model can be called so: printable, and not only blanks. How long is each service's own limit."""
    return text.isprintable() and bool(text.strip())


def parse_id(text: str) -> UUID | None:
    """The UUID of its canonical text form, None for anything else."""
    try:
        found = UUID(text)
    except ValueError:
        return None
    return found if str(found) == text else None
