"""How tokens that a project's identity provider signs are verified: its JWKS, issuer and audience.

Public keys and addresses, so nothing is sealed. Users see none; the engine has no use for them.
"""

from alembic import op

revision = "0006"
down_revision = "0005"

REQUEST = "threadloom_conversation"

TABLE = """
CREATE TABLE conversation.identities (
    project_id UUID NOT NULL,
    jwks_url TEXT,
    jwks TEXT,
    issuer TEXT DEFAULT '' NOT NULL,
    audience TEXT DEFAULT '' NOT NULL,
    refuses_hs256 BOOLEAN DEFAULT false NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT identities_pkey PRIMARY KEY (project_id),
    CONSTRAINT identities_project_id_fkey FOREIGN KEY(project_id) REFERENCES conversation.projects (id) ON DELETE CASCADE,
    CONSTRAINT identities_one_source CHECK ((jwks_url IS NULL) <> (jwks IS NULL))
)
"""

# See the first migration: what is missing or emptied compares with NULL.
PROJECT = "project_id = NULLIF(current_setting('app.project', true), '')::uuid"
ROLE = "current_setting('app.role', true)"
RULE = f"{ROLE} = 'system' OR ({ROLE} = 'service' AND {PROJECT})"
CHANGED = "jwks_url, jwks, issuer, audience, refuses_hs256, updated_at"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '3s'")
    op.execute(TABLE)
    op.execute("ALTER TABLE conversation.identities ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE conversation.identities FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY request ON conversation.identities TO {REQUEST} USING ({RULE}) WITH CHECK ({RULE})")
    op.execute(f"GRANT SELECT, INSERT, UPDATE ({CHANGED}), DELETE ON conversation.identities TO {REQUEST}")
