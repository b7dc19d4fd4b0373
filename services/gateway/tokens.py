"""A user's token to its claims, once somebody is proven to have signed it who may.

Two may: the app, with the project's secret (HS256), and the project's identity provider,
with a key of its JWKS (RS256, ES256). The token's header only says which of the two to
try. The secret is tried with HS256 and nothing else, a public key with the one algorithm
of its type: so no public key is ever the secret of an HMAC.
"""

from typing import Any

import jwt
from jwt.exceptions import InvalidSubjectError

from kit.callers import is_user_id
from kit.errors import ServiceError, unauthenticated
from kit.jwks import ALGORITHMS, VerifyingKey
from services.gateway.jwks import JwksCache
from services.gateway.limits import TOKEN_LEEWAY_SECONDS
from services.gateway.projects import Identity, Project

HS256 = "HS256"

MALFORMED = "The token is not a well-formed JWT."
BAD_SUBJECT = "The token's claim `sub` must be the user's id: 1 to 255 printable characters, as a string."
NO_SUCH_KEY = "The token's `kid` names no key of the project's JWKS that may verify. Sign with a key that it lists."
NO_KEY_OF_TYPE = "The project's JWKS has no key that may verify {algorithm}. Sign with a key that it lists."
SEVERAL_KEYS = "Several keys of the project's JWKS fit. Give each a `kid` of its own, and name it in the token."
OTHER_TYPE = "The key that the token's `kid` names is for {right}, the token says {wrong}. Sign with {right}."
BAD_SECRET = "The token's signature does not fit the project's secret."
BAD_SIGNATURE = "The token's signature does not fit the key of the project's JWKS that it names."

# What PyJWT finds wrong, most special first, in words for the developer who reads the answer.
FAULTS: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, "The token has expired."),
    (jwt.ImmatureSignatureError, "The token is not valid yet: see its claim `nbf`."),
    (jwt.InvalidAudienceError, "The token's claim `aud` must be or hold the audience that the project expects."),
    (jwt.InvalidIssuerError, "The token's claim `iss` must be the issuer that the project expects."),
    (InvalidSubjectError, BAD_SUBJECT),
)
MISSING = {
    "sub": "The token has no claim `sub`, the user's id.",
    "aud": "The token has no claim `aud`: the project expects tokens for its own audience only.",
    "iss": "The token has no claim `iss`: the project expects tokens of one issuer only.",
}

# All that reading a hostile token can raise: PyJWT's own errors; ValueError and OverflowError from numbers
# such as 1e999 in a claim; TypeError from claims of odd types; RecursionError from JSON nested ten thousand deep.
READ_ERRORS = (jwt.PyJWTError, ValueError, OverflowError, TypeError, RecursionError)


class Tokens:
    """Verifies users' tokens."""

    def __init__(self, cache: JwksCache) -> None:
        self._cache = cache

    async def verified(self, token: str, project: Project) -> dict[str, Any]:
        """The claims of a project's user's token; `sub` is a user id.

        Raises UNAUTHENTICATED; UNAVAILABLE when the keys it must be verified with cannot be had.
        """
        identity, header = project.identity, _header(token)
        accepted, algorithm = _accepted(identity), header.get("alg")
        if algorithm not in accepted:
            *others, last = accepted
            names = f"{', '.join(others)} or {last}" if others else last
            raise unauthenticated(f"The token must be signed with {names}.")
        if algorithm == HS256 or identity is None:
            return _claims(token, project.jwt_secret, HS256, None, BAD_SECRET)
        key = await self._key(identity, header.get("kid"), algorithm)
        return _claims(token, key.key, key.algorithm, identity, BAD_SIGNATURE)

    async def _key(self, identity: Identity, kid: str | None, algorithm: str) -> VerifyingKey:
        """The key that a token means."""
        url = identity.jwks_url
        keys = identity.keys if url is None else await self._cache.keys(url)
        found = keys.candidates(kid, algorithm)
        if not found and url is not None:
            found = (await self._cache.again(url, keys)).candidates(kid, algorithm)
        if not found:
            raise unauthenticated(NO_KEY_OF_TYPE.format(algorithm=algorithm) if kid is None else NO_SUCH_KEY)
        if found[0].algorithm != algorithm:
            raise unauthenticated(OTHER_TYPE.format(right=found[0].algorithm, wrong=algorithm))
        if len(found) > 1:
            raise unauthenticated(SEVERAL_KEYS)
        return found[0]


def unverified(token: str) -> dict[str, Any]:
    """The claims as they stand, only to learn which project is to verify them. Raises UNAUTHENTICATED."""
    try:
        return jwt.decode(token, options={"verify_signature": False})
    except READ_ERRORS:
        raise unauthenticated(MALFORMED) from None


def _accepted(identity: Identity | None) -> tuple[str, ...]:
    """The algorithms a project takes."""
    if identity is None:
        return (HS256,)
    return ALGORITHMS if identity.refuses_hs256 else (HS256, *ALGORITHMS)


def _header(token: str) -> dict[str, Any]:
    try:
        return jwt.get_unverified_header(token)
    except READ_ERRORS:
        raise unauthenticated(MALFORMED) from None


def _claims(
    token: str, key: str | jwt.PyJWK, algorithm: str, identity: Identity | None, bad_signature: str
) -> dict[str, Any]:
    """The claims, verified with this key by this one algorithm.

    Issuer and audience are the identity's, where it names them: a provider signs for many. Apps put what they like
    into theirs. `iat` is no reason to refuse: RFC 7519 gives it no such meaning.
    """
    issuer = identity.issuer if identity is not None and identity.issuer else None
    audience = identity.audience if identity is not None and identity.audience else None
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            leeway=TOKEN_LEEWAY_SECONDS,
            issuer=issuer,
            audience=audience,
            options={
                "require": ["sub"],
                "verify_aud": audience is not None,
                "verify_iss": issuer is not None,
                "verify_iat": False,
            },
        )
    except READ_ERRORS as error:
        raise _refusal(error, bad_signature) from None
    user = claims["sub"]
    if not isinstance(user, str) or not is_user_id(user):
        raise unauthenticated(BAD_SUBJECT)
    return claims


def _refusal(error: Exception, bad_signature: str) -> ServiceError:
    if isinstance(error, jwt.InvalidSignatureError):
        return unauthenticated(bad_signature)
    if isinstance(error, jwt.MissingRequiredClaimError):
        return unauthenticated(MISSING.get(error.claim, MALFORMED))
    return unauthenticated(next((sentence for kind, sentence in FAULTS if isinstance(error, kind)), MALFORMED))
