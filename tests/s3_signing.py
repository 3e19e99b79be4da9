"""Signatures of AWS, version 4, as a server checks them: written from AWS's description, and proven by its examples."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, quote, urlsplit

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_SIGNATURE: Final = "X-Amz-Signature"


@dataclass(frozen=True)
class SignedRequest:
    """As it came: `headers` by lower-case names, `target` as in the request line."""

    method: str
    target: str
    headers: Mapping[str, str]

    def query(self) -> list[tuple[str, str]]:
        return parse_qsl(urlsplit(self.target).query, keep_blank_values=True)


class SignatureError(Exception):
    """Why a request is refused."""


def check_signature(request: SignedRequest, body: bytes, *, key: str, secret: str) -> None:
    """Raises SignatureError for one that `key` and `secret` have not signed as it is."""
    query = dict(request.query())
    if _SIGNATURE in query:
        credential, signed, claimed = (query[f"X-Amz-{name}"] for name in ("Credential", "SignedHeaders", "Signature"))
        algorithm, date, payload = query["X-Amz-Algorithm"], query["X-Amz-Date"], "UNSIGNED-PAYLOAD"
    else:
        algorithm, _, rest = request.headers.get("authorization", "").partition(" ")
        fields = dict(field.strip().split("=", 1) for field in rest.split(",") if "=" in field)
        if set(fields) != {"Credential", "SignedHeaders", "Signature"}:
            raise SignatureError("it is not signed by the fourth version")
        credential, signed, claimed = fields["Credential"], fields["SignedHeaders"], fields["Signature"]
        date, payload = request.headers["x-amz-date"], request.headers["x-amz-content-sha256"]
        if len(payload) == 64 and hashlib.sha256(body).hexdigest() != payload:
            raise SignatureError("its body is another one")
    name, _, scope = credential.partition("/")
    if algorithm != _ALGORITHM or name != key:
        raise SignatureError(f"{algorithm} by {name}")
    if "host" not in signed.split(";"):
        raise SignatureError("the host is not signed")
    if not hmac.compare_digest(signature(request, signed.split(";"), payload, secret, date, scope), claimed):
        raise SignatureError("the signature does not match")


def signature(request: SignedRequest, signed: Iterable[str], payload: str, secret: str, date: str, scope: str) -> str:
    """`scope` is DAY/REGION/s3/aws4_request, `date` as in x-amz-date."""
    names = sorted(signed)
    query = sorted((_quoted(name), _quoted(value)) for name, value in request.query() if name != _SIGNATURE)
    canonical = "\n".join(
        (
            request.method,
            urlsplit(request.target).path,
            "&".join(f"{name}={value}" for name, value in query),
            *(f"{name}:{' '.join(request.headers[name].split())}" for name in names),
            "",
            ";".join(names),
            payload,
        )
    )
    text = "\n".join((_ALGORITHM, date, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    secret_key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        secret_key = hmac.digest(secret_key, part.encode(), "sha256")
    return hmac.digest(secret_key, text.encode(), "sha256").hex()


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")
