"""What a project may set as its identity, and its form on the wire."""

from kit.errors import invalid
from kit.jwks import RSA_BITS, holds_private_key, read_jwks
from kit.outbound import AllowedHosts, check_url
from services.conversation import limits
from services.conversation.domain.checks import check_word, too_large
from services.conversation.store.identities import Identity
from threadloom.conversation.v1 import project_service_pb2 as api

NO_KEYS = "Send either jwks_url, the address of the identity provider's JWKS, or jwks, the document itself."
NO_USABLE_KEY = (
    f"jwks holds no key that can verify a token: needed is a public RSA key of at least {RSA_BITS:,} bits or one of "
    "the curve P-256, not marked for encryption or for another algorithm than RS256 or ES256."
)
PRIVATE_KEY = "jwks holds a private or shared key. Send public keys only, and replace the one that was sent."


def check_identity(given: api.Identity, allowed: AllowedHosts) -> Identity:
    """What is kept of an identity that was sent. Raises INVALID_OPTIONS or CONTENT_TOO_LARGE.

    Where a URL's host lies is looked up when it is fetched, by who fetches it.
    """
    url: str | None = None
    jwks: str | None = None
    match given.WhichOneof("keys"):
        case "jwks_url":
            check_url(given.jwks_url, allowed, "jwks_url")
            url = given.jwks_url
        case "jwks":
            jwks = _check_jwks(given.jwks)
        case _:
            raise invalid("jwks_url", NO_KEYS)
    issuer = check_word("issuer", given.issuer, limits.IDENTITY_CLAIM_CHARS)
    audience = check_word("audience", given.audience, limits.IDENTITY_CLAIM_CHARS)
    return Identity(url, jwks, issuer, audience, given.refuses_hs256)


def _check_jwks(document: str) -> str:
    if len(document.encode()) > limits.JWKS_BYTES:
        message = f"jwks is larger than {limits.JWKS_BYTES:,} bytes. Leave out what is no key, such as `x5c`."
        raise too_large("jwks", message, limits.JWKS_BYTES, "bytes")
    if "\0" in document:
        raise invalid("jwks", "jwks holds the control character U+0000, which is not taken.")
    try:
        keys = read_jwks(document)
    except ValueError as error:
        raise invalid("jwks", f"jwks is no JWKS document: {error}.") from None
    if holds_private_key(document):
        raise invalid("jwks", PRIVATE_KEY)
    if not keys.keys:
        raise invalid("jwks", NO_USABLE_KEY)
    return document
