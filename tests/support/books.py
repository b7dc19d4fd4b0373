"""What must be true of money at any time, as queries that find what breaks it.

They read both services' tables, as only a test may. What waits in the outbox is not in the
ledger yet: those calls are left out until billing has heard of them.
"""

from services.billing.upkeep import COMPARE

# The calls billing has heard the end of.
HEARD = """
    SELECT c.* FROM conversation.api_calls c
    WHERE c.status NOT IN ('started', 'sent') AND NOT EXISTS (SELECT FROM conversation.outbox o WHERE o.id = c.id)
"""
BREACHES: dict[str, str] = {
    "a call and its ledger row differ": f"""
        SELECT c.id, c.status, c.cost_nano, l.cost_nano, c.usage_source, l.estimated
        FROM ({HEARD}) c LEFT JOIN billing.cost_ledger l ON l.api_call_id = c.id
        WHERE c.cost_nano <> coalesce(l.cost_nano, 0)
            OR (c.usage_source = 'none') <> (l.api_call_id IS NULL)
            OR (l.api_call_id IS NOT NULL AND l.estimated <> (c.usage_source = 'estimated'))
            OR (l.api_call_id IS NOT NULL AND (c.tokens_in, c.tokens_out, c.thinking_tokens, c.cached_tokens,
                c.cache_write_tokens, c.model, c.run_id, c.thread_id, c.message_id, c.user_id, c.project_id)
                <> (l.tokens_in, l.tokens_out, l.thinking_tokens, l.cached_tokens,
                l.cache_write_tokens, l.model, l.run_id, l.thread_id, l.message_id, l.user_id, l.project_id))""",
    "a ledger row is of no call": """
        SELECT l.api_call_id FROM billing.cost_ledger l
        WHERE NOT EXISTS (SELECT FROM conversation.api_calls c WHERE c.id = l.api_call_id)""",
    # One that expired has freed its money, and a release of it changes nothing (decision 0012).
    "a hold was left behind": f"""
        SELECT h.api_call_id, c.status FROM billing.holds h JOIN ({HEARD}) c ON c.id = h.api_call_id
        WHERE h.status = 'open'""",
    "a hold is settled and not booked, or the other way round": """
        SELECT h.api_call_id, h.status, l.api_call_id FROM billing.holds h
        LEFT JOIN billing.cost_ledger l USING (api_call_id)
        WHERE (h.status = 'settled') <> (l.api_call_id IS NOT NULL)""",
    "a message and its calls differ": """
        SELECT m.id, m.status, m.cost_nano, coalesce(sum(c.cost_nano), 0) FROM conversation.ai_messages m
        LEFT JOIN conversation.api_calls c ON c.message_id = m.id
        WHERE m.role = 'assistant' AND m.status <> 'streaming' GROUP BY m.id
        HAVING (m.cost_nano, m.tokens_in, m.tokens_out) <> (coalesce(sum(c.cost_nano), 0),
            coalesce(sum(c.tokens_in), 0), coalesce(sum(c.tokens_out), 0))""",
    "a thread and its calls differ": """
        SELECT t.id, t.cost_nano, coalesce(sum(c.cost_nano), 0) FROM conversation.ai_threads t
        LEFT JOIN conversation.api_calls c ON c.thread_id = t.id GROUP BY t.id
        HAVING (t.cost_nano, t.tokens_in, t.tokens_out) <> (coalesce(sum(c.cost_nano), 0),
            coalesce(sum(c.tokens_in), 0), coalesce(sum(c.tokens_out), 0))""",
    "a thread and its ledger rows differ": """
        SELECT t.id, t.cost_nano, coalesce(sum(l.cost_nano), 0) FROM conversation.ai_threads t
        LEFT JOIN billing.cost_ledger l ON l.thread_id = t.id
        WHERE NOT EXISTS (SELECT FROM conversation.outbox o JOIN conversation.api_calls c ON c.id = o.id
            WHERE c.thread_id = t.id)
        GROUP BY t.id HAVING t.cost_nano <> coalesce(sum(l.cost_nano), 0)""",
    "an account is not the sum of its holds and ledger rows": COMPARE,
    # But for what came late or cost more than its hold: that much is excused, and no more.
    "more was held and spent than a limit allows": """
        SELECT a.project_id, a.user_id, a.period, a.held_nano, a.spent_nano, s.limit_nano
        FROM billing.accounts a JOIN (
            SELECT project_id, '' AS user_id, period, limit_nano FROM billing.spend_caps
            UNION ALL SELECT project_id, user_id, period, limit_nano FROM billing.quotas WHERE user_id <> ''
        ) s USING (project_id, user_id, period)
        WHERE a.held_nano + a.spent_nano > s.limit_nano + coalesce((
            SELECT sum(CASE WHEN l.late THEN l.cost_nano ELSE greatest(l.cost_nano - coalesce(h.amount_nano, 0), 0) END)
            FROM billing.cost_ledger l LEFT JOIN billing.holds h USING (api_call_id)
            WHERE l.project_id = a.project_id AND a.user_id IN ('', l.user_id) AND (l.above_hold OR l.late)), 0)""",
}
WAITING = "SELECT count(*) FROM conversation.outbox"
