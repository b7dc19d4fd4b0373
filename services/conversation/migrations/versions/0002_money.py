"""What calls, messages and threads cost, and the outbox that tells billing.

Columns with constant defaults are added without rewriting a table. Processes of the release
before are to be stopped first: they call models without a hold, and do not close calls that
were sent with one.
"""

from alembic import op

revision = "0002"
down_revision = "0001"

REQUEST = "threadloom_conversation"
ENGINE = "threadloom_conversation_engine"

CHANGES = (
    """ALTER TABLE conversation.api_calls
    ADD COLUMN cache_write_tokens BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN cost_nano BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN rates BYTEA,
    ADD COLUMN credits_per_usd BIGINT DEFAULT '0' NOT NULL""",
    """ALTER TABLE conversation.ai_messages
    ADD COLUMN cache_write_tokens BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN cost_nano BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN cost_credits BIGINT DEFAULT '0' NOT NULL""",
    """ALTER TABLE conversation.ai_threads
    ADD COLUMN tokens_in BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN tokens_out BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN thinking_tokens BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN cached_tokens BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN cache_write_tokens BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN cost_nano BIGINT DEFAULT '0' NOT NULL,
    ADD COLUMN usage_estimated BOOLEAN DEFAULT false NOT NULL""",
    """CREATE TABLE conversation.outbox (
    id UUID NOT NULL,
    topic TEXT NOT NULL,
    project_id UUID NOT NULL,
    payload BYTEA NOT NULL,
    attempts BIGINT DEFAULT '0' NOT NULL,
    due_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT outbox_pkey PRIMARY KEY (id, topic)
)""",
    "CREATE INDEX outbox_due_at ON conversation.outbox (due_at)",
)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '3s'")
    for change in CHANGES:
        op.execute(change)
    op.execute("ALTER TABLE conversation.outbox ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE conversation.outbox FORCE ROW LEVEL SECURITY")
    # The engine's alone: a request never sees what services tell each other.
    op.execute(f"CREATE POLICY engine ON conversation.outbox TO {ENGINE} USING (true) WITH CHECK (true)")
    op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON conversation.outbox TO {ENGINE}")
    # A request never writes what anything cost.
    op.execute(f"REVOKE UPDATE ON conversation.ai_threads FROM {REQUEST}")
    op.execute(
        "GRANT UPDATE (title, system_prompt, default_model_slug, next_position, last_message_at, updated_at)"
        f" ON conversation.ai_threads TO {REQUEST}"
    )
    op.execute(f"REVOKE INSERT ON conversation.api_calls FROM {REQUEST}")
    op.execute(
        "GRANT INSERT (id, project_id, user_id, thread_id, run_id, message_id, step, attempt, model)"
        f" ON conversation.api_calls TO {REQUEST}"
    )
    op.execute(
        f"GRANT UPDATE (tokens_in, tokens_out, thinking_tokens, cached_tokens, cache_write_tokens, cost_nano,"
        f" usage_estimated) ON conversation.ai_threads TO {ENGINE}"
    )
