"""Webhooks of projects and what is to be delivered to them.

Deliveries name their webhook without a foreign key: the end of a run, which writes them, must neither wait
for nor fail by a webhook that is being removed. The sweeper removes what is left over.
"""

from alembic import op

revision = "0005"
down_revision = "0004"

REQUEST = "threadloom_conversation"
ENGINE = "threadloom_conversation_engine"

CHANGES = (
    """CREATE TABLE conversation.webhooks (
    id UUID NOT NULL,
    project_id UUID NOT NULL,
    url TEXT NOT NULL,
    events TEXT[] NOT NULL,
    enabled BOOLEAN DEFAULT true NOT NULL,
    disabled_reason TEXT DEFAULT '' NOT NULL,
    sealed BYTEA NOT NULL,
    key_id TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT webhooks_pkey PRIMARY KEY (id),
    CONSTRAINT webhooks_project_id_fkey FOREIGN KEY(project_id) REFERENCES conversation.projects (id) ON DELETE CASCADE
)""",
    "CREATE INDEX webhooks_project_id ON conversation.webhooks (project_id)",
    """CREATE TABLE conversation.webhook_deliveries (
    id UUID NOT NULL,
    webhook_id UUID NOT NULL,
    project_id UUID NOT NULL,
    run_id UUID,
    type TEXT NOT NULL,
    payload TEXT NOT NULL,
    state TEXT DEFAULT 'pending' NOT NULL,
    attempts BIGINT DEFAULT '0' NOT NULL,
    due_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    last_status BIGINT DEFAULT '0' NOT NULL,
    last_error TEXT DEFAULT '' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT webhook_deliveries_pkey PRIMARY KEY (id),
    CONSTRAINT webhook_deliveries_once UNIQUE (webhook_id, run_id, type)
)""",
    "CREATE INDEX webhook_deliveries_due ON conversation.webhook_deliveries (webhook_id, due_at)"
    " WHERE state = 'pending'",
    "CREATE INDEX webhook_deliveries_newest ON conversation.webhook_deliveries (webhook_id, created_at, id)",
    "CREATE INDEX webhook_deliveries_created_at ON conversation.webhook_deliveries (created_at)",
)

# See the first migration: what is missing or emptied compares with NULL.
PROJECT = "project_id = NULLIF(current_setting('app.project', true), '')::uuid"
RULE = f"current_setting('app.role', true) = 'service' AND {PROJECT}"
GRANTS = {
    REQUEST: {
        "webhooks": "SELECT, INSERT, UPDATE (url, events, enabled, disabled_reason, sealed, key_id, updated_at), DELETE",
        "webhook_deliveries": "SELECT, INSERT, UPDATE (state, attempts, due_at), DELETE",
    },
    ENGINE: {
        "webhooks": "SELECT, UPDATE (enabled, disabled_reason, sealed, key_id)",
        "webhook_deliveries": "SELECT, INSERT, UPDATE (state, attempts, due_at, last_status, last_error), DELETE",
    },
}
RULES = {REQUEST: ("request", RULE), ENGINE: ("engine", "true")}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '3s'")
    for change in CHANGES:
        op.execute(change)
    for table in ("webhooks", "webhook_deliveries"):
        op.execute(f"ALTER TABLE conversation.{table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE conversation.{table} FORCE ROW LEVEL SECURITY")
        for role, (name, rule) in RULES.items():
            op.execute(f"CREATE POLICY {name} ON conversation.{table} TO {role} USING ({rule}) WITH CHECK ({rule})")
            op.execute(f"GRANT {GRANTS[role][table]} ON conversation.{table} TO {role}")
