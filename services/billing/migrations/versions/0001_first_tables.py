"""The first tables, and who may see and write what.

Two roles (durability.md 28). `threadloom_billing` serves requests: it sees only rows of
the project set for the transaction, and of a user only its own; money moves only under
`app.role` system. `threadloom_billing_engine` frees expired holds, removes old ones and
proves the sums: it sees every row of the books. Both are made by `services.billing.migrate`;
neither owns anything.
"""

from alembic import op

revision = "0001"
down_revision = None

REQUEST = "threadloom_billing"
ENGINE = "threadloom_billing_engine"

TABLES = """
CREATE TABLE billing.accounts (
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    period TEXT NOT NULL,
    start DATE NOT NULL,
    held_nano BIGINT DEFAULT '0' NOT NULL,
    spent_nano BIGINT DEFAULT '0' NOT NULL,
    CONSTRAINT accounts_pkey PRIMARY KEY (project_id, user_id, period, start)
);

CREATE TABLE billing.cost_ledger (
    api_call_id UUID NOT NULL,
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    run_id UUID NOT NULL,
    thread_id UUID NOT NULL,
    message_id UUID NOT NULL,
    model TEXT NOT NULL,
    tokens_in BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    cache_write_tokens BIGINT NOT NULL,
    tokens_out BIGINT NOT NULL,
    thinking_tokens BIGINT NOT NULL,
    cost_nano BIGINT NOT NULL,
    reported_nano BIGINT NOT NULL,
    estimated BOOLEAN DEFAULT false NOT NULL,
    above_hold BOOLEAN DEFAULT false NOT NULL,
    late BOOLEAN DEFAULT false NOT NULL,
    day DATE NOT NULL,
    booked_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT cost_ledger_pkey PRIMARY KEY (api_call_id)
);
CREATE INDEX cost_ledger_project_id_booked_at_api_call_id ON billing.cost_ledger (project_id, booked_at, api_call_id);
CREATE INDEX cost_ledger_project_id_user_id_booked_at_api_call_id ON billing.cost_ledger (project_id, user_id, booked_at, api_call_id);

CREATE TABLE billing.holds (
    api_call_id UUID NOT NULL,
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    run_id UUID NOT NULL,
    thread_id UUID NOT NULL,
    message_id UUID NOT NULL,
    model TEXT NOT NULL,
    input_max BIGINT NOT NULL,
    output_max BIGINT NOT NULL,
    output_min BIGINT NOT NULL,
    output_granted BIGINT NOT NULL,
    amount_nano BIGINT NOT NULL,
    rates BYTEA,
    credits_per_usd BIGINT NOT NULL,
    status TEXT DEFAULT 'open' NOT NULL,
    day DATE NOT NULL,
    placed_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    closed_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT holds_pkey PRIMARY KEY (api_call_id)
);
CREATE INDEX holds_closed ON billing.holds (status, closed_at) WHERE closed_at IS NOT NULL;
CREATE INDEX holds_open ON billing.holds (expires_at) WHERE status = 'open';
CREATE INDEX holds_project_id_run_id ON billing.holds (project_id, run_id);

CREATE TABLE billing.model_prices (
    project_id UUID NOT NULL,
    model TEXT NOT NULL,
    rates BYTEA NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT model_prices_pkey PRIMARY KEY (project_id, model)
);

CREATE TABLE billing.project_terms (
    project_id UUID NOT NULL,
    credits_per_usd BIGINT,
    runs_per_minute BIGINT,
    CONSTRAINT project_terms_pkey PRIMARY KEY (project_id)
);

CREATE TABLE billing.quotas (
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    period TEXT NOT NULL,
    limit_nano BIGINT NOT NULL,
    CONSTRAINT quotas_pkey PRIMARY KEY (project_id, user_id)
);

CREATE TABLE billing.rate_windows (
    project_id UUID NOT NULL,
    user_id TEXT NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    used BIGINT DEFAULT '0' NOT NULL,
    CONSTRAINT rate_windows_pkey PRIMARY KEY (project_id, user_id)
);

CREATE TABLE billing.spend_caps (
    project_id UUID NOT NULL,
    period TEXT NOT NULL,
    limit_nano BIGINT NOT NULL,
    CONSTRAINT spend_caps_pkey PRIMARY KEY (project_id, period)
);

"""

