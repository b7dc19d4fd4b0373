"""The first tables, and who may see and write what.

Two roles (durability.md 28). `threadloom_conversation` serves requests: it sees only
rows of the project and user set for the transaction. `threadloom_conversation_engine`
drives runs: it sees every row of the run tables and nothing of projects and keys.
Both are made by `services.conversation.migrate`; neither owns anything.
"""

from alembic import op

revision = "0001"
down_revision = None

REQUEST = "threadloom_conversation"
ENGINE = "threadloom_conversation_engine"

TABLES = """
CREATE TABLE conversation.api_calls (
    id UUID NOT NULL,
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    thread_id UUID NOT NULL,
    run_id UUID NOT NULL,
    message_id UUID NOT NULL,
    step BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    model TEXT NOT NULL,
    provider TEXT DEFAULT '' NOT NULL,
    status TEXT DEFAULT 'started' NOT NULL,
    http_status BIGINT DEFAULT '0' NOT NULL,
    error_code TEXT DEFAULT '' NOT NULL,
    tokens_in BIGINT DEFAULT '0' NOT NULL,
    tokens_out BIGINT DEFAULT '0' NOT NULL,
    thinking_tokens BIGINT DEFAULT '0' NOT NULL,
    cached_tokens BIGINT DEFAULT '0' NOT NULL,
    usage_source TEXT DEFAULT 'unknown' NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    ended_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT api_calls_pkey PRIMARY KEY (id)
);
CREATE INDEX api_calls_run_id ON conversation.api_calls (run_id);

CREATE TABLE conversation.projects (
    id UUID NOT NULL,
    slug TEXT NOT NULL,
    jwt_secret TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT projects_pkey PRIMARY KEY (id),
    CONSTRAINT projects_slug UNIQUE (slug)
);

CREATE TABLE conversation.run_events (
    run_id UUID NOT NULL,
    seq BIGINT NOT NULL,
    project_id UUID NOT NULL,
    kind SMALLINT NOT NULL,
    payload BYTEA NOT NULL,
    CONSTRAINT run_events_pkey PRIMARY KEY (run_id, seq)
);

CREATE TABLE conversation.workers (
    id UUID NOT NULL,
    lease_until TIMESTAMP WITH TIME ZONE NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT workers_pkey PRIMARY KEY (id)
);

CREATE TABLE conversation.ai_threads (
    id UUID NOT NULL,
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    title TEXT DEFAULT '' NOT NULL,
    system_prompt TEXT DEFAULT '' NOT NULL,
    default_model_slug TEXT DEFAULT '' NOT NULL,
    next_position BIGINT DEFAULT '1' NOT NULL,
    last_message_at TIMESTAMP WITH TIME ZONE DEFAULT '-infinity' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT ai_threads_pkey PRIMARY KEY (id),
    CONSTRAINT ai_threads_project_id_fkey FOREIGN KEY(project_id) REFERENCES conversation.projects (id) ON DELETE CASCADE
);
CREATE INDEX ai_threads_project_id_user_id_updated_at_id ON conversation.ai_threads (project_id, user_id, updated_at, id);

CREATE TABLE conversation.idempotency_keys (
    project_id UUID NOT NULL,
    caller TEXT NOT NULL,
    method TEXT NOT NULL,
    route TEXT NOT NULL,
    key TEXT NOT NULL,
    body_sha256 BYTEA NOT NULL,
    resource UUID,
    kept_message_id UUID,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (project_id, caller, method, route, key),
    CONSTRAINT idempotency_keys_project_id_fkey FOREIGN KEY(project_id) REFERENCES conversation.projects (id) ON DELETE CASCADE
);
CREATE INDEX idempotency_keys_created_at ON conversation.idempotency_keys (created_at);
CREATE INDEX idempotency_keys_resource ON conversation.idempotency_keys (resource);

CREATE TABLE conversation.project_keys (
    key_sha256 BYTEA NOT NULL,
    project_id UUID NOT NULL,
    kind TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    revoked_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT project_keys_pkey PRIMARY KEY (key_sha256),
    CONSTRAINT project_keys_project_id_fkey FOREIGN KEY(project_id) REFERENCES conversation.projects (id) ON DELETE CASCADE
);

CREATE TABLE conversation.stream_tickets (
    ticket_sha256 BYTEA NOT NULL,
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    role TEXT NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT stream_tickets_pkey PRIMARY KEY (ticket_sha256),
    CONSTRAINT stream_tickets_project_id_fkey FOREIGN KEY(project_id) REFERENCES conversation.projects (id) ON DELETE CASCADE
);

CREATE TABLE conversation.ai_messages (
    id UUID NOT NULL,
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    thread_id UUID NOT NULL,
    run_id UUID NOT NULL,
    position BIGINT NOT NULL,
    role TEXT NOT NULL,
    status TEXT NOT NULL,
    parts BYTEA DEFAULT ''::bytea NOT NULL,
    text TEXT DEFAULT '' NOT NULL,
    text_seq BIGINT DEFAULT '0' NOT NULL,
    model TEXT DEFAULT '' NOT NULL,
    provider TEXT DEFAULT '' NOT NULL,
    tokens_in BIGINT DEFAULT '0' NOT NULL,
    tokens_out BIGINT DEFAULT '0' NOT NULL,
    thinking_tokens BIGINT DEFAULT '0' NOT NULL,
    cached_tokens BIGINT DEFAULT '0' NOT NULL,
    usage_estimated BOOLEAN DEFAULT false NOT NULL,
    latency_ms BIGINT DEFAULT '0' NOT NULL,
    finish_reason TEXT DEFAULT '' NOT NULL,
    error BYTEA,
    metadata JSONB DEFAULT '{}'::jsonb NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT ai_messages_pkey PRIMARY KEY (id),
    CONSTRAINT ai_messages_thread_id_position UNIQUE (thread_id, position),
    CONSTRAINT ai_messages_thread_id_fkey FOREIGN KEY(thread_id) REFERENCES conversation.ai_threads (id) ON DELETE CASCADE
);

CREATE TABLE conversation.ai_runs (
    id UUID NOT NULL,
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    thread_id UUID NOT NULL,
    user_message_id UUID NOT NULL,
    reply_message_id UUID NOT NULL,
    status TEXT NOT NULL,
    model TEXT NOT NULL,
    options BYTEA NOT NULL,
    worker_id UUID,
    epoch BIGINT DEFAULT '1' NOT NULL,
    takeovers BIGINT DEFAULT '0' NOT NULL,
    cancel_requested_at TIMESTAMP WITH TIME ZONE,
    last_seq BIGINT DEFAULT '0' NOT NULL,
    log_bytes BIGINT DEFAULT '0' NOT NULL,
    log_trimmed BOOLEAN DEFAULT false NOT NULL,
    error BYTEA,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    finished_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT ai_runs_pkey PRIMARY KEY (id),
    CONSTRAINT ai_runs_thread_id_fkey FOREIGN KEY(thread_id) REFERENCES conversation.ai_threads (id) ON DELETE CASCADE
);
CREATE INDEX ai_runs_thread_id ON conversation.ai_runs (thread_id);
CREATE UNIQUE INDEX ai_runs_one_active ON conversation.ai_runs (thread_id) WHERE status = 'running';
CREATE INDEX ai_runs_owned ON conversation.ai_runs (worker_id) WHERE status = 'running';
CREATE INDEX ai_runs_untrimmed ON conversation.ai_runs (finished_at) WHERE finished_at IS NOT NULL AND NOT log_trimmed;

CREATE TABLE conversation.trace_events (
    run_id UUID NOT NULL,
    ordinal BIGINT NOT NULL,
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    thread_id UUID NOT NULL,
    message_id UUID NOT NULL,
    position BIGINT NOT NULL,
    type TEXT NOT NULL,
    payload BYTEA NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE NOT NULL,
    ended_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT trace_events_pkey PRIMARY KEY (run_id, ordinal),
    CONSTRAINT trace_events_thread_id_fkey FOREIGN KEY(thread_id) REFERENCES conversation.ai_threads (id) ON DELETE CASCADE
);
CREATE INDEX trace_events_thread_id_position_ordinal ON conversation.trace_events (thread_id, position, ordinal);
"""

