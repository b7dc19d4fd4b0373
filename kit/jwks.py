"""JWKS documents (RFC 7517): which of their keys may verify a user's token, and by which algorithm. Pure.

The algorithm of a key follows from the key: RS256 for RSA, ES256 for P-256. What a token
says about itself never chooses it, so no public key can end up as an HMAC secret.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from jwt import PyJWK
from jwt.exceptions import PyJWTError

RS256, ES256 = "RS256", "ES256"
ALGORITHMS = (RS256, ES256)
# NIST forbids less since 2014. More takes over a millisecond of the event loop for each token.
RSA_BITS, RSA_BITS_MAX = 2048, 8192
# Verifying takes as many steps as the exponent has bits; 65537 is what everybody uses.
EXPONENT_BITS_MAX = 32
# Providers have one to ten at a time; the bound keeps what one tenant can make us remember small.
KEYS_MAX = 32
# Of a key's id. Providers use thumbprints and UUIDs, under 100 characters.
KID_CHARS = 255
BASE64_CHARS_MAX = RSA_BITS_MAX // 6 + 4


@dataclass(frozen=True)
class VerifyingKey:
    """A public key. `algorithm` is the only one it verifies by."""

    kid: str | None
    algorithm: str
    key: PyJWK = field(repr=False, compare=False)


@dataclass(frozen=True)
class KeySet:
    """The keys of a document that may verify. There may be none: a provider can withdraw its last one."""

    keys: tuple[VerifyingKey, ...]

    def candidates(self, kid: str | None, algorithm: str) -> tuple[VerifyingKey, ...]:
        """The keys a token can mean: those of its `kid`, if it has one, else those of its algorithm.

        Of several keys with one `kid` the ones of the token's algorithm, if there are any.
        """
        fitting = tuple(key for key in self.keys if key.algorithm == algorithm and kid in (None, key.kid))
        return fitting or tuple(key for key in self.keys if kid is not None and key.kid == kid)


def read_jwks(raw: bytes | str) -> KeySet:
    """The keys of a document; those of no use here are left out. Raises ValueError, with what is wrong with it."""
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise ValueError("it is not JSON") from None
    found = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(found, list):
        raise ValueError("it is not a JSON object with a list `keys`")
    usable = tuple(key for key in map(_usable, found) if key is not None)
    if len(usable) > KEYS_MAX:
        raise ValueError(f"it holds more than {KEYS_MAX} keys for signatures")
    return KeySet(usable)


def holds_private_key(raw: bytes | str) -> bool:
    """Whether a document that `read_jwks` takes shows a private or a shared key, which nobody may be given."""
    keys = msgspec.json.decode(raw)["keys"]
    return any(isinstance(jwk, dict) and ("d" in jwk or "k" in jwk) for jwk in keys)


def _usable(jwk: Any) -> VerifyingKey | None:
    if not isinstance(jwk, dict) or "d" in jwk or jwk.get("use", "sig") != "sig":
        return None
    if not _may_verify(jwk.get("key_ops", ["verify"])):
        return None
    kid = jwk.get("kid")
    if kid is not None and not (isinstance(kid, str) and len(kid) <= KID_CHARS):
        return None
    match jwk:
        case {"kty": "RSA", "n": str(n), "e": str(e)} if max(len(n), len(e)) <= BASE64_CHARS_MAX:
            algorithm, public = RS256, {"kty": "RSA", "n": n, "e": e}
        case {"kty": "EC", "crv": "P-256", "x": str(x), "y": str(y)}:
            algorithm, public = ES256, {"kty": "EC", "crv": "P-256", "x": x, "y": y}
        case _:
            return None
    if jwk.get("alg", algorithm) != algorithm:
        return None
    key = _loaded(public, algorithm)
    return None if key is None else VerifyingKey(kid, algorithm, key)


def _may_verify(key_ops: Any) -> bool:
    return isinstance(key_ops, list) and "verify" in key_ops


def _loaded(public: Mapping[str, str], algorithm: str) -> PyJWK | None:
    """The key, if it is one and neither weak nor made to keep us busy."""
    try:
        key = PyJWK(dict(public), algorithm)
    except (PyJWTError, ValueError, TypeError):  # odd base64, a point that is not on the curve
        return None
    if algorithm == RS256:
        numbers = key.key.public_numbers()
        if not RSA_BITS <= key.key.key_size <= RSA_BITS_MAX or numbers.e.bit_length() > EXPONENT_BITS_MAX:
            return None
    return key
