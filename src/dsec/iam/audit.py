"""Who did what: every change that was asked for, and what came of it. Bounded, written in batches."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from dsec.core.clock import Clock, SystemClock
from dsec.core.errors import InvalidArgumentError, StorageError
from dsec.core.limits import AUDIT_KEEP_S, AUDIT_QUEUED_MAX, AUDIT_ROWS_MAX, LIST_PAGE_MAX
from dsec.observe.logs import get_logger
from dsec.wire.iam import AuditEntry, AuditPage

log = get_logger(__name__)

_WRITE_S: Final = 0.5  # between an entry and its being on the disk: what a crash may take with it
_PRUNE_EVERY: Final = 200  # writes
_SCAN_MAX: Final = 20_000  # rows that one page looks at: most may be other projects'
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS audit (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, principal TEXT NOT NULL, project TEXT NOT NULL,
    action TEXT NOT NULL, target TEXT NOT NULL, status INTEGER NOT NULL, request TEXT NOT NULL, token TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
INSERT OR IGNORE INTO meta (name, value) VALUES ('id', lower(hex(randomblob(6)))), ('told', '0');
"""
_COLUMNS: Final = "at, principal, project, action, target, status, request, token"


class AuditLog(Protocol):
    @property
    def lost(self) -> int:
        """Entries that were not kept."""
        ...

    def note(self, entry: AuditEntry) -> None: ...

    async def page(
        self, sees: Callable[[str], bool], *, after: str | None, limit: int, principal: str | None = None
    ) -> AuditPage: ...

    async def close(self) -> None: ...


class Audit:
    """In a file. `telling` is held by who tells somebody else what is in it."""

    def __init__(self, database: sqlite3.Connection, *, clock: Clock) -> None:
        self.telling = asyncio.Lock()
        self.id: str = database.execute("SELECT value FROM meta WHERE name = 'id'").fetchone()[0]
        self._database = database
        self._clock = clock
        self._queued: deque[AuditEntry] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._writes = 0
        self.lost = 0

    @classmethod
    def open(cls, path: Path, *, clock: Clock | None = None) -> Audit:
        """Raises StorageError."""
        try:
            path.touch(mode=0o600)
            database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            try:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = NORMAL")
                database.executescript(_SCHEMA)
            except BaseException:
                database.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"cannot open the audit log at {path}: {error}") from error
        return cls(database, clock=clock or SystemClock())

    def note(self, entry: AuditEntry) -> None:
        """It is on the disk soon. Above AUDIT_QUEUED_MAX that wait, the oldest are lost, and counted."""
        if len(self._queued) >= AUDIT_QUEUED_MAX:
            self._queued.popleft()
            self.lost += 1
        self._queued.append(entry)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WRITE_S, self._begin)

    async def page(
        self, sees: Callable[[str], bool], *, after: str | None, limit: int, principal: str | None = None
    ) -> AuditPage:
        """Newest first, of projects that `sees` says yes to. `after` is the cursor of the page before."""
        if after is not None and not (after.isascii() and after.isdigit() and len(after) < 19):
            raise InvalidArgumentError(f"{after[:40]!r} is not a cursor of the audit log")
        await self.flush()
        below = int(after) if after is not None else (1 << 62)
        async with self._lock:
            try:
                rows = await asyncio.to_thread(self._read, below)
            except sqlite3.Error as error:
                raise StorageError(f"cannot read the audit log: {error}") from error
        found: list[AuditEntry] = []
        last = 0
        for row in rows:
            if len(found) == min(limit, LIST_PAGE_MAX):
                break
            last = row[0]
            if sees(row[3]) and principal in (None, row[2]):
                found.append(_entry(row))
        more = (bool(rows) and last > rows[-1][0]) or len(rows) == _SCAN_MAX
        return AuditPage(found, next=str(last) if more else None, lost=self.lost)

    async def untold(self, limit: int) -> list[AuditEntry]:
        """The first of those after what `keep_told` has kept. Raises StorageError."""
        await self.flush()
        select = (
            f"SELECT seq, {_COLUMNS} FROM audit WHERE seq > "
            "(SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'told') ORDER BY seq LIMIT ?"
        )
        async with self._lock:
            try:
                rows = await asyncio.to_thread(lambda: self._database.execute(select, (limit,)).fetchall())
            except sqlite3.Error as error:
                raise StorageError(f"cannot read the audit log: {error}") from error
        return [_entry(row) for row in rows]

    async def keep_told(self, seq: int) -> None:
        """Raises StorageError."""
        update = "UPDATE meta SET value = ? WHERE name = 'told'"
        async with self._lock:
            try:
                await asyncio.to_thread(lambda: self._database.execute(update, (str(seq),)))
            except sqlite3.Error as error:
                raise StorageError(f"cannot write the audit log: {error}") from error

    async def flush(self) -> None:
        """All that was noted is on the disk, or counted as lost."""
        async with self._lock:
            batch = list(self._queued)
            self._queued.clear()
            if not batch:
                return
            try:
                await asyncio.shield(asyncio.to_thread(self._write, batch))
            except sqlite3.Error as error:
                self.lost += len(batch)
                log.error("entries of the audit log are lost", count=len(batch), error=str(error))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        await self.flush()
        self._database.close()

    def _begin(self) -> None:
        self._timer = None
        self._writing = asyncio.get_running_loop().create_task(self.flush())

    def _write(self, batch: list[AuditEntry]) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._database.executemany(
                f"INSERT INTO audit ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(e.at, e.principal, e.project, e.action, e.target, e.status, e.request, e.token) for e in batch],
            )
            if self._writes % _PRUNE_EVERY == 0:
                self._prune()
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self._writes += 1

    def _prune(self) -> None:
        self._database.execute("DELETE FROM audit WHERE at < ?", (self._clock.wall_s() - AUDIT_KEEP_S,))
        self._database.execute("DELETE FROM audit WHERE seq <= (SELECT MAX(seq) FROM audit) - ?", (AUDIT_ROWS_MAX,))

    def _read(self, below: int) -> list[tuple[int, float, str, str, str, str, int, str, str | None]]:
        return self._database.execute(
            f"SELECT seq, {_COLUMNS} FROM audit WHERE seq < ? ORDER BY seq DESC LIMIT ?", (below, _SCAN_MAX)
        ).fetchall()


def _entry(row: tuple[Any, ...]) -> AuditEntry:
    seq, at, principal, project, action, target, status, request, token = row
    return AuditEntry(
        seq=seq,
        at=at,
        principal=principal,
        project=project,
        action=action,
        target=target,
        status=status,
        request=request,
        token=token,
    )