# A missing or emptied setting compares with NULL, which is never true.
PROJECT = "project_id = NULLIF(current_setting('app.project', true), '')::uuid"
EVERY_PROJECT = "project_id = '00000000-0000-0000-0000-000000000000'"
ROLE = "current_setting('app.role', true)"
SYSTEM = f"{PROJECT} AND {ROLE} = 'system'"
ADMIN = f"{PROJECT} AND {ROLE} IN ('service', 'system')"
OWN = (
    f"{PROJECT} AND ({ROLE} IN ('service', 'system') OR "
    f"({ROLE} = 'user' AND user_id = NULLIF(current_setting('app.user', true), '')))"
)
PRICES_SEEN = f"({PROJECT} AND {ROLE} IN ('user', 'service', 'system')) OR ({EVERY_PROJECT} AND {ROLE} = 'system')"
# The quota of those who have none of their own is everybody's to read: it binds them.
QUOTAS_READ = f"({OWN}) OR ({PROJECT} AND {ROLE} = 'user' AND user_id = '')"
# What every project pays by default is no secret within the house: any whole caller may read it.
PRICES_READ = (
    f"{PRICES_SEEN} OR ({EVERY_PROJECT} AND NULLIF(current_setting('app.project', true), '') IS NOT NULL"
    f" AND {ROLE} IN ('service', 'user'))"
)
PRICES_SET = f"({ADMIN}) OR ({EVERY_PROJECT} AND {ROLE} = 'system')"

# Who reads, who writes, and which statements the role may make at all.
REQUEST_RULES = {
    "model_prices": (PRICES_READ, PRICES_SET, "SELECT, INSERT, UPDATE (rates, updated_at)"),
    "quotas": (QUOTAS_READ, ADMIN, "SELECT, INSERT, UPDATE (period, limit_nano), DELETE"),
    "project_terms": (ADMIN, ADMIN, "SELECT, INSERT, UPDATE (credits_per_usd, runs_per_minute)"),
    "spend_caps": (ADMIN, ADMIN, "SELECT, INSERT, UPDATE (limit_nano), DELETE"),
    "accounts": (OWN, SYSTEM, "SELECT, INSERT, UPDATE (held_nano, spent_nano)"),
    "holds": (OWN, SYSTEM, "SELECT, INSERT, UPDATE (status, closed_at)"),
    "cost_ledger": (OWN, SYSTEM, "SELECT, INSERT"),
    "rate_windows": (SYSTEM, SYSTEM, "SELECT, INSERT, UPDATE (started_at, used)"),
}
ENGINE_GRANTS = {
    "accounts": "SELECT, UPDATE (held_nano)",
    "holds": "SELECT, UPDATE (status, closed_at), DELETE",
    "cost_ledger": "SELECT",
}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '3s'")
    for statement in TABLES.split(";\n"):
        if statement.strip():
            op.execute(statement.rstrip(";\n"))
    op.execute(f"GRANT USAGE ON SCHEMA billing TO {REQUEST}, {ENGINE}")
    for table, (read, write, grants) in REQUEST_RULES.items():
        op.execute(f"ALTER TABLE billing.{table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE billing.{table} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY request_read ON billing.{table} FOR SELECT TO {REQUEST} USING ({read})")
        op.execute(f"CREATE POLICY request_add ON billing.{table} FOR INSERT TO {REQUEST} WITH CHECK ({write})")
        op.execute(f"CREATE POLICY request_change ON billing.{table} FOR UPDATE TO {REQUEST} USING ({write})")
        if "DELETE" in grants:
            op.execute(f"CREATE POLICY request_remove ON billing.{table} FOR DELETE TO {REQUEST} USING ({write})")
        op.execute(f"GRANT {grants} ON billing.{table} TO {REQUEST}")
    for table, grants in ENGINE_GRANTS.items():
        op.execute(f"CREATE POLICY engine ON billing.{table} TO {ENGINE} USING (true) WITH CHECK (true)")
        op.execute(f"GRANT {grants} ON billing.{table} TO {ENGINE}")
    op.execute(
        f"CREATE POLICY engine_keeps ON billing.holds AS RESTRICTIVE FOR DELETE TO {ENGINE} USING (status <> 'open')"
    )
