"""${message}

Rules: expand, backfill, contract in separate releases; no statement may hold a lock for long.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    # A migration waits for a lock this long, then fails instead of stopping the service.
    op.execute("SET LOCAL lock_timeout = '3s'")
    ${upgrades if upgrades else "pass"}
