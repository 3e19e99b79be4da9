"""Where projects, principals, grants and tokens are kept: keys with revisions, changed in whole batches.

A batch says which revisions it was decided on, and happens whole or not at all: that is what a key-value store of a
cluster can do, too. Here it is SQLite; several processes may share a file.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from dsec.core.errors import ConflictError, StorageError
from dsec.core.limits import IAM_BATCH_MAX, IAM_CHANGES_KEPT
from dsec.iam.migration import entries_of_tokens

_VERSION: Final = 2
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS iam (key TEXT PRIMARY KEY, revision INTEGER NOT NULL UNIQUE, value BLOB) STRICT;
CREATE TABLE IF NOT EXISTS iam_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
"""
_BUSY_S: Final = 10.0


class OvertakenError(ConflictError):
    """A key is not at the revision that the change was decided on. Nothing happened; decide again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`value` None: it was deleted."""

    key: str
    revision: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Changes:
    """`whole`: these are all keys that there are, not only what has changed."""

    revision: int
    entries: list[Entry]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """`expect`: key → revision that it must be at, 0 for a key that must not be there. `puts`: None deletes."""

    puts: Mapping[str, bytes | None]
    expect: Mapping[str, int] = field(default_factory=dict)


class IamStore(Protocol):
    """Every replica sees what another has changed within IAM_STALE_S of it."""

    def changes(self, after: int) -> Changes | None:
        """What has changed since that revision; None: nothing. Cheap when nothing has. Raises StorageError."""
        ...

    async def apply(self, batch: Batch) -> int:
        """The revision after it. Raises OvertakenError, StorageError."""
        ...

    def close(self) -> None: ...


class SqliteIamStore:
    def __init__(self, writer: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self._writer = writer
        self._reader = reader  # reading does not wait while somebody writes
        self._seen: tuple[int, int] | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def open(cls, path: Path) -> SqliteIamStore:
        """Raises StorageError for a file that is not ours, is damaged, or is of a later version."""
        try:
            # The file holds hashes of 256-bit random values: of no use to a reader, yet nobody's business.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            writer = _connect(path)
            try:
                _prepare(writer)
                reader = _connect(path)
                reader.execute("PRAGMA query_only = ON")
                return cls(writer, reader)
            except BaseException:
                writer.close()
                raise
        except (OSError, sqlite3.Error, ValueError) as error:
            raise StorageError(f"cannot open the projects and tokens at {path}: {error}") from error

    def changes(self, after: int) -> Changes | None:
        try:
            (version,) = self._reader.execute("PRAGMA data_version").fetchone()
            if self._seen is not None and self._seen == (version, after):
                return None
            self._reader.execute("BEGIN")
            try:
                found = self._changes(after)
            finally:
                self._reader.execute("COMMIT")
        except sqlite3.Error as error:
            raise StorageError(f"cannot read the projects and tokens: {error}") from error
        self._seen = (version, found.revision)
        return found if found.whole or found.revision != after else None

    def _changes(self, after: int) -> Changes:
        revision, floor = _meta(self._reader, "revision"), _meta(self._reader, "floor")
        whole = after < floor or after > revision  # deletions are forgotten, or the file is another one
        statement = "SELECT key, revision, value FROM iam WHERE revision > ? ORDER BY revision"
        rows = self._reader.execute(statement, (0 if whole else after,)).fetchall()
        entries = [Entry(*row) for row in rows if not whole or row[2] is not None]
        return Changes(revision, entries, whole)

    async def apply(self, batch: Batch) -> int:
        if len(batch.puts) > IAM_BATCH_MAX:
            raise AssertionError("a batch is above what any store takes at once")
        # Whoever asked may go away; the connection is nobody else's until the write is done.
        return await asyncio.shield(asyncio.ensure_future(self._apply(batch)))

    async def _apply(self, batch: Batch) -> int:
        async with self._lock:
            try:
                return await asyncio.to_thread(_write, self._writer, batch)
            except sqlite3.Error as error:
                raise StorageError(f"cannot write the projects and tokens: {error}") from error

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def _write(db: sqlite3.Connection, batch: Batch) -> int:
    db.execute("BEGIN IMMEDIATE")
    try:
        for key, wanted in batch.expect.items():
            row = db.execute("SELECT revision, value FROM iam WHERE key = ?", (key,)).fetchone()
            found = 0 if row is None or row[1] is None else row[0]
            if found != wanted:
                raise OvertakenError(f"{key} has changed meanwhile")
        revision = _put(db, batch.puts.items())
        _forget_deletions(db)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return revision


def _put(db: sqlite3.Connection, puts: Iterable[tuple[str, bytes | None]]) -> int:
    revision = _meta(db, "revision")
    for key, value in puts:
        revision += 1
        db.execute("INSERT OR REPLACE INTO iam (key, revision, value) VALUES (?, ?, ?)", (key, revision, value))
    db.execute("INSERT OR REPLACE INTO iam_meta (name, value) VALUES ('revision', ?)", (revision,))
    return revision


def _forget_deletions(db: sqlite3.Connection) -> None:
    (count,) = db.execute("SELECT COUNT(*) FROM iam WHERE value IS NULL").fetchone()
    if count > IAM_CHANGES_KEPT:
        (last,) = db.execute("SELECT MAX(revision) FROM iam WHERE value IS NULL").fetchone()
        db.execute("DELETE FROM iam WHERE value IS NULL")
        db.execute("INSERT OR REPLACE INTO iam_meta (name, value) VALUES ('floor', ?)", (last,))


def _meta(db: sqlite3.Connection, name: str) -> int:
    row = db.execute("SELECT value FROM iam_meta WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=_BUSY_S)


def _prepare(db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > _VERSION:
        raise ValueError(f"its version is {version}; this dsec knows {_VERSION}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # a revocation that was answered must not come undone
    db.executescript(_SCHEMA)
    if version == 1:
        db.execute("BEGIN IMMEDIATE")
        _put(db, entries_of_tokens(db).items())
        db.execute("DROP TABLE tokens")
        db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("COMMIT")
    db.execute(f"PRAGMA user_version = {_VERSION}")
