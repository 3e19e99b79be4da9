"""Credentials of NATS: who one is (a signed token) and the key that proves it; and how an operator signs them.

The tokens are JSON web tokens in the form that NATS servers check by themselves (operator, account, user), so a new
node needs no change of a server's configuration.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from dsec.cluster.engine.layout import Rights
from dsec.core.errors import InvalidArgumentError
from dsec.wire.codec import from_json, to_json

# First bytes of public keys, which make the first letter of their text, and of seeds.
_KINDS: Final = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
_SEED: Final = 18 << 3
_BLOCK: Final = re.compile(r"-----BEGIN ([A-Z ]+)-----\s*(\S+)\s*------?END \1-----")


class SigningKey:
    """An Ed25519 key in NATS' notation."""

    def __init__(self, kind: str, private: Ed25519PrivateKey) -> None:
        self.kind = kind
        self._private = private

    @classmethod
    def generate(cls, kind: str) -> SigningKey:
        return cls(kind, Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: str) -> SigningKey:
        """Raises InvalidArgumentError."""
        try:
            raw = base64.b32decode(seed.strip() + "=" * (-len(seed.strip()) % 8))
        except ValueError as error:
            raise InvalidArgumentError("this is not a seed of NATS") from error
        body, check = raw[:-2], raw[-2:]
        first = ((body[0] & 7) << 5) | ((body[1] & 248) >> 3) if len(body) == 34 else -1
        kind = next((name for name, prefix in _KINDS.items() if prefix == first), None)
        if kind is None or body[0] & 248 != _SEED or _crc16(body).to_bytes(2, "little") != check:
            raise InvalidArgumentError("this is not a seed of NATS")
        return cls(kind, Ed25519PrivateKey.from_private_bytes(body[2:]))

    @property
    def public(self) -> str:
        raw = self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return _encode(bytes((_KINDS[self.kind],)) + raw)

    @property
    def seed(self) -> str:
        raw = self._private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        prefix = _KINDS[self.kind]
        return _encode(bytes((_SEED | (prefix >> 5), (prefix & 31) << 3)) + raw)

    def sign(self, data: bytes) -> bytes:
        return self._private.sign(data)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows: a token, and that it has the key of it."""

    jwt: str
    key: SigningKey

    @classmethod
    def parse(cls, text: str) -> Credentials:
        """The content of a .creds file. Raises InvalidArgumentError."""
        blocks = {found[1]: found[2] for found in _BLOCK.finditer(text)}
        try:
            return cls(blocks["NATS USER JWT"], SigningKey.from_seed(blocks["USER NKEY SEED"]))
        except KeyError as error:
            raise InvalidArgumentError(
                "these are not credentials of NATS: a .creds file has a token and a seed"
            ) from error

    def text(self) -> str:
        return (
            f"-----BEGIN NATS USER JWT-----\n{self.jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{self.key.seed}\n------END USER NKEY SEED------\n"
        )

    def token(self) -> bytes:
        return self.jwt.encode()

    def sign(self, nonce: str) -> bytes:
        return base64.b64encode(self.key.sign(nonce.encode()))

    @property
    def expires_at(self) -> float | None:
        claims = from_json(_unbase64(self.jwt.split(".")[1]), dict[str, Any])
        return float(claims["exp"]) if "exp" in claims else None


class Shown(Protocol):
    """What shows a client: its credentials, as they are at each connection."""

    def token(self) -> bytes: ...

    def sign(self, nonce: str) -> bytes: ...


def operator_jwt(operator: SigningKey, name: str, *, system_account: str) -> str:
    return _sign(operator, operator.public, name, {"type": "operator", "system_account": system_account})


def account_jwt(
    operator: SigningKey,
    account: SigningKey,
    name: str,
    *,
    jetstream: bool,
    revoked: Mapping[str, int] | None = None,
) -> str:
    """`revoked`: public keys of users, and up to when what was issued to them is void."""
    limits: dict[str, Any] = {"subs": -1, "data": -1, "payload": -1, "imports": 0, "exports": 0, "wildcards": False}
    limits |= {"conn": -1, "leaf": 0}
    if jetstream:
        limits |= {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    claims: dict[str, Any] = {"type": "account", "limits": limits}
    if revoked:
        claims["revocations"] = dict(revoked)
    return _sign(operator, account.public, name, claims)


def user_credentials(account: SigningKey, name: str, rights: Rights, *, expires_at: float | None = None) -> Credentials:
    user = SigningKey.generate("user")
    claims: dict[str, Any] = {
        "type": "user",
        "pub": {"allow": list(rights.publish)},
        "sub": {"allow": list(rights.subscribe)},
        "subs": rights.subscriptions_max,
        "data": -1,
        "payload": rights.message_bytes_max,
    }
    if rights.plain:
        claims["allowed_connection_types"] = ["STANDARD"]
    return Credentials(_sign(account, user.public, name, claims, expires_at=expires_at), user)


def _sign(
    issuer: SigningKey, subject: str, name: str, claims: Mapping[str, Any], *, expires_at: float | None = None
) -> str:
    body: dict[str, Any] = {"iat": int(time.time()), "iss": issuer.public, "name": name, "sub": subject}
    body["nats"] = {**claims, "version": 2}
    if expires_at is not None:
        body["exp"] = int(expires_at)
    # The id is the hash of all else, as NATS' own tools have it.
    body["jti"] = base64.b32encode(hashlib.sha256(to_json(body)).digest()).decode().rstrip("=")
    head = _base64(to_json({"typ": "JWT", "alg": "ed25519-nkey"}))
    signed = f"{head}.{_base64(to_json(body))}"
    return f"{signed}.{_base64(issuer.sign(signed.encode()))}"


def server_configuration(
    *, operator_jwt: str, system_account: str, accounts: Sequence[tuple[str, str]], lines: Sequence[str] = ()
) -> str:
    """The part of a server's configuration that says whom it trusts; `accounts` are public keys and their tokens."""
    preload = "\n".join(f"  {public}: {token}" for public, token in accounts)
    return (
        "\n".join(
            (
                f"operator: {operator_jwt}",
                f"system_account: {system_account}",
                "resolver: MEMORY",
                "resolver_preload: {",
            )
        )
        + f"\n{preload}\n}}\n"
        + "".join(f"{line}\n" for line in lines)
    )


def _encode(raw: bytes) -> str:
    return base64.b32encode(raw + _crc16(raw).to_bytes(2, "little")).decode().rstrip("=")


def _crc16(data: bytes) -> int:
    """CRC-16/XMODEM."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = ((crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _unbase64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
