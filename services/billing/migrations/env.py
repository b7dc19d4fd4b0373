"""Alembic's entry: one connection, handed over by `services.billing.migrate`."""

from typing import Any

from alembic import context

from services.billing.schema import SCHEMA, Base

VERSION_TABLE = "schema_version"


def is_ours(name: str | None, kind: str, parent: Any) -> bool:
    """Whether autogenerate looks at this: only the tables of this service's schema."""
    return name == SCHEMA if kind == "schema" else True


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    version_table_schema=SCHEMA,
    include_schemas=True,
    include_name=is_ours,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
