"""Tokens: made once, shown once, kept as hashes. Reading is from memory, changes are on disk before they count."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import os
import re
import secrets
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dsec.core.clock import Clock, SystemClock
from dsec.core.errors import (
    AuthError,
    CapacityError,
    ForbiddenError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
)
from dsec.core.limits import TOKENS_MAX
from dsec.iam.principals import Principal, Right, closed_rights
from dsec.iam.projects import ROOT, parse_project, reaches

PREFIX: Final = "dsec_"

_SECRET_BYTES: Final = 32
_TOKEN_LIKE: Final = re.compile(PREFIX + r"[A-Za-z0-9_-]{16,}")
_TOKEN_CHARS_MAX: Final = 128
_VERSION: Final = 1
_COLUMNS: Final = "id, hash, principal, project, rights, created_at, expires_at, revoked_at"
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY,
    hash BLOB NOT NULL UNIQUE,
    principal TEXT NOT NULL,
    project TEXT NOT NULL,
    rights TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL
) STRICT
"""


@dataclass(frozen=True, slots=True)
class Token:
    """What is kept of a token; the token itself is known to its holder only."""

    id: str
    hash: bytes
    principal: Principal
    created_at: float
    revoked_at: float | None = None


class TokenStore:
    """The tokens of one service.

    store = TokenStore.open(Path("/var/lib/dsec/iam.db"))
    text, token = await store.create("ci", project="/team", rights={"use"}, ttl_s=3600, by=admin)
    principal = store.authenticate(text)           # raises AuthError
    """

    def __init__(self, database: sqlite3.Connection, *, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._changing = asyncio.Lock()
        self._by_id: dict[str, Token] = {}
        self._by_hash: dict[bytes, Token] = {}
        for row in database.execute(f"SELECT {_COLUMNS} FROM tokens"):
            self._keep(_token_of(row))

    @classmethod
    def open(cls, path: Path, *, clock: Clock | None = None) -> TokenStore:
        """Raises StorageError for a file that is not ours, is damaged, or is of a later version."""
        try:
            # The file holds hashes of 256-bit random values: of no use to a reader, yet nobody's business.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            try:
                _prepare(database)
                return cls(database, clock=clock or SystemClock())
            except BaseException:
                database.close()
                raise
        except (OSError, sqlite3.Error, ValueError) as error:
            raise StorageError(f"cannot open the tokens at {path}: {error}") from error

    def authenticate(self, text: str) -> Principal:
        """Raises AuthError, with the same words whatever is wrong, but for a token that was good once."""
        digest = _digest(text) if text.startswith(PREFIX) and len(text) <= _TOKEN_CHARS_MAX else b""
        known = self._by_hash.get(digest)
        # The look-up may tell by its time something of a hash, and a hash cannot be turned into a token. The
        # comparison that decides takes constant time.
        if known is None or not hmac.compare_digest(known.hash, digest):
            raise AuthError("the token is not valid", hint="`dsec token create` on the service's machine makes one")
        if known.revoked_at is not None:
            raise AuthError("the token was revoked")
        if known.principal.expires_at is not None and known.principal.expires_at <= self._clock.wall_s():
            raise AuthError("the token has expired")
        return known.principal

    async def create(
        self, name: str, *, project: str, rights: set[str], ttl_s: float | None = None, by: Principal
    ) -> tuple[str, Token]:
        """The token's text and what is kept of it.

        Raises ForbiddenError when `by` would give more than it has: project, rights or time.
        """
        principal = Principal(name, project=parse_project(project), rights=closed_rights(rights))
        _check_grant(principal, by)
        async with self._changing:
            if len(self._by_id) >= TOKENS_MAX:
                await self._forget_ended()
            if len(self._by_id) >= TOKENS_MAX:
                raise CapacityError(f"there are {TOKENS_MAX} tokens already", hint="revoke some: `dsec token rm`")
            now = self._clock.wall_s()
            ends = [end for end in (None if ttl_s is None else now + ttl_s, by.expires_at) if end is not None]
            text = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
            principal = replace(principal, expires_at=min(ends, default=None))
            token = Token(f"tok_{secrets.token_hex(8)}", _digest(text), principal, now)
            await self._execute(f"INSERT INTO tokens ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _row_of(token))
            self._keep(token)
        return text, token

    def tokens(self, *, by: Principal) -> list[Token]:
        """Those of projects that `by` reaches, newest first."""
        found = [token for token in self._by_id.values() if reaches(by.project, token.principal.project)]
        return sorted(found, key=lambda token: token.created_at, reverse=True)

    async def revoke(self, id: str, *, by: Principal) -> Token:
        """Takes effect with the next request. Idempotent. Raises NotFoundError, also for another project's token."""
        async with self._changing:
            token = self._by_id.get(id)
            if token is None or not reaches(by.project, token.principal.project):
                raise NotFoundError(f"there is no token {id[:40]!r}")
            if token.revoked_at is None:
                token = replace(token, revoked_at=self._clock.wall_s())
                await self._execute("UPDATE tokens SET revoked_at = ? WHERE id = ?", (token.revoked_at, id))
                self._keep(token)
            return token

    def close(self) -> None:
        self._database.close()

    async def _forget_ended(self) -> None:
        """Those that were revoked, or whose time is over: whoever still has one is told that it is not valid."""
        now = self._clock.wall_s()
        await self._execute("DELETE FROM tokens WHERE revoked_at IS NOT NULL OR expires_at <= ?", (now,))
        for token in list(self._by_id.values()):
            if token.revoked_at is not None or (token.principal.expires_at or math.inf) <= now:
                del self._by_id[token.id], self._by_hash[token.hash]

    async def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            # Memory changes after the disk, never before: what was answered is what a restart finds.
            await asyncio.to_thread(self._database.execute, statement, values)
        except sqlite3.Error as error:
            raise StorageError(f"cannot write the tokens: {error}") from error

    def _keep(self, token: Token) -> None:
        self._by_id[token.id] = token
        self._by_hash[token.hash] = token


def without_tokens(text: str) -> str:
    """`text` with what looks like a token cut to its first letters."""
    return _TOKEN_LIKE.sub(f"{PREFIX}…", text)


def _prepare(database: sqlite3.Connection) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > _VERSION:
        raise ValueError(f"its version is {version}; this dsec knows {_VERSION}")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")  # a revocation that was answered must not come undone
    database.execute(_SCHEMA)
    database.execute(f"PRAGMA user_version = {_VERSION}")


def _check_grant(wanted: Principal, by: Principal) -> None:
    if Right.ADMIN in wanted.rights and wanted.project != ROOT:
        raise InvalidArgumentError(
            "the right admin is over the whole service, so its project is '/'",
            hint="a project's tokens have use or read",
        )
    if not reaches(by.project, wanted.project):
        raise ForbiddenError(f"{by.project} may not make tokens for {wanted.project}")
    missing = wanted.rights - by.rights
    if missing:
        raise ForbiddenError(f"nobody can give rights that they do not have: {', '.join(sorted(missing))}")


def _row_of(token: Token) -> tuple[Any, ...]:
    who = token.principal
    rights = " ".join(sorted(who.rights))
    return token.id, token.hash, who.name, who.project, rights, token.created_at, who.expires_at, token.revoked_at


def _token_of(row: tuple[Any, ...]) -> Token:
    id, hash, name, project, rights, created_at, expires_at, revoked_at = row
    principal = Principal(name, project=project, rights=closed_rights(rights.split()), expires_at=expires_at)
    return Token(id, hash, principal, created_at, revoked_at)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
