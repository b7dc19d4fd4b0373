"""Secrets at rest: AES-256-GCM under a ring of keys.

The ring's first key seals and all of them open, so a key is replaced by putting another
before it. What is sealed is bound to where it belongs: elsewhere it does not open.
No error and no representation shows key material or what was sealed.
"""

import os
import re
from base64 import b64decode

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VERSION = 1
KEY_BYTES = 32
NONCE_BYTES = 12  # 96 bits, the size GCM is made for; random ones are safe for 2^32 seals under one key
TAG_BYTES = 16
UNSET = "-"
# Shorter than a key in base64, so that a key in the wrong place is never taken for an id and shown as one.
KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,32}")


class CannotOpenError(Exception):
    """Sealed bytes do not open: their key is not in the ring, or they are not what was sealed here."""


class KeyRing:
    """AES keys by id; the first one seals. An empty ring neither seals nor opens.

    Keeps the ciphers, not the keys they were made of.
    """

    def __init__(self, keys: dict[str, bytes]) -> None:
        self._ciphers = {id: AESGCM(key) for id, key in keys.items()}

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self._ciphers)})"

    def __bool__(self) -> bool:
        return bool(self._ciphers)

    @property
    def first_id(self) -> str:
        """The id of the key that seals; empty for an empty ring."""
        return next(iter(self._ciphers), "")

    @property
    def older_ids(self) -> list[str]:
        """The ids of the keys that only open."""
        return list(self._ciphers)[1:]

    def seal(self, secret: str, place: str) -> bytes:
        """The secret as bytes that only this ring opens, and only for the same `place`."""
        id = self.first_id
        if not id:
            raise ValueError("an empty ring seals nothing")
        header = bytes((VERSION, len(id))) + id.encode()
        nonce = os.urandom(NONCE_BYTES)
        return header + nonce + self._ciphers[id].encrypt(nonce, secret.encode(), header + place.encode())

    def open(self, sealed: bytes, place: str) -> str:
        """What was sealed; raises CannotOpenError."""
        header, nonce, ciphertext = _split(sealed)
        id = header[2:].decode("ascii", "replace")
        cipher = self._ciphers.get(id)
        if cipher is None:
            raise CannotOpenError("it was sealed under a key that is not in the ring")
        try:
            # The header is authenticated too: it cannot be made to name another version or key.
            return cipher.decrypt(nonce, ciphertext, header + place.encode()).decode()
        except InvalidTag:
            raise CannotOpenError("it was changed, belongs elsewhere, or its key has another's id") from None


def key_ring(raw: str) -> KeyRing:
    """The ring of `id:base64,…`, or an empty one for `-`. Raises ValueError that shows nothing of `raw`."""
    keys: dict[str, bytes] = {}
    if raw.strip() == UNSET:
        return KeyRing(keys)
    for number, entry in enumerate(raw.split(","), 1):
        id, colon, encoded = entry.strip().partition(":")
        if not colon:
            raise ValueError(f"entry {number} is not id:key")
        if not KEY_ID.fullmatch(id):
            raise ValueError(f"the id of entry {number} must be 1 to 32 of a-z, A-Z, 0-9, `.`, `_` and `-`")
        if id in keys:
            raise ValueError(f"the id of entry {number} is that of an earlier one")
        keys[id] = _decode(encoded, number)
    return KeyRing(keys)


def _decode(encoded: str, number: int) -> bytes:
    try:
        key = b64decode(encoded, validate=True)
    except ValueError:
        raise ValueError(f"the key of entry {number} is not base64") from None
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key of entry {number} has {len(key)} bytes instead of {KEY_BYTES}")
    return key


def _split(sealed: bytes) -> tuple[bytes, bytes, bytes]:
    """Header, nonce and ciphertext."""
    if len(sealed) < 2 or sealed[0] != VERSION:
        raise CannotOpenError("it is of a version this process does not know")
    nonce_at = 2 + sealed[1]
    ciphertext_at = nonce_at + NONCE_BYTES
    if len(sealed) < ciphertext_at + TAG_BYTES:
        raise CannotOpenError("it is cut short")
    return sealed[:nonce_at], sealed[nonce_at:ciphertext_at], sealed[ciphertext_at:]
