"""The three moves of money as functions, so that each is one statement: no client between a lock and its commit.

They run with the caller's rights under row-level security, and name project and role for their own transaction
only. Prices are bytes to them: what a call costs is decided outside, for the price it was decided with, and a
function that finds another price in force does nothing but say so.
"""

from alembic import op

revision = "0002"
down_revision = "0001"

REQUEST = "threadloom_billing"

ENTER = """
CREATE FUNCTION billing.enter_project(p_project uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('app.project', p_project::text, true), set_config('app.user', '', true),
        set_config('app.role', 'system', true);
END $$
"""

# The project's own price before that of every project.
PRICE = """
CREATE FUNCTION billing.price_of(p_project uuid, p_model text) RETURNS bytea LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT rates FROM billing.model_prices
        WHERE model = p_model AND project_id IN (p_project, '00000000-0000-0000-0000-000000000000')
        ORDER BY project_id = '00000000-0000-0000-0000-000000000000' LIMIT 1);
END $$
"""

# Missing rows are all made before the first is locked, and both goes in the order of the key, so that two
# transactions never wait for each other.
LOCK = """
CREATE FUNCTION billing.lock_accounts(p_project uuid, p_user text, p_day date) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_month date := date_trunc('month', p_day)::date;
    v_found bigint;
BEGIN
    SELECT count(*) INTO v_found FROM billing.accounts WHERE project_id = p_project AND user_id IN ('', p_user)
        AND (period, start) IN (('day', p_day), ('month', v_month), ('total', '1970-01-01'));
    IF v_found < 6 THEN
        INSERT INTO billing.accounts (project_id, user_id, period, start)
        SELECT p_project, o.user_id, p.period, p.start FROM (VALUES (''), (p_user)) o (user_id)
        CROSS JOIN (VALUES ('day', p_day), ('month', v_month), ('total', '1970-01-01'::date)) p (period, start)
        ORDER BY o.user_id COLLATE "C", p.period, p.start
        ON CONFLICT DO NOTHING;
    END IF;
    PERFORM FROM billing.accounts WHERE project_id = p_project AND user_id IN ('', p_user)
        AND (period, start) IN (('day', p_day), ('month', v_month), ('total', '1970-01-01'))
        ORDER BY user_id COLLATE "C", period, start FOR UPDATE;
END $$
"""

MOVE = """
CREATE FUNCTION billing.move(p_project uuid, p_user text, p_day date, p_held bigint, p_spent bigint)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_month date := date_trunc('month', p_day)::date;
BEGIN
    UPDATE billing.accounts SET held_nano = held_nano + p_held, spent_nano = spent_nano + p_spent
        WHERE project_id = p_project AND user_id IN ('', p_user)
        AND (period, start) IN (('day', p_day), ('month', v_month), ('total', '1970-01-01'));
END $$
"""

