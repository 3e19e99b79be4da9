"""What must be known after a restart: sandboxes, idempotency keys, tombstones, the node's own id. SQLite, WAL.

One thread writes. What was asked for while it wrote becomes one transaction: a burst of creates shares its fsyncs.
A write is durable (FULL: it survives a loss of power) or kept (NORMAL: it survives kill -9 of the node, in the page
cache). Intents are durable. Later moves are kept: with the host's power every sandbox ends anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from dsec.core import limits
from dsec.core.errors import DsecError, HostError, StorageError
from dsec.core.faults import fault_point
from dsec.core.ids import NodeId, new_node_id, parse_node_id
from dsec.node.rows import KeyRow, SandboxRow, SpareRow, Tombstone
from dsec.wire.codec import pack, unpack

SCHEMA_VERSION: Final = 1
_BATCH_MAX: Final = 512
_QUEUE_MAX: Final = 65_536
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    project TEXT NOT NULL, key TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (project, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS keys_at ON keys (at);
CREATE TABLE IF NOT EXISTS tombstones (
    id TEXT PRIMARY KEY, created_at REAL NOT NULL, ended_at REAL NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spares (id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tombstones_created ON tombstones (created_at, id);
CREATE INDEX IF NOT EXISTS tombstones_ended ON tombstones (ended_at);
"""

T = TypeVar("T")
_Write = Callable[[sqlite3.Connection], Any]


