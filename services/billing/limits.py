"""The numbers this service lives by. Each has a unit in its name and its reason beside it."""

# --- what a caller may send
MODEL_CHARS = 200  # longest model slug met in the wild is under 100
TIERS_MAX = 10  # published lists have at most two
RUNS_PER_MINUTE_MAX = 10**6  # says "no limit": holds of one user queue, and never pass so fast

# --- pages
PAGE, PAGE_MAX = 50, 200

# --- holds (durability.md 26)
HOLD_SECONDS = 3600.0  # a backstop: longer than any call may take
WINDOW_SECONDS = 60.0  # the rate limit is per minute (R134)
PLACE_TRIES = 3  # decisions by sums that others may change meanwhile; after them, one under the lock
SETTLE_TRIES = 4  # a barred call's price may be set between two
LOCKED_TRIES = 5  # under the lock only a limit can change, by an admin's hand

# --- guesses (store/guesses.py): wrong or forgotten, they cost a round trip
PRICES_GUESSED = 10_000  # projects times models; some 200 bytes each
RATES_KNOWN = 1024  # parsed price lists
RATES_GUESSED = 16  # a settle sends what it would cost by each, 100 bytes of rates

# --- upkeep
SWEEP_SECONDS = 30.0
SWEEP_HOLDS = 500  # freed in one round at most, so that a round ends
# The ledger answers for a settled call for ever. Its hold only tells that the run was counted: longer than a run
# goes on that waits for one approval after the other, a day each.
SETTLED_HOLDS_KEPT_SECONDS = 7 * 24 * 3600.0
# Of a call that was not booked nothing else is known. Longer than any outbox is down, so that a settle still finds
# what to book by, and than a PlaceHold is on its way.
UNBOOKED_HOLDS_KEPT_SECONDS = 35 * 24 * 3600.0
REMOVED_HOLDS = 500  # in one statement, which is short then
REMOVALS = 20  # statements a round and state: 333 holds a second
RECONCILE_SECONDS = 300.0  # it reads the whole ledger

# --- Postgres
CONNECT_SECONDS = 5
STATEMENT_MS = 10_000
# Reads every row; nobody waits for it.
RECONCILE_MS = 120_000
IDLE_IN_TRANSACTION_MS = 5_000
POOL_TIMEOUT_SECONDS = 5.0
RECONNECT_PAUSE_MAX_SECONDS = 1.0  # between tries to reach Postgres, which else double up to minutes
KEPT_CONNECTIONS = 4  # open when nothing happens, so that a burst need not begin with sign-ins
READ_CONNECTIONS = 4  # for admins and who asks what was spent, beside those that move money
GRACE_SECONDS = 5.0  # calls under way at SIGTERM; each is one short transaction