# o_outcome: placed, found (o_hold), settled (and the hold removed), reused, priced (o_rates is in force, and not what
# the amount was decided with), full (o_wait seconds) or short (the limits, and what is used of each). After `short`
# the accounts stay locked until the transaction ends: whoever decides again within it is not overtaken.
PLACE = """
CREATE FUNCTION billing.place_hold(
    p_id uuid, p_project uuid, p_user text, p_run uuid, p_thread uuid, p_message uuid, p_model text,
    p_input_max bigint, p_output_max bigint, p_output_min bigint, p_output bigint, p_amount bigint,
    p_known bytea, p_rates bytea, p_credits bigint, p_runs bigint, p_hold_seconds float8, p_window_seconds float8,
    OUT o_outcome text, OUT o_hold billing.holds, OUT o_rates bytea, OUT o_wait float8,
    OUT o_is_quota boolean[], OUT o_periods text[], OUT o_limits bigint[], OUT o_used numeric[], OUT o_credits bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_day date;
    v_runs bigint;
    v_age float8;
    v_begun bigint;
    v_is_past boolean;
    v_is_counted boolean;
    v_is_short boolean;
BEGIN
    PERFORM billing.enter_project(p_project);
    -- Before the price: a call that has its hold keeps it, whatever became of the model's price.
    SELECT * INTO o_hold FROM billing.holds WHERE api_call_id = p_id AND project_id = p_project;
    IF FOUND THEN
        o_outcome := 'found';
        RETURN;
    END IF;
    o_rates := billing.price_of(p_project, p_model);
    IF o_rates IS DISTINCT FROM p_known OR p_rates IS NULL THEN
        o_outcome := 'priced';
        RETURN;
    END IF;
    SELECT credits_per_usd, runs_per_minute INTO o_credits, v_runs FROM billing.project_terms
        WHERE project_id = p_project;
    o_credits := coalesce(o_credits, p_credits);
    v_runs := coalesce(v_runs, p_runs);

    v_day := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    PERFORM billing.lock_accounts(p_project, p_user, v_day);
    SELECT * INTO o_hold FROM billing.holds WHERE api_call_id = p_id AND project_id = p_project;
    IF FOUND THEN  -- its twin was faster
        o_outcome := 'found';
        RETURN;
    END IF;
    -- After the hold: where that is removed, it was settled long ago.
    IF EXISTS (SELECT FROM billing.cost_ledger WHERE api_call_id = p_id AND project_id = p_project) THEN
        o_outcome := 'settled';
        RETURN;
    END IF;

    -- A barred call never had a hold: it took no unit, so the run's next call does.
    v_is_counted := EXISTS (SELECT FROM billing.holds WHERE project_id = p_project AND run_id = p_run
        AND rates IS NOT NULL);
    IF NOT v_is_counted THEN
        SELECT used, extract(epoch FROM clock_timestamp() - started_at)::float8 INTO v_begun, v_age
            FROM billing.rate_windows WHERE project_id = p_project AND user_id = p_user;
        v_is_past := v_age IS NULL OR v_age >= p_window_seconds;  -- a window that has passed is read as empty
        IF NOT v_is_past AND v_begun >= v_runs THEN
            o_outcome := 'full';
            o_wait := p_window_seconds - v_age;
            RETURN;
        END IF;
    END IF;

    -- A user's own quota wins over the default of its project (user '') entirely, whatever their periods.
    SELECT coalesce(bool_or(l.limit_nano < l.used + p_amount), false), array_agg(l.is_quota), array_agg(l.period),
            array_agg(l.limit_nano), array_agg(l.used)
        INTO v_is_short, o_is_quota, o_periods, o_limits, o_used
        FROM (
            SELECT r.is_quota, r.period, r.limit_nano, a.held_nano::numeric + a.spent_nano AS used FROM (
                (SELECT true AS is_quota, p_user AS user_id, period, limit_nano FROM billing.quotas
                    WHERE project_id = p_project AND user_id IN (p_user, '') ORDER BY user_id = '' LIMIT 1)
                UNION ALL SELECT false, '', period, limit_nano FROM billing.spend_caps WHERE project_id = p_project
            ) r LEFT JOIN billing.accounts a ON a.project_id = p_project AND a.user_id = r.user_id
                AND a.period = r.period AND a.start = CASE r.period WHEN 'day' THEN v_day
                    WHEN 'month' THEN date_trunc('month', v_day)::date ELSE '1970-01-01'::date END
        ) l;
    IF v_is_short THEN
        o_outcome := 'short';
        RETURN;
    END IF;

    INSERT INTO billing.holds (api_call_id, project_id, user_id, run_id, thread_id, message_id, model, input_max,
            output_max, output_min, output_granted, amount_nano, rates, credits_per_usd, day, expires_at)
        VALUES (p_id, p_project, p_user, p_run, p_thread, p_message, p_model, p_input_max, p_output_max, p_output_min,
            p_output, p_amount, p_rates, o_credits, v_day, clock_timestamp() + make_interval(secs => p_hold_seconds))
        ON CONFLICT DO NOTHING RETURNING * INTO o_hold;
    IF NOT FOUND THEN  -- barred meanwhile, or another project's call, which this one must not see
        SELECT * INTO o_hold FROM billing.holds WHERE api_call_id = p_id AND project_id = p_project;
        o_outcome := CASE WHEN FOUND THEN 'found' ELSE 'reused' END;
        RETURN;
    END IF;
    IF NOT v_is_counted THEN
        INSERT INTO billing.rate_windows AS w (project_id, user_id, used) VALUES (p_project, p_user, 1)
            ON CONFLICT (project_id, user_id) DO UPDATE SET used = CASE WHEN v_is_past THEN 1 ELSE w.used + 1 END,
            started_at = CASE WHEN v_is_past THEN clock_timestamp() ELSE w.started_at END;
    END IF;
    PERFORM billing.move(p_project, p_user, v_day, p_amount, 0);
    o_outcome := 'placed';
END $$
"""

