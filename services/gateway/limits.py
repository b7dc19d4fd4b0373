"""The gateway's limits. Each says its unit in its name and its reason beside it."""

from dataclasses import dataclass

# A message is 8 MiB at most (durability.md 31); what is longer is refused while it is read.
BODY_BYTES = 8 * 1024 * 1024
# A body that trickles in holds memory and a task: a slow phone needs seconds for 8 MiB, not minutes.
BODY_SECONDS = 60.0
# Request line and headers together. User tokens with many claims stay under 8 KiB, cookies of one
# domain under 20 KiB; the parser itself knows no bound.
HEAD_BYTES = 32 * 1024
# A connection that does not get its first headers together in this time is closed.
HEAD_SECONDS = 10.0
# More query parameters than any route knows; the bound keeps parsing cheap.
QUERY_PARAMETERS = 32
# Longer than the 60 s after which common load balancers drop an idle connection, so that they
# close it and never send a request into one that we just closed.
IDLE_CONNECTION_SECONDS = 75
# Waiting for connections that have nothing left to send, when the drain is over.
CLOSE_SECONDS = 2

# The ends of these keys are random; ours are far shorter, and nothing longer is worth a lookup.
PROJECT_KEY_CHARS = 256
# A revoked key works this much longer; a lookup per request would double the cost of small reads.
PROJECT_SECONDS = 10.0
# An unknown key is asked for again soon: the project may have been made a moment ago.
PROJECT_MISS_SECONDS = 2.0
# Projects remembered at once; guessed keys must not fill the memory.
PROJECT_ENTRIES = 10_000
# Clocks of an app's token service and ours differ by a few seconds.
TOKEN_LEEWAY_SECONDS = 5.0

# One fetch of a JWKS in all. Providers answer in a tenth of a second; users wait for the first one.
JWKS_SECONDS = 3.0
# Of a JWKS document: the largest in use, with certificate chains, are about 20 KB.
JWKS_BYTES = 256 * 1024
# How long keys are used whose answer says nothing of it, and the bounds of what it may say. A removed key is
# refused after this time, and a provider is asked once in it.
JWKS_FRESH_SECONDS = 300.0
JWKS_FRESH_SECONDS_MIN = 60.0
JWKS_FRESH_SECONDS_MAX = 600.0
# Fetched again from this share of that time on, in the background. What is left is longer than a fetch takes.
JWKS_REFRESH_SHARE = 0.8
# After a fetch that failed the next one waits this long: a provider that is down is not held down.
JWKS_RETRY_SECONDS = 5.0
# An unknown `kid` has the keys fetched at most this often, so that made-up ones make no flood of fetches.
JWKS_REFETCH_SECONDS = 10.0
# While a provider is away its known keys are used this long: an outage over night signs nobody out.
JWKS_STALE_SECONDS = 24 * 3600.0
# JWKS remembered at once: some kilobytes each, 100 KB for the worst.
JWKS_URLS = 2_000

# One try of a unary call. Reads take milliseconds; a frozen replica must not hold a user for long.
CALL_SECONDS = 5.0
# A start is several transactions on a database that may be slow, and a retry finds what it made.
START_CALL_SECONDS = 10.0
# A cancel waits up to 3 s for the run's end, a delete may have to do that twice.
ENDING_CALL_SECONDS = 10.0
# The probe behind /readyz, and how long its answer is good: probes come about once a second.
READY_CALL_SECONDS = 1.0
READY_SECONDS = 1.0

# Ledger entries read at once for an export: the most billing gives, about 60 KB of CSV.
EXPORT_PAGE = 200

# The longest Idempotency-Key (also the width of its column).
IDEMPOTENCY_KEY_CHARS = 255
# The widest request id we take over from a client or a proxy.
REQUEST_ID_CHARS = 128
# A path in the access log is cut here.
LOGGED_PATH_CHARS = 256

# A relay takes no new follows after this long, and ends with its last one: the server ends connections after 600 s,
# with a grace of 300 s, and a turn takes 120 s.
RELAY_SECONDS = 480.0
# What may wait for one reader; a slower one reads from the log again. A burst's merged batches fit many times.
BUFFER_BATCHES = 256
BUFFER_BYTES = 1024 * 1024

# Pause before following elsewhere: nothing at first, then doubling from the first to the last.
RETRY_FIRST_SECONDS = 0.05
RETRY_LAST_SECONDS = 1.0


@dataclass(frozen=True)
class Patience:
    """How long a stream waits for what. Seconds."""

    # Heartbeats come every 2 s: three missed ones mean a frozen replica (durability.md 16).
    silence: float = 6.0
    # A start is several transactions on a database that may be slow, and giving up on it undoes it.
    start_silence: float = 10.0
    # Without a word from any replica for this long the transfer is broken (durability.md 16).
    unreachable: float = 30.0
    # How long the response head waits for the provider's answer (durability.md 13).
    hold: float = 10.0
    # Proxies drop connections that are silent for 30 s and more; half of that is safe.
    keep_alive: float = 15.0
    # The conversation service's heartbeat. A keep-alive comment goes out with the last one that
    # comes before its time, so no timer is needed for it.
    heartbeat: float = 2.0
    # A reader that takes nothing for this long is gone or frozen; it can resume.
    reader_stall: float = 60.0