class Journal:
    """Opened with `open`. Writes are awaited; reads are point queries on pages in memory, a few microseconds each."""

    def __init__(self, path: Path, node_id: NodeId, reader: sqlite3.Connection, writer: sqlite3.Connection) -> None:
        self.path = path
        self.node_id = node_id
        self._reader = reader
        self._queue: queue.Queue[_Job | None] = queue.Queue(_QUEUE_MAX)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._thread = threading.Thread(target=_write_loop, args=(writer, self._queue, self._loop), name="journal")
        self._thread.start()

    @classmethod
    async def open(cls, path: Path) -> Journal:
        """Raises HostError when a newer version has written it, StorageError when it cannot be used."""
        writer, node_id = await asyncio.to_thread(_open, path)
        try:
            reader = _connect(path)
            reader.execute("PRAGMA query_only = ON")
        except sqlite3.Error as error:
            writer.close()
            raise StorageError(f"the journal {path} cannot be read") from error
        return cls(path, node_id, reader, writer)

    async def close(self) -> None:
        """Writes what was asked for, and ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._queue.put, None)
        await asyncio.to_thread(self._thread.join)
        self._reader.close()

    # -- writes ------------------------------------------------------------------------------------

    async def intend(self, row: SandboxRow, key: KeyRow | None) -> None:
        """Durable: the sandbox and the key that its request came with."""

        def write(db: sqlite3.Connection) -> None:
            _put_row(db, row)
            _put_key(db, key)

        await self._submit(write, durable=True)

    async def intend_spare(self, row: SpareRow) -> None:
        """Durable, as any instance that is about to be."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO spares (id, body) VALUES (?, ?)", (row.id, pack(row)))

        await self._submit(write, durable=True)

    async def claim(self, spare: str, row: SandboxRow, key: KeyRow | None) -> None:
        """Kept: the spare is the sandbox's instance from here on, or still a spare; never both, never neither."""

        def write(db: sqlite3.Connection) -> None:
            _drop_spare(db, spare)
            _put_row(db, row)
            _put_key(db, key)

        await self._submit(write, durable=False)

    async def forget_spare(self, id: str) -> None:
        """Kept: nothing of it is left."""
        await self._submit(lambda db: _drop_spare(db, id), durable=False)

    async def put(self, row: SandboxRow) -> None:
        """Kept: the row as it is now."""
        await self._submit(lambda db: _put_row(db, row), durable=False)

    async def forget(self, id: str, *, project: str, key: str | None) -> None:
        """Kept: a create that failed. Its key may be used again."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sandboxes WHERE id = ?", (id,))
            if key is not None:
                db.execute("DELETE FROM keys WHERE project = ? AND key = ?", (project, key))

        await self._submit(write, durable=False)

    async def bury(self, tombstone: Tombstone) -> None:
        """Kept: the row gives way to its tombstone."""
        sandbox = tombstone.sandbox

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox.id,))
            db.execute(
                "INSERT OR REPLACE INTO tombstones (id, created_at, ended_at, body) VALUES (?, ?, ?, ?)",
                (sandbox.id, sandbox.created_at, sandbox.ended_at or 0.0, pack(tombstone)),
            )

        await self._submit(write, durable=False)

    async def prune(self, now: float) -> None:
        """Drops tombstones and keys that are past their time, and the oldest ones above their number."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM tombstones WHERE ended_at < ?", (now - limits.TOMBSTONE_TTL_S,))
            db.execute("DELETE FROM keys WHERE at < ?", (now - limits.IDEMPOTENCY_TTL_S,))
            _drop_oldest(db, "tombstones", "ended_at", limits.TOMBSTONES_MAX)
            _drop_oldest(db, "keys", "at", limits.IDEMPOTENCY_KEYS_MAX)

        await self._submit(write, durable=False)

    # -- reads -------------------------------------------------------------------------------------

    def sandboxes(self) -> list[SandboxRow]:
        return [unpack(body, SandboxRow) for (body,) in self._read("SELECT body FROM sandboxes", ())]

    def spares(self) -> list[SpareRow]:
        return [unpack(body, SpareRow) for (body,) in self._read("SELECT body FROM spares", ())]

    def key(self, project: str, key: str) -> KeyRow | None:
        found = self._read("SELECT body FROM keys WHERE project = ? AND key = ?", (project, key))
        return unpack(found[0][0], KeyRow) if found else None

    def tombstone(self, id: str) -> Tombstone | None:
        found = self._read("SELECT body FROM tombstones WHERE id = ?", (id,))
        return unpack(found[0][0], Tombstone) if found else None

    def tombstones(self, after: tuple[float, str], limit: int) -> list[Tombstone]:
        """In order of creation, strictly after the given place."""
        found = self._read(
            "SELECT body FROM tombstones WHERE (created_at, id) > (?, ?) ORDER BY created_at, id LIMIT ?",
            (*after, limit),
        )
        return [unpack(body, Tombstone) for (body,) in found]

    def _read(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        try:
            return self._reader.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StorageError(f"the journal {self.path} cannot be read") from error

    async def _submit(self, write: _Write, *, durable: bool) -> None:
        if self._closed:
            raise StorageError("the journal is closed")
        job = _Job(write, durable, self._loop.create_future())
        try:
            self._queue.put_nowait(job)
        except queue.Full as error:
            raise StorageError(f"{_QUEUE_MAX} writes wait for the journal's disk") from error
        # The write happens, whatever becomes of who asked for it.
        await asyncio.shield(job.done)


class _Job:
    __slots__ = ("done", "durable", "error", "write")

    def __init__(self, write: _Write, durable: bool, done: asyncio.Future[None]) -> None:
        self.write = write
        self.durable = durable
        self.done = done
        self.error: BaseException | None = None


def _write_loop(db: sqlite3.Connection, jobs: queue.Queue[_Job | None], loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.closing(db):
        ending = False
        while not ending:
            batch = [jobs.get()]
            while len(batch) < _BATCH_MAX and batch[-1] is not None:
                try:
                    batch.append(jobs.get_nowait())
                except queue.Empty:
                    break
            ending = batch[-1] is None
            work = [job for job in batch if job is not None]
            _write_batch(db, work)
            # RuntimeError: the loop is closed, and nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, work)


def _write_batch(db: sqlite3.Connection, batch: list[_Job]) -> None:
    try:
        _transact(db, batch)
    except Exception as error:
        if len(batch) == 1:
            batch[0].error = error
            return
        # One job's failure is its own: each gets a transaction of its own.
        for job in batch:
            _write_batch(db, [job])


def _transact(db: sqlite3.Connection, batch: list[_Job]) -> None:
    if not batch:
        return
    durable = any(job.durable for job in batch)
    db.execute("PRAGMA synchronous = FULL" if durable else "PRAGMA synchronous = NORMAL")
    db.execute("BEGIN IMMEDIATE")
    try:
        for job in batch:
            fault_point("node.journal.write")
            job.write(db)
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _settle(batch: list[_Job]) -> None:
    for job in batch:
        if job.done.done():
            continue
        if job.error is None:
            job.done.set_result(None)
        else:
            failure = StorageError("the journal could not be written", hint="is the disk of its state directory full?")
            failure.__cause__ = job.error
            job.done.set_exception(failure)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    db.execute("PRAGMA busy_timeout = 10000")
    return db


def _open(path: Path) -> tuple[sqlite3.Connection, NodeId]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    db = None
    try:
        db = _connect(path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        _check_schema(db, path)
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        node_id = _minted_id(db)
        path.chmod(0o600)
        return db, node_id
    except (sqlite3.Error, OSError) as error:
        if db is not None:
            db.close()
        raise StorageError(f"the journal {path} cannot be used: {error}") from error
    except DsecError:
        if db is not None:
            db.close()
        raise


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise HostError(
            f"the journal {path} was written by a newer version (schema {version}; this one knows {SCHEMA_VERSION})",
            hint="start the newer version again, or give this one another state directory",
        )


def _minted_id(db: sqlite3.Connection) -> NodeId:
    db.execute("INSERT OR IGNORE INTO meta (name, value) VALUES ('node_id', ?)", (new_node_id(),))
    (found,) = db.execute("SELECT value FROM meta WHERE name = 'node_id'").fetchone()
    return parse_node_id(found)


def _put_row(db: sqlite3.Connection, row: SandboxRow) -> None:
    db.execute("INSERT OR REPLACE INTO sandboxes (id, body) VALUES (?, ?)", (row.id, pack(row)))


def _put_key(db: sqlite3.Connection, key: KeyRow | None) -> None:
    if key is not None:
        db.execute(
            "INSERT OR REPLACE INTO keys (project, key, at, body) VALUES (?, ?, ?, ?)",
            (key.project, key.key, key.at, pack(key)),
        )


def _drop_spare(db: sqlite3.Connection, id: str) -> None:
    db.execute("DELETE FROM spares WHERE id = ?", (id,))


def _drop_oldest(db: sqlite3.Connection, table: str, column: str, keep: int) -> None:
    (count,) = db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
    if count > keep:
        # Ids are the tables' primary keys; a moment shared by several may drop a few more, which is no harm.
        (edge,) = db.execute(
            f"SELECT {column} FROM {table} ORDER BY {column} LIMIT 1 OFFSET ?", (count - keep - 1,)
        ).fetchone()
        db.execute(f"DELETE FROM {table} WHERE {column} <= ?", (edge,))
