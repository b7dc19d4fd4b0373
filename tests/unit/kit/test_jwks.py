"""Which keys of a JWKS document may verify, and by which algorithm: the key's, whatever it says of itself."""

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.utils import to_base64url_uint

from kit.jwks import EXPONENT_BITS_MAX, KEYS_MAX, KID_CHARS, RSA_BITS_MAX, holds_private_key, read_jwks
from tests.support.signing import Signer, ec_signer, jwks, rsa_signer

RSA, EC = rsa_signer(), ec_signer()
BARE = {"kid": None, "use": None, "alg": None}


def algorithms(*keys: Signer | dict[str, Any]) -> list[str]:
    return [key.algorithm for key in read_jwks(jwks(*keys)).keys]


@pytest.mark.parametrize(
    "jwk",
    [
        RSA.jwk(),
        RSA.jwk(**BARE),
        RSA.jwk(key_ops=["verify"]),
        RSA.jwk(x5c=["anything"], x5t=7, more={"a": 1}),
        RSA.jwk(kid="k" * KID_CHARS),
        EC.jwk(),
        EC.jwk(**BARE),
    ],
)
def test_a_key_verifies_by_the_algorithm_of_its_type(jwk: dict[str, Any]) -> None:
    assert algorithms(jwk) == ["RS256" if jwk["kty"] == "RSA" else "ES256"]


@pytest.mark.parametrize(
    ("why", "jwk"),
    [
        ("encryption", RSA.jwk(use="enc")),
        ("another use", EC.jwk(use=7)),
        ("no verifying", RSA.jwk(key_ops=["encrypt"])),
        ("operations that are no list", RSA.jwk(key_ops="verify")),
        ("weak", rsa_signer("weak", 1024).jwk()),
        ("a bit too weak", rsa_signer("nearly", 2047).jwk()),
        ("another algorithm of RSA", RSA.jwk(alg="RS512")),
        ("an HMAC in disguise", RSA.jwk(alg="HS256")),
        ("none", EC.jwk(alg="none")),
        ("the other type's", EC.jwk(alg="RS256")),
        ("another curve", ec_signer("p384", ec.SECP384R1).jwk(alg=None)),
        ("another curve under a false name", ec_signer("p384", ec.SECP384R1).jwk(crv="P-256")),
        ("a curve of coins", ec_signer("k1", ec.SECP256K1).jwk(alg=None)),
        ("not on the curve", EC.jwk(y=EC.jwk()["x"])),
        ("a shared key", {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256", "kid": "o"}),
        ("Ed25519", {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}),
        ("a private key", RSA.private_jwk()),
        ("a private EC key", EC.private_jwk()),
        ("a kid that is no text", RSA.jwk(kid=7)),
        ("a kid without end", RSA.jwk(kid="k" * (KID_CHARS + 1))),
        ("no type", RSA.jwk(kty=None)),
        ("a type that is no text", RSA.jwk(kty=["RSA"])),
        ("no modulus", RSA.jwk(n=None)),
        ("a modulus that is no text", RSA.jwk(n=7)),
        ("a modulus that is no base64", RSA.jwk(n="ü")),
        ("an even exponent", RSA.jwk(e="BA")),
        ("an exponent of 1", RSA.jwk(e="AQ")),
        ("half a point", EC.jwk(y=None)),
    ],
)
def test_a_key_of_no_use_is_left_out(why: str, jwk: Any) -> None:
    assert algorithms(jwk, EC) == ["ES256"]


@pytest.mark.parametrize("odd", [7, None, "RSA", [], {}])
def test_what_is_no_key_is_left_out(odd: Any) -> None:
    assert len(read_jwks(json.dumps({"keys": [odd, RSA.jwk()]})).keys) == 1


def test_keys_that_keep_us_busy_are_left_out() -> None:
    numbers = RSA.key.public_key().public_numbers()
    assert isinstance(numbers, rsa.RSAPublicNumbers)

    def public(modulus: int, exponent: int) -> dict[str, Any]:
        return RSA.jwk(n=to_base64url_uint(modulus).decode(), e=to_base64url_uint(exponent).decode())

    largest = (1 << RSA_BITS_MAX) - 1
    assert algorithms(public(largest, 65537)) == ["RS256"]
    assert algorithms(public(largest * 2 + 1, 65537)) == []
    assert algorithms(public(1 << 100_000, 65537)) == []
    assert algorithms(public(numbers.n, (1 << EXPONENT_BITS_MAX) - 1)) == ["RS256"]
    assert algorithms(public(numbers.n, (1 << EXPONENT_BITS_MAX) + 1)) == []


def test_a_document_has_a_bounded_number_of_keys() -> None:
    assert len(algorithms(*[EC.jwk(kid=str(n)) for n in range(KEYS_MAX)], EC.jwk(use="enc"))) == KEYS_MAX
    with pytest.raises(ValueError, match=str(KEYS_MAX)):
        algorithms(*[EC.jwk(kid=str(n)) for n in range(KEYS_MAX + 1)])


def test_a_document_may_have_no_key() -> None:
    assert read_jwks('{"keys": []}').keys == ()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>",
        b"{",
        b"\xff\xfe",
        b"null",
        b"7",
        b"[]",
        b"{}",
        b'{"keys": {}}',
        b'{"keys": null}',
        b'{"keys": [' + b"[" * 100_000,
        "\ud800",
        json.dumps(RSA.jwk()).encode(),
        RSA.encodings()["PEM"],
    ],
)
def test_what_is_no_document_is_refused(raw: bytes | str) -> None:
    with pytest.raises(ValueError, match="it is not"):
        read_jwks(raw)


def test_a_token_means_the_key_it_names_or_those_of_its_algorithm() -> None:
    second = rsa_signer("r2")
    keys = read_jwks(jwks(RSA, second, EC, EC.jwk(kid=None), EC.jwk(kid="r1")))

    def meant(kid: str | None, algorithm: str) -> list[tuple[str | None, str]]:
        return [(key.kid, key.algorithm) for key in keys.candidates(kid, algorithm)]

    assert meant("r2", "RS256") == [("r2", "RS256")]
    assert meant("r2", "ES256") == [("r2", "RS256")]  # its key is of another type: to be told, not to be used
    assert meant("r1", "RS256") == [("r1", "RS256")]
    assert meant("r1", "ES256") == [("r1", "ES256")]
    assert meant("made-up", "RS256") == []
    assert meant("", "ES256") == []
    assert meant(None, "RS256") == [("r1", "RS256"), ("r2", "RS256")]
    assert len(meant(None, "ES256")) == 3


def test_private_and_shared_keys_are_found() -> None:
    assert not holds_private_key(jwks(RSA, EC))
    for secret in (RSA.private_jwk(), EC.private_jwk(), {"kty": "oct", "k": "c2VjcmV0"}):
        assert holds_private_key(jwks(RSA, secret))