# What the transaction's settings let the request role see. A missing or emptied
# setting compares with NULL, which is never true.
PROJECT = "project_id = NULLIF(current_setting('app.project', true), '')::uuid"
OWN = (
    f"{PROJECT} AND (current_setting('app.role', true) = 'service' OR "
    "(current_setting('app.role', true) = 'user' AND user_id = NULLIF(current_setting('app.user', true), '')))"
)
SYSTEM = "current_setting('app.role', true) = 'system'"
OWN_KEY = f"{PROJECT} AND caller = current_setting('app.role', true) || ':' || current_setting('app.user', true)"
# The run's own policy decides: the subquery is filtered by it.
OWN_RUN = "EXISTS (SELECT FROM conversation.ai_runs r WHERE r.id = run_id)"
# A start writes the first event in the statement that makes the run, where the run is not
# visible yet. Every later event is the engine's.
FIRST_EVENT = f"{PROJECT} AND seq = 1"

REQUEST_POLICIES = {
    "projects": SYSTEM,
    "project_keys": SYSTEM,
    "stream_tickets": SYSTEM,
    "ai_threads": OWN,
    "ai_messages": OWN,
    "ai_runs": OWN,
    "trace_events": OWN,
    "api_calls": OWN,
    "idempotency_keys": OWN_KEY,
}

