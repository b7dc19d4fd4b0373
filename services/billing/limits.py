"""The numbers this service lives by. Each has a unit in its name and its reason beside it."""

# --- what a caller may send
MODEL_CHARS = 200  # longest model slug met in the wild is under 100
TIERS_MAX = 10  # published lists have at most two

# --- pages
PAGE, PAGE_MAX = 50, 200

# --- holds (durability.md 26)
HOLD_SECONDS = 3600.0  # a backstop: longer than any call may take
WINDOW_SECONDS = 60.0  # the rate limit is per minute (R134)

# --- upkeep
SWEEP_SECONDS = 30.0
SWEEP_HOLDS = 500  # freed in one round at most, so that a round ends
RECONCILE_SECONDS = 300.0  # it reads the whole ledger

# --- Postgres
CONNECT_SECONDS = 5
STATEMENT_MS = 10_000
# Reads every row; nobody waits for it.
RECONCILE_MS = 120_000
IDLE_IN_TRANSACTION_MS = 5_000
POOL_TIMEOUT_SECONDS = 5.0
GRACE_SECONDS = 5.0  # calls under way at SIGTERM; each is one short transaction
