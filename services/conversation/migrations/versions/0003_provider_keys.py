"""The projects' keys of model providers, sealed (kit/sealing.py).

Users see none. The engine opens them for a call and seals them again under newer keys
of the ring; it neither makes nor removes one, and does not change when one was set.
"""

from alembic import op

revision = "0003"
down_revision = "0002"

REQUEST = "threadloom_conversation"
ENGINE = "threadloom_conversation_engine"

TABLE = """
CREATE TABLE conversation.provider_keys (
    project_id UUID NOT NULL,
    provider TEXT NOT NULL,
    sealed BYTEA NOT NULL,
    key_id TEXT NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT provider_keys_pkey PRIMARY KEY (project_id, provider),
    CONSTRAINT provider_keys_project_id_fkey FOREIGN KEY(project_id) REFERENCES conversation.projects (id) ON DELETE CASCADE
)
"""

# See the first migration: what is missing or emptied compares with NULL.
PROJECT = "project_id = NULLIF(current_setting('app.project', true), '')::uuid"
ROLE = "current_setting('app.role', true)"
RULE = f"{ROLE} = 'system' OR ({ROLE} = 'service' AND {PROJECT})"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '3s'")
    op.execute(TABLE)
    op.execute("ALTER TABLE conversation.provider_keys ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE conversation.provider_keys FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY request ON conversation.provider_keys TO {REQUEST} USING ({RULE}) WITH CHECK ({RULE})")
    op.execute(
        f"GRANT SELECT, INSERT, UPDATE (sealed, key_id, updated_at), DELETE ON conversation.provider_keys TO {REQUEST}"
    )
    op.execute(f"CREATE POLICY engine ON conversation.provider_keys TO {ENGINE} USING (true) WITH CHECK (true)")
    op.execute(f"GRANT SELECT, UPDATE (sealed, key_id) ON conversation.provider_keys TO {ENGINE}")
