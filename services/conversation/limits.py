"""The numbers this service lives by. Each has a unit in its name and its reason beside it."""

# --- what a caller may send (durability.md 31, R122)
TEXT_CHARS = 200_000  # over all parts of a message, and of a system prompt; code points
MESSAGE_PARTS = 50
TITLE_CHARS = 200  # a title somebody types; a derived one is cut at 80 (R127)
DERIVED_TITLE_CHARS = 80
MODEL_CHARS = 200  # longest model slug met in the wild is under 100
REQUEST_ID_CHARS = 255  # an Idempotency-Key; longer ones are mistakes
FALLBACK_MODELS = 5  # each costs a user the time of a failed attempt
EFFORT_CHARS = 32  # a word such as `medium`
API_KEY_CHARS_MIN = 8  # a shorter one is a mistake, and could not be told from a word in a provider's error
API_KEY_CHARS = 4096  # bearer tokens of clouds reach 2,000
IDENTITY_CLAIM_CHARS = 500  # an issuer is a URL, an audience a URL or a client id
JWKS_BYTES = 16 * 1024  # some thirty RSA keys; a gateway remembers the documents of thousands of projects
OUTPUT_TOKENS_MAX = 1_000_000  # above any model's; catches milliseconds put in the wrong field

# --- the queue of a thread (durability.md 22)
QUEUED_RUNS = 10  # more waiting messages are a client that does not look at the answers

# --- runs that end without followers (durability.md 20)
CANCEL_AFTER_SECONDS_MIN, CANCEL_AFTER_SECONDS_MAX = 1.0, 3600.0  # a reload takes a second; holds live an hour
WATCH_SECONDS = 1.0  # how often a process says whom it serves
# Longer than a gateway takes to leave a replica that fell silent (6 s), and to be counted at another (1 s).
WATCH_LEASE_SECONDS = 8.0
WATCH_SLACK_SECONDS = 1.5  # after a follower left: within it every other process says whether it has one
WATCH_STEADY_SECONDS = 3.0  # after an outage of the database nobody is taken for gone before so long

# --- pages
LIST_BYTES = 8 * 1024 * 1024  # a page ends here, whatever its size in entries: half of what a gRPC message takes
THREADS_PAGE, THREADS_PAGE_MAX = 20, 100
MESSAGES_PAGE, MESSAGES_PAGE_MAX = 50, 200
TRACES_PAGE, TRACES_PAGE_MAX = 100, 500

# --- ownership (durability.md 7 to 9)
LEASE_SECONDS = 5.0
RENEWAL_SECONDS = 0.5
TAKEOVERS_MAX = 3  # the third takeover ends the run: something in it kills its owners
ADOPT_AFTER_SECONDS = 5.0  # a run of ours that we do not know: its start's answer was lost

# --- the journal (durability.md 3)
BATCH_RUNS = 64
BATCH_BYTES = 256 * 1024
EVENT_TEXT_CHARS = 32 * 1024  # longer deltas are cut: a row must fit a batch even at 4 bytes a character
YIELD_PENDING_BYTES = 4 * 1024  # a reader lets the lane run once this much waits
STOP_PENDING_BYTES = 1024 * 1024  # a reader stops reading the provider once this much waits
GATHER_RUNS = 20  # from so many active runs on a batch gathers; with fewer, a commit each costs less than the wait
GATHER_SECONDS = 0.005  # half the cost of a token; 2 ms brings half of that, 10 ms nothing more
BUSY_PAUSE_SECONDS = 0.005  # a run whose row is locked is tried again after this
RECONNECT_PAUSE_SECONDS = 0.1  # first pause when Postgres is away; doubled up to the next line
RECONNECT_PAUSE_MAX_SECONDS = 1.0
FIRST_DELTA_WAIT_SECONDS = 0.002  # reply_started waits this long so that both share one commit
SNAPSHOT_SECONDS = 1.0  # a message's text at rest is at most this old (R108)

# --- following (durability.md 16)
HEARTBEAT_SECONDS = 2.0
FEED_BATCHES = 64  # a follower further behind reads from Postgres instead
PAGE_EVENTS = 250  # events read at once on replay; 32 MiB in the worst case
PAGE_BYTES = 1024 * 1024  # an event batch on the wire (durability.md 31)
PUBLISH_BYTES = 256 * 1024  # above it only the seq is published: NATS takes 1 MiB (durability.md 29)

# --- the relay (durability.md 33)
RELAY_FOLLOWS = 10_000  # on one stream; as many as a server takes calls
RELAY_WAITING_BYTES = 4 * 1024 * 1024  # a gateway that does not read: follows wait from here on, one batch each
RELAY_MESSAGE_BYTES = 2 * 1024 * 1024  # a message is closed once it is so large; gRPC takes 16 MiB

# --- the provider
ATTEMPTS_PER_TURN = 3  # one retry budget a turn, whatever fails
RETRY_DELAY_SECONDS = 0.5  # doubled each time, unless the provider says how long
RETRY_DELAY_MAX_SECONDS = 10.0  # a provider that asks for more is not waited for
ERROR_CHARS = 500  # of a provider's own words
ANSWER_BYTES = 8 * 1024 * 1024  # reply and thinking of a run (durability.md 31); a model that passes it is stuck
PROVIDER_KEY_CACHE_SECONDS = 5.0  # a key that was removed or changed is used at most this much longer
PROVIDER_KEYS_CACHED = 10_000  # projects whose keys a process remembers; about 5 MB
LINE_BYTES = 8 * 1024 * 1024  # of a provider's stream; chunks are a few hundred bytes