REQUEST_GRANTS = {
    "projects": "SELECT, INSERT",
    "project_keys": "SELECT, INSERT",
    "stream_tickets": "SELECT, INSERT, DELETE",
    "ai_threads": "SELECT, INSERT, UPDATE, DELETE",
    "ai_messages": "SELECT, INSERT, UPDATE (run_id)",
    "ai_runs": "SELECT, INSERT, UPDATE (cancel_requested_at)",
    "trace_events": "SELECT",
    "api_calls": "SELECT, INSERT",
    "idempotency_keys": "SELECT, INSERT, UPDATE (resource)",
}

ENGINE_GRANTS = {
    "workers": "SELECT, INSERT, UPDATE, DELETE",
    "ai_threads": "SELECT, UPDATE (updated_at)",
    "ai_messages": "SELECT, UPDATE, DELETE",
    "ai_runs": "SELECT, UPDATE",
    "run_events": "SELECT, INSERT, DELETE",
    "trace_events": "SELECT, INSERT",
    "api_calls": "SELECT, INSERT, UPDATE",
    "idempotency_keys": "SELECT, UPDATE, DELETE",
    "stream_tickets": "SELECT, DELETE",
}

# Ends a transaction whose run has another owner by now. Raised, not returned, so that
# a whole pipeline of statements falls with it.
FENCE = """
CREATE FUNCTION conversation.assert_owner(run uuid, owner_epoch bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM conversation.ai_runs r WHERE r.id = run AND r.epoch = owner_epoch FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'run % is not owned under epoch %', run, owner_epoch USING ERRCODE = 'TL001';
    END IF;
END $$
"""


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '3s'")
    for statement in TABLES.split(";\n"):
        if statement.strip():
            op.execute(statement.rstrip(";\n"))
    op.execute("ALTER TABLE conversation.run_events SET (autovacuum_vacuum_insert_scale_factor = 0.5)")
    op.execute(FENCE)
    op.execute(f"GRANT USAGE ON SCHEMA conversation TO {REQUEST}, {ENGINE}")
    for table in sorted({*REQUEST_POLICIES, *ENGINE_GRANTS}):
        op.execute(f"ALTER TABLE conversation.{table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE conversation.{table} FORCE ROW LEVEL SECURITY")
    for table, rule in REQUEST_POLICIES.items():
        op.execute(f"CREATE POLICY request ON conversation.{table} TO {REQUEST} USING ({rule}) WITH CHECK ({rule})")
        op.execute(f"GRANT {REQUEST_GRANTS[table]} ON conversation.{table} TO {REQUEST}")
    for action in ("SELECT", "DELETE"):
        op.execute(
            f"CREATE POLICY request_{action.lower()} ON conversation.run_events FOR {action} TO {REQUEST}"
            f" USING ({OWN_RUN})"
        )
    op.execute(
        f"CREATE POLICY request_insert ON conversation.run_events FOR INSERT TO {REQUEST} WITH CHECK ({FIRST_EVENT})"
    )
    op.execute(f"GRANT SELECT, INSERT, DELETE ON conversation.run_events TO {REQUEST}")
    for table, grants in ENGINE_GRANTS.items():
        op.execute(f"CREATE POLICY engine ON conversation.{table} TO {ENGINE} USING (true) WITH CHECK (true)")
        op.execute(f"GRANT {grants} ON conversation.{table} TO {ENGINE}")
