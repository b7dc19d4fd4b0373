"""Key pairs of an identity provider, their JWKS, and tokens they sign."""

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


@cache
def rsa_key(name: str = "", bits: int = 2048) -> rsa.RSAPrivateKey:
    """An RSA key; the same for the same name, since making one takes a moment."""
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@cache
def ec_key(name: str = "", curve: type[ec.EllipticCurve] = ec.SECP256R1) -> ec.EllipticCurvePrivateKey:
    """An EC key; the same for the same name."""
    return ec.generate_private_key(curve())


@dataclass(frozen=True)
class Signer:
    """A key pair under an id; None for a key without one."""

    key: PrivateKey
    kid: str | None

    @property
    def algorithm(self) -> str:
        """What it signs with by its type."""
        return "RS256" if isinstance(self.key, rsa.RSAPrivateKey) else "ES256"

    def jwk(self, **members: Any) -> dict[str, Any]:
        """The public key as a JWK; None takes a member away."""
        algorithm = RSAAlgorithm if isinstance(self.key, rsa.RSAPrivateKey) else ECAlgorithm
        found: dict[str, Any] = json.loads(algorithm.to_jwk(self.key.public_key()))  # type: ignore[arg-type]
        found.pop("key_ops", None)
        found |= {"kid": self.kid, "use": "sig", "alg": self.algorithm, **members}
        return {name: value for name, value in found.items() if value is not None}

    def private_jwk(self) -> dict[str, Any]:
        """The whole pair as a JWK, as nobody should publish it."""
        algorithm = RSAAlgorithm if isinstance(self.key, rsa.RSAPrivateKey) else ECAlgorithm
        return {**json.loads(algorithm.to_jwk(self.key)), "kid": self.kid}  # type: ignore[arg-type]

    def token(self, user: Any = "alice", headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """A user's token."""
        named = {} if self.kid is None else {"kid": self.kid}
        return jwt.encode({"sub": user, **claims}, self.key, self.algorithm, headers={**named, **(headers or {})})

    def encodings(self) -> dict[str, bytes]:
        """The public key in all the forms somebody may try as the secret of an HMAC."""
        public = self.key.public_key()
        found = {}
        forms = {"": serialization.PublicFormat.SubjectPublicKeyInfo}
        if isinstance(self.key, rsa.RSAPrivateKey):
            forms[" of PKCS 1"] = serialization.PublicFormat.PKCS1
        for name, form in forms.items():
            found["PEM" + name] = public.public_bytes(serialization.Encoding.PEM, form)
            found["DER" + name] = public.public_bytes(serialization.Encoding.DER, form)
        pem = found["PEM"]
        found |= {"PEM without its last line break": pem.rstrip(), "PEM with CRLF": pem.replace(b"\n", b"\r\n")}
        found["base64 of DER"] = base64.b64encode(found["DER"])
        for name, jwk in (("JWK", self.jwk()), ("bare JWK", self.jwk(kid=None, use=None, alg=None))):
            found[name] = json.dumps(jwk).encode()
            found[f"compact {name}"] = json.dumps(jwk, separators=(",", ":")).encode()
        found["JWKS"] = jwks(self)
        for member in ("n", "x"):
            if member in self.jwk():
                found[member] = self.jwk()[member].encode()
                found[f"bytes of {member}"] = base64.urlsafe_b64decode(self.jwk()[member] + "==")
        return found


def rsa_signer(kid: str | None = "r1", bits: int = 2048) -> Signer:
    """A signer with an RSA key of its own."""
    return Signer(rsa_key(kid or "", bits), kid)


def ec_signer(kid: str | None = "e1", curve: type[ec.EllipticCurve] = ec.SECP256R1) -> Signer:
    """A signer with an EC key of its own."""
    return Signer(ec_key(kid or "", curve), kid)


def jwks(*keys: Signer | dict[str, Any]) -> bytes:
    """The document with these keys."""
    return json.dumps({"keys": [key.jwk() if isinstance(key, Signer) else key for key in keys]}).encode()


def encoded(data: Any) -> str:
    """Bytes, or data as JSON, as a part of a token."""
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def hmac_token(secret: bytes, header: dict[str, Any], **claims: Any) -> str:
    """A token no library would make: signed with whatever bytes by HMAC-SHA256."""
    signed = f"{encoded(header)}.{encoded({'sub': 'alice', **claims})}"
    return f"{signed}.{encoded(hmac.new(secret, signed.encode(), hashlib.sha256).digest())}"