TIMER_SLACK_SECONDS = 0.01  # an event loop's timer may fire a moment early

# --- money (durability.md 26, 27)
HOLD_WAIT_SECONDS = 5.0  # billing restarts within about two; longer than this a user should hear of it
BILLING_SECONDS = 2.0  # one try; billing answers in milliseconds
BILLING_PAUSE_SECONDS = 0.1
OUTBOX_ROWS = 32  # sent at a time; billing queues them at the project's accounts anyway
OUTBOX_LEASE_SECONDS = 10.0  # longer than any send takes, so that no other process sends a row meanwhile
# All sends of a round end so long after it began, whatever number of replicas each tries for BILLING_SECONDS: before
# the lease does, which begins later. The rest is for writing down what was received; a row whose lease ends before
# that, or that a turn cannot wait for, is sent twice, which does no harm.
OUTBOX_SEND_SECONDS = 8.0
OUTBOX_POLL_SECONDS = 1.0  # also until a row is sent again that found billing away: its return is noticed so soon
OUTBOX_PAUSE_SECONDS = 0.5  # after the first refusal; doubled so many times at most: to 64 s
OUTBOX_DOUBLINGS = 7
OUTBOX_LOOK_SECONDS = 5.0  # how old the gauges are at most; monitoring asks every 15 s or so
OUTBOX_DRAIN_SECONDS = 3.0  # at the end of a process: enough for thousands of rows, or for a restart of billing

# --- context (R92; the window of a model nobody described)
CONTEXT_TOKENS = 100_000
CHARS_PER_TOKEN = 4

# --- housekeeping
IDEMPOTENCY_KEPT_SECONDS = 48 * 3600
TICKET_SECONDS = 60
SWEEP_SECONDS = 30.0
SWEEP_RUNS = 200  # logs trimmed in one statement
SWEEP_PROVIDER_KEYS = 500  # sealed again in one round, a commit each: about a second
DEAD_WORKERS_KEPT_SECONDS = 24 * 3600

# --- Postgres sessions of an owner (durability.md 8)
IDLE_IN_TRANSACTION_MS = 3_000
STATEMENT_MS = 5_000
# The idle timeout does not see a process frozen in mid-pipeline; this one bounds what it locks (PostgreSQL 17).
TRANSACTION_MS = 6_000
TCP_USER_TIMEOUT_MS = 5_000
CONNECT_SECONDS = 3
POOL_TIMEOUT_SECONDS = 3.0
ANSWER_SECONDS = 7.0  # a statement or transaction that answers later will never: Postgres ends both before
# A peer that vanished with nothing in flight is noticed after idle + count * interval seconds.
KEEPALIVES_IDLE_SECONDS, KEEPALIVES_INTERVAL_SECONDS, KEEPALIVES_COUNT = 5, 2, 2

# --- webhooks
WEBHOOKS = 10  # of a project: one for each of its systems; each event costs a row for each
WEBHOOK_SECONDS = 10.0  # a try in all; a receiver is to take note, and work afterwards
WEBHOOK_ANSWER_BYTES = 64 * 1024  # read so that the connection can be used again; none of it is kept
WEBHOOK_LEASE_SECONDS = 30.0  # longer than a try and writing down how it ended
WEBHOOK_PARALLEL = 4  # tries at a time to one webhook, of one process; one that failed last gets one at a time
WEBHOOK_PROJECT_TRIES = 8  # at a time of one project, of one process: whoever's receivers hang holds an eighth of all
WEBHOOK_TRIES_OPEN = 64  # of one process: each holds a socket, none a database connection
WEBHOOK_POLL_SECONDS = 1.0  # how late an event is at most whose run ended in another process, or that is tried again
# Between two looks for what is due at least: 20 a second however many runs end, and 80 events to a webhook.
WEBHOOK_GAP_SECONDS = 0.05
# After so many failures in a row a webhook rests before its next try, whichever delivery that is: a dead receiver
# with a backlog costs a try a minute, and one that is back gets the rest a minute later at most.
WEBHOOK_REST_SECONDS, WEBHOOK_REST_MAX_SECONDS = 1.0, 60.0  # the first, doubled with each further failure
WEBHOOKS_REMEMBERED = 1000  # that failed last, by a process; who is forgotten is tried as if it were well
WEBHOOK_DRAIN_SECONDS = 1.5  # at the end of a process; a try that takes longer is broken off and made by another
# Before each further try: a blip costs seconds, a deploy minutes, an outage at a weekend is outlived (75 h in all).
WEBHOOK_PAUSES = (5.0, 60.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
WEBHOOK_RETRY_AFTER_MAX = 24 * 3600.0  # a receiver may ask for a longer pause, up to the longest of ours
WEBHOOK_DELIVERED_KEPT_SECONDS = 7 * 24 * 3600.0  # to look up what happened last week
WEBHOOK_KEPT_SECONDS = 30 * 24 * 3600.0  # given up, or waiting for a webhook that is disabled
SWEEP_DELIVERIES = 20_000  # removed of each kind in one round: 660 a second, in a statement of a third of a second
WEBHOOK_SECRET_BYTES = 32  # as many as the hash of the signature has
DELIVERIES_PAGE, DELIVERIES_PAGE_MAX = 50, 100
SWEEP_WEBHOOKS = 500  # secrets sealed again in one round
