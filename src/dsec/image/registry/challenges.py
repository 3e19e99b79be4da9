"""What a registry asks for with 401, and the tokens that answer it (the distribution's token authentication)."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec

from dsec.core.errors import InvalidArgumentError, StorageError
from dsec.image.registry.accounts import Account
from dsec.image.registry.web import (
    BrokenError,
    Patience,
    Web,
    check_outward,
    check_passing,
    check_url,
    host_of,
    is_loopback,
)
from dsec.wire import codec

_HEADER_CHARS_MAX: Final = 8_192
_TOKEN_BYTES_MAX: Final = 256 * 1_024
_TOKEN_CHARS_MAX: Final = 64 * 1_024
_TOKEN: Final = re.compile(r"[!-~]+\Z")
_LIFE_S_DEFAULT: Final = 60.0  # as the specification has it
_LIFE_S_MAX: Final = 3_600.0
_CLIENT: Final = "dsec"
_WORD: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_PARAMETER: Final = re.compile(r'\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^",\s]+))\s*(?:,|\Z)')


@dataclass(frozen=True, slots=True)
class Challenge:
    scheme: str  # "basic" or "bearer"
    realm: str = ""
    service: str = ""
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Token:
    value: str
    good_until: float  # monotonic


class _TokenAnswer(msgspec.Struct):
    token: str | None = None
    access_token: str | None = None
    expires_in: float | None = None


def parse_challenges(headers: list[str]) -> list[Challenge]:
    """Those of WWW-Authenticate that we know. What is not understood is passed over."""
    found = []
    for header in headers:
        if len(header) > _HEADER_CHARS_MAX:
            continue
        word = _WORD.match(header.strip())
        scheme = word[0].lower() if word else ""
        rest = header.strip()[len(scheme) :]
        values: dict[str, str] = {}
        position = 0
        while match := _PARAMETER.match(rest, position):
            values[match[1].lower()] = re.sub(r"\\(.)", r"\1", match[2]) if match[2] is not None else match[3]
            position = match.end()
        if scheme in ("basic", "bearer"):
            found.append(Challenge(scheme, values.get("realm", ""), values.get("service", ""), values.get("scope", "")))
    return found


def fetch_token(
    web: Web, challenge: Challenge, scopes: list[str], account: Account | None, *, registry: str, patience: Patience
) -> Token:
    """From the realm that the registry names, at `registry` (a URL). Raises StorageError, UnavailableError."""
    realm = _checked_realm(challenge.realm, registry)
    while True:
        try:
            return _ask(web, realm, challenge, scopes, account)
        except BrokenError as error:
            patience.wait(error)


def _ask(web: Web, realm: str, challenge: Challenge, scopes: list[str], account: Account | None) -> Token:
    started = time.monotonic()
    headers = {"Accept": "application/json"}
    if account is not None and account.identity_token:
        fields = {
            "grant_type": "refresh_token",
            "service": challenge.service,
            "client_id": _CLIENT,
            "scope": " ".join(scopes),
            "refresh_token": account.identity_token,
        }
        headers["Content-Type"] = "application/x-www-form-urlencoded"
        exchange = web.ask("POST", realm, headers, body=urlencode(fields).encode())
    else:
        basic = account.basic() if account is not None else None
        if basic is not None:
            headers["Authorization"] = basic
        query = [("service", challenge.service)] if challenge.service else []
        query += [("scope", scope) for scope in scopes]
        exchange = web.ask("GET", _with_query(realm, query), headers)
    with exchange as answer:
        check_passing(answer)
        if answer.status in (400, 401, 403):
            whose = "our account" if account is not None else "no account"
            raise StorageError(
                f"{host_of(realm)} gives no token for {' '.join(scopes) or 'the registry'} to {whose}",
                hint="log in as the user of the service: docker login, or skopeo login",
            )
        if answer.status != 200:
            raise StorageError(f"{host_of(realm)} answers {answer.status} instead of a token")
        content = answer.whole(_TOKEN_BYTES_MAX)
    return _token(content, realm, started)


def _token(content: bytes, realm: str, started: float) -> Token:
    try:
        found = codec.from_json(content, _TokenAnswer)
    except InvalidArgumentError:
        raise StorageError(f"{host_of(realm)} gives a token that is not understood") from None
    value = found.token or found.access_token or ""
    if not _TOKEN.match(value) or len(value) > _TOKEN_CHARS_MAX:
        raise StorageError(f"{host_of(realm)} gives a token that is none")
    life = min(found.expires_in or _LIFE_S_DEFAULT, _LIFE_S_MAX)
    return Token(value, started + 0.8 * max(life, 0.0))


def _checked_realm(realm: str, registry: str) -> str:
    """Our password goes there: never in clear, unless the registry itself is asked in clear."""
    scheme = urlsplit(realm).scheme
    if scheme == "https" or (scheme == "http" and (urlsplit(registry).scheme == "http" or is_loopback(realm))):
        check_outward(registry, check_url(realm))
        return realm
    raise StorageError(f"{host_of(registry)} sends us to a place for tokens that is not asked: {realm[:80]!r}")


def _with_query(url: str, query: list[tuple[str, str]]) -> str:
    parts = urlsplit(url)
    more = urlencode(query)
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "&".join(filter(None, (parts.query, more))), ""))
