"""The statuses of a hold. What a settle or a release makes of them is decided under its lock, in migration 0002."""

OPEN, SETTLED, RELEASED, EXPIRED = "open", "settled", "released", "expired"