# p_costs are what the call costs by each of p_rates; p_published is for a call that was barred, and never priced.
# o_outcome: booked or found (o_entry), missing, reused, or priced (o_rates, which was not among p_rates; nothing where
# the price of o_model is not set).
SETTLE = """
CREATE FUNCTION billing.settle_call(
    p_id uuid, p_project uuid, p_input bigint, p_cached bigint, p_cache_write bigint, p_output bigint,
    p_thinking bigint, p_estimated boolean, p_reported bigint, p_rates bytea[], p_costs bigint[], p_published bytea,
    OUT o_outcome text, OUT o_entry billing.cost_ledger, OUT o_rates bytea, OUT o_model text
) LANGUAGE plpgsql AS $$
DECLARE
    v_hold billing.holds;
    v_is_late boolean;
    v_cost bigint;
BEGIN
    PERFORM billing.enter_project(p_project);
    -- Nobody else closes it until the commit.
    SELECT * INTO v_hold FROM billing.holds WHERE api_call_id = p_id AND project_id = p_project FOR UPDATE;
    SELECT * INTO o_entry FROM billing.cost_ledger WHERE api_call_id = p_id AND project_id = p_project;
    IF FOUND THEN
        o_outcome := 'found';
        RETURN;
    END IF;
    IF v_hold.api_call_id IS NULL THEN
        o_outcome := 'missing';
        RETURN;
    END IF;
    -- A call that was barred was made all the same: nobody priced it, so it has today's price.
    o_rates := coalesce(v_hold.rates, billing.price_of(p_project, v_hold.model), p_published);
    v_cost := p_costs[array_position(p_rates, o_rates)];
    IF v_cost IS NULL THEN
        o_outcome := 'priced';
        o_model := v_hold.model;
        RETURN;
    END IF;

    -- The cost is booked whole: a call that was made is paid, even if its hold is gone by now.
    v_is_late := v_hold.status <> 'open';
    INSERT INTO billing.cost_ledger (api_call_id, project_id, user_id, run_id, thread_id, message_id, model, tokens_in,
            cached_tokens, cache_write_tokens, tokens_out, thinking_tokens, cost_nano, reported_nano, estimated,
            above_hold, late, day)
        VALUES (p_id, p_project, v_hold.user_id, v_hold.run_id, v_hold.thread_id, v_hold.message_id, v_hold.model,
            p_input, p_cached, p_cache_write, p_output, p_thinking, v_cost, p_reported, p_estimated,
            v_cost > v_hold.amount_nano, v_is_late, v_hold.day)
        ON CONFLICT DO NOTHING RETURNING * INTO o_entry;
    IF NOT FOUND THEN  -- another project's call, whose hold is gone
        o_outcome := 'reused';
        RETURN;
    END IF;
    PERFORM billing.lock_accounts(p_project, v_hold.user_id, v_hold.day);
    PERFORM billing.move(p_project, v_hold.user_id, v_hold.day,
        CASE WHEN v_is_late THEN 0 ELSE -v_hold.amount_nano END, v_cost);
    UPDATE billing.holds SET status = 'settled', closed_at = clock_timestamp() WHERE api_call_id = p_id;
    o_outcome := 'booked';
END $$
"""

# The status afterwards; nothing where the id stands for another call.
RELEASE = """
CREATE FUNCTION billing.release_call(
    p_id uuid, p_project uuid, p_user text, p_run uuid, p_thread uuid, p_message uuid, p_model text, p_credits bigint
) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_hold billing.holds;
    v_entry billing.cost_ledger;
BEGIN
    PERFORM billing.enter_project(p_project);
    SELECT * INTO v_hold FROM billing.holds WHERE api_call_id = p_id AND project_id = p_project FOR UPDATE;
    IF NOT FOUND THEN
        SELECT * INTO v_entry FROM billing.cost_ledger WHERE api_call_id = p_id AND project_id = p_project;
        IF FOUND THEN  -- settled and removed
            RETURN CASE WHEN (v_entry.user_id, v_entry.run_id, v_entry.thread_id, v_entry.message_id, v_entry.model)
                = (p_user, p_run, p_thread, p_message, p_model) THEN 'settled' END;
        END IF;
        INSERT INTO billing.holds (api_call_id, project_id, user_id, run_id, thread_id, message_id, model, input_max,
                output_max, output_min, output_granted, amount_nano, credits_per_usd, status, day, expires_at,
                closed_at)
            VALUES (p_id, p_project, p_user, p_run, p_thread, p_message, p_model, 0, 0, 0, 0, 0,
                coalesce((SELECT credits_per_usd FROM billing.project_terms WHERE project_id = p_project), p_credits),
                'released', (clock_timestamp() AT TIME ZONE 'UTC')::date, clock_timestamp(), clock_timestamp())
            ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN 'released';
        END IF;
        SELECT * INTO v_hold FROM billing.holds WHERE api_call_id = p_id AND project_id = p_project FOR UPDATE;
    END IF;
    -- No row: another project's call, which this one must not see.
    IF v_hold.api_call_id IS NULL OR (v_hold.user_id, v_hold.run_id, v_hold.thread_id, v_hold.message_id, v_hold.model)
            <> (p_user, p_run, p_thread, p_message, p_model) THEN
        RETURN NULL;
    END IF;
    IF v_hold.status <> 'open' THEN
        RETURN v_hold.status;
    END IF;
    PERFORM billing.lock_accounts(p_project, v_hold.user_id, v_hold.day);
    PERFORM billing.move(p_project, v_hold.user_id, v_hold.day, -v_hold.amount_nano, 0);
    UPDATE billing.holds SET status = 'released', closed_at = clock_timestamp() WHERE api_call_id = p_id;
    RETURN 'released';
END $$
"""

FUNCTIONS = {
    "enter_project": ENTER,
    "price_of": PRICE,
    "lock_accounts": LOCK,
    "move": MOVE,
    "place_hold": PLACE,
    "settle_call": SETTLE,
    "release_call": RELEASE,
}


def upgrade() -> None:
    for name, body in FUNCTIONS.items():
        op.get_bind().exec_driver_sql(body)
        op.execute(f"REVOKE ALL ON FUNCTION billing.{name} FROM PUBLIC")
        op.execute(f"GRANT EXECUTE ON FUNCTION billing.{name} TO {REQUEST}")
