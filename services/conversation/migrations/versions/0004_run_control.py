"""Runs that wait for their turn, and who still watches a run.

A queued run has its row in ai_runs at once; its message comes into the thread when it is
promoted, so until then `queued_runs` holds what that takes.
"""

from alembic import op

revision = "0004"
down_revision = "0003"

REQUEST = "threadloom_conversation"
ENGINE = "threadloom_conversation_engine"

CHANGES = (
    # When a queued run's turn began: the clock of its time limit.
    "ALTER TABLE conversation.ai_runs ADD COLUMN begun_at TIMESTAMP WITH TIME ZONE",
    """CREATE TABLE conversation.queued_runs (
    run_id UUID NOT NULL,
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    thread_id UUID NOT NULL,
    ordinal BIGINT NOT NULL,
    parts BYTEA NOT NULL,
    text TEXT NOT NULL,
    title TEXT NOT NULL,
    is_kept BOOLEAN NOT NULL,
    CONSTRAINT queued_runs_pkey PRIMARY KEY (run_id),
    CONSTRAINT queued_runs_thread_id_ordinal UNIQUE (thread_id, ordinal),
    CONSTRAINT queued_runs_run_id_fkey FOREIGN KEY(run_id) REFERENCES conversation.ai_runs (id) ON DELETE CASCADE
)""",
    """CREATE TABLE conversation.run_watch (
    run_id UUID NOT NULL,
    project_id UUID NOT NULL,
    cancel_after_ms BIGINT NOT NULL,
    until TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT run_watch_pkey PRIMARY KEY (run_id),
    CONSTRAINT run_watch_run_id_fkey FOREIGN KEY(run_id) REFERENCES conversation.ai_runs (id) ON DELETE CASCADE
)""",
)

# See the first migration: what is missing or emptied compares with NULL.
PROJECT = "project_id = NULLIF(current_setting('app.project', true), '')::uuid"
ROLE = "current_setting('app.role', true)"
OWN = (
    f"{PROJECT} AND ({ROLE} = 'service' OR "
    f"({ROLE} = 'user' AND user_id = NULLIF(current_setting('app.user', true), '')))"
)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '3s'")
    for change in CHANGES:
        op.execute(change)
    for table in ("queued_runs", "run_watch"):
        op.execute(f"ALTER TABLE conversation.{table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE conversation.{table} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY engine ON conversation.{table} TO {ENGINE} USING (true) WITH CHECK (true)")
    op.execute(f"CREATE POLICY request ON conversation.queued_runs TO {REQUEST} USING ({OWN}) WITH CHECK ({OWN})")
    op.execute(f"GRANT SELECT, INSERT ON conversation.queued_runs TO {REQUEST}")
    op.execute(f"GRANT SELECT, DELETE ON conversation.queued_runs TO {ENGINE}")
    # A start writes it; who watches is the engine's to note.
    op.execute(f"CREATE POLICY request ON conversation.run_watch TO {REQUEST} USING ({PROJECT}) WITH CHECK ({PROJECT})")
    op.execute(f"GRANT INSERT ON conversation.run_watch TO {REQUEST}")
    op.execute(f"GRANT SELECT, UPDATE (until), DELETE ON conversation.run_watch TO {ENGINE}")
    # Promoting a run does what a start does.
    op.execute(f"GRANT UPDATE (title, next_position, last_message_at) ON conversation.ai_threads TO {ENGINE}")
    op.execute(f"GRANT INSERT ON conversation.ai_messages TO {ENGINE}")
