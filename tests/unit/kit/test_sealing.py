"""What is sealed opens with its ring at its place, and in no other way; nothing of a key is ever shown."""

import os
from base64 import b64encode

import pytest

from kit.sealing import CannotOpenError, KeyRing, key_ring
from kit.settings import SettingsError, load
from services.conversation.settings import Settings

K1, K2 = b"\x01" * 32, b"\x02" * 32
SECRET = "a provider's key"
PLACE = "table:project:provider"


def encoded(key: bytes) -> str:
    return b64encode(key).decode()


def test_what_is_sealed_opens_again() -> None:
    ring = KeyRing({"k1": K1})
    for secret in ("", "x", SECRET, "ü" * 4096):
        assert ring.open(ring.seal(secret, PLACE), PLACE) == secret


def test_no_two_seals_are_alike_and_none_shows_the_secret() -> None:
    ring = KeyRing({"k1": K1})
    seals = {ring.seal(SECRET, PLACE) for _ in range(1000)}
    assert len(seals) == 1000
    assert not any(SECRET.encode() in sealed for sealed in seals)


def test_a_seal_begins_with_its_version_and_the_id_of_its_key() -> None:
    sealed = KeyRing({"2026-11": K1}).seal(SECRET, PLACE)
    assert sealed[:9] == b"\x01\x072026-11"
    assert len(sealed) == 9 + 12 + len(SECRET) + 16


def test_every_single_changed_byte_is_noticed() -> None:
    ring = KeyRing({"k1": K1, "k2": K1, "k": K1, "": K1})  # one key for all: an id that is changed is found too
    sealed = ring.seal(SECRET, PLACE)
    for at in range(len(sealed)):
        for flip in (1, 2, 3, 0x80, 0xFF):
            changed = bytearray(sealed)
            changed[at] ^= flip
            with pytest.raises(CannotOpenError):
                ring.open(bytes(changed), PLACE)


def test_every_cut_and_every_longer_seal_is_noticed() -> None:
    ring = KeyRing({"k1": K1})
    sealed = ring.seal(SECRET, PLACE)
    for wrong in (*(sealed[:end] for end in range(len(sealed))), sealed + b"\0", sealed * 2):
        with pytest.raises(CannotOpenError):
            ring.open(wrong, PLACE)


def test_bytes_of_anybody_open_to_nothing() -> None:
    ring = KeyRing({"k1": K1})
    for size in range(300):
        for head in (b"", b"\x01", b"\x01\x02k1", b"\x01\xff"):
            with pytest.raises(CannotOpenError):
                ring.open(head + os.urandom(size), PLACE)


@pytest.mark.parametrize("place", ["", "table:project:other", "table:other:provider", PLACE + " ", PLACE[:-1]])
def test_a_seal_opens_at_no_other_place(place: str) -> None:
    ring = KeyRing({"k1": K1})
    with pytest.raises(CannotOpenError, match="belongs elsewhere"):
        ring.open(ring.seal(SECRET, PLACE), place)


def test_a_key_of_the_same_id_does_not_open_it() -> None:
    with pytest.raises(CannotOpenError, match="another's id"):
        KeyRing({"k1": K2}).open(KeyRing({"k1": K1}).seal(SECRET, PLACE), PLACE)


def test_the_first_key_seals_and_all_open() -> None:
    old, both, new = KeyRing({"k1": K1}), KeyRing({"k2": K2, "k1": K1}), KeyRing({"k2": K2})
    before, after = old.seal(SECRET, PLACE), both.seal(SECRET, PLACE)
    assert (both.first_id, both.older_ids) == ("k2", ["k1"])
    assert both.open(before, PLACE) == both.open(after, PLACE) == new.open(after, PLACE) == SECRET
    for ring, sealed in ((new, before), (old, after), (KeyRing({}), before)):
        with pytest.raises(CannotOpenError, match="not in the ring"):
            ring.open(sealed, PLACE)


def test_an_empty_ring_is_false_and_seals_nothing() -> None:
    ring = key_ring("-")
    assert (bool(ring), ring.first_id, ring.older_ids) == (False, "", [])
    with pytest.raises(ValueError, match="empty"):
        ring.seal(SECRET, PLACE)


def test_a_ring_is_read_in_its_order() -> None:
    ring = key_ring(f" b.2:{encoded(K2)} , A-1_:{encoded(K1)}")
    assert (bool(ring), ring.first_id, ring.older_ids) == (True, "b.2", ["A-1_"])
    assert KeyRing({"b.2": K2}).open(ring.seal(SECRET, PLACE), PLACE) == SECRET
    assert key_ring(f"{'i' * 32}:{encoded(K1)}").first_id == "i" * 32


BAD_RINGS = {
    "no id": (encoded(K1), "entry 1 is not id:key"),
    "an empty entry": (f"k1:{encoded(K1)},", "entry 2 is not id:key"),
    "an empty id": (f":{encoded(K1)}", "the id of entry 1 must be"),
    "a long id": (f"{'i' * 33}:{encoded(K1)}", "the id of entry 1 must be"),
    "a blank in an id": (f"k 1:{encoded(K1)}", "the id of entry 1 must be"),
    "an umlaut in an id": (f"kü:{encoded(K1)}", "the id of entry 1 must be"),
    "key and id swapped": (f"{encoded(K1)}:k1", "the id of entry 1 must be"),
    "an id twice": (f"k1:{encoded(K1)},k1:{encoded(K2)}", "the id of entry 2 is that of an earlier one"),
    "no key": ("k1:", "the key of entry 1 has 0 bytes"),
    "a short key": (f"k1:{encoded(K1[:-1])}", "the key of entry 1 has 31 bytes instead of 32"),
    "a long key": (f"k2:{encoded(K2)},k1:{encoded(K1 + b'x')}", "the key of entry 2 has 33 bytes instead of 32"),
    "hex": ("k1:" + K1.hex(), "the key of entry 1 has 48 bytes"),
    "no padding": (f"k1:{encoded(K1)[:-1]}", "the key of entry 1 is not base64"),
    "a letter base64 has not": (f"k1:{'ä' * 44}", "the key of entry 1 is not base64"),
    "a blank in a key": (f"k1:{encoded(K1)[:20]} {encoded(K1)[20:]}", "the key of entry 1 is not base64"),
}


@pytest.mark.parametrize("name", BAD_RINGS)
def test_a_bad_ring_is_refused_and_nothing_of_it_is_shown(name: str) -> None:
    raw, message = BAD_RINGS[name]
    required = dict.fromkeys(("CONVERSATION_DATABASE_URL", "CONVERSATION_ENGINE_DATABASE_URL"), "postgresql://x")
    with pytest.raises(SettingsError) as caught:
        load(Settings, required | {"THREADLOOM_SERVICE_CREDENTIAL": "x", "THREADLOOM_SECRET_KEYS": raw})
    assert f"THREADLOOM_SECRET_KEYS: its value is not usable: {message}" in str(caught.value)
    assert [key for key in (encoded(K1), encoded(K2), K1.hex(), "ä") if key[:10] in str(caught.value)] == []


def test_a_ring_shows_its_ids_and_no_key() -> None:
    ring = key_ring(f"k2:{encoded(K2)},k1:{encoded(K1)}")
    assert repr(ring) == str(ring) == f"{ring}" == "KeyRing(k2, k1)"
    everything = repr(vars(ring))
    assert encoded(K1) not in everything
    assert repr(K1)[2:-1] not in everything
