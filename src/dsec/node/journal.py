"""What must be known after a restart: sandboxes, idempotency keys, tombstones, the node's own id. SQLite, WAL.

What is asked for in one turn of the loop becomes one transaction (`journalwriter.py`).
A write survives kill -9 of the node, in the page cache (synchronous = NORMAL). A loss of power may take the last of
them back, and ends every sandbox anyway; what their directories then hold is found by the backends' `sweep`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from dsec.core import limits
from dsec.core.clock import Clock, SystemClock
from dsec.core.errors import DsecError, HostError, InvalidArgumentError, ProtocolError, StorageError
from dsec.core.ids import NodeId, SandboxId, new_node_id, node_of, parse_node_id, parse_sandbox_id
from dsec.core.states import EndCause
from dsec.node.config import ENDED_DIR
from dsec.node.events import SCHEMA as EVENTS_SCHEMA
from dsec.node.events import EventTable, end_of, event_of
from dsec.node.journalwriter import JournalWriter, Write
from dsec.node.rows import KeyRow, SandboxRow, SpareRow, Tombstone
from dsec.node.usage import SCHEMA as USAGE_SCHEMA
from dsec.node.usage import prune_usage, put_usage, widen_usage
from dsec.wire.codec import pack, unpack
from dsec.wire.events import Event, EventKind

SCHEMA_VERSION: Final = 1
_BUSY_S = 10.0
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


class Journal:
    """Opened with `open`. Writes are awaited; reads are point queries on pages in memory, a few microseconds each."""

    def __init__(
        self, path: Path, node_id: NodeId, reader: sqlite3.Connection, writer: sqlite3.Connection, clock: Clock
    ) -> None:
        self.path = path
        self.node_id = node_id
        self._reader = reader
        self._clock = clock
        self.events = EventTable(node_id, self._read)
        self._writer = JournalWriter(writer, settled=self.events.ring)

    @classmethod
    async def open(cls, path: Path, clock: Clock | None = None) -> Journal:
        """Raises HostError when a newer version has written it, StorageError when it cannot be used."""
        writer, node_id = await asyncio.to_thread(_open, path)
        try:
            reader = _connect(path)
            reader.execute("PRAGMA query_only = ON")
        except sqlite3.Error as error:
            writer.close()
            raise StorageError(f"the journal {path} cannot be read") from error
        return cls(path, node_id, reader, writer, clock or SystemClock())

    async def close(self) -> None:
        """Writes what was asked for, and ends. Idempotent."""
        await self._writer.close()
        self._reader.close()

    # -- writes ------------------------------------------------------------------------------------

    async def intend(self, row: SandboxRow, key: KeyRow | None) -> None:
        """The sandbox and the key that its request came with."""
        await self._change([row], [] if key is None else [key])

    async def intend_spare(self, row: SpareRow) -> None:
        def write(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO spares (id, body) VALUES (?, ?)", (row.id, pack(row)))

        await self._writer.write(write)

    async def claim(self, spare: str, row: SandboxRow, key: KeyRow | None) -> None:
        """The spare is the sandbox's instance from here on, or still a spare; never both, never neither."""
        known = self.events.state_of(row.id) is not None
        back = [event_of(row, EventKind.ROLLED_BACK, self._clock.wall_s())] if known else []
        await self._change([row], [] if key is None else [key], spare=spare, events=back)

    async def forget_spare(self, id: str) -> None:
        """Nothing of it is left."""
        await self._writer.write(lambda db: _drop_spare(db, id))

    async def put(self, row: SandboxRow) -> None:
        """The row as it is now."""
        await self._change([row], [])

    async def forget(self, row: SandboxRow) -> None:
        """A create that failed. Its key may be used again."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sandboxes WHERE id = ?", (row.id,))
            if row.key is not None:
                db.execute("DELETE FROM keys WHERE project = ? AND key = ?", (row.project, row.key))

        events = []
        if self.events.state_of(row.id) is not None:
            cause = str(EndCause.LAUNCH_FAILED)
            at = self._clock.wall_s()
            events = [event_of(row, EventKind.FAILED, at, cause=cause, detail=row.end_detail)]
        await self._submit(write, {row.id: None}, events)

    async def settle_fork(self, rows: Collection[SandboxRow], keys: Collection[KeyRow]) -> None:
        """All of a fork are there to stay, or none."""
        await self._change(rows, keys)

    async def bury(self, tombstone: Tombstone) -> None:
        """The row gives way to its tombstone."""
        sandbox = tombstone.sandbox

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox.id,))
            db.execute(
                "INSERT OR REPLACE INTO tombstones (id, created_at, ended_at, body) VALUES (?, ?, ?, ?)",
                (sandbox.id, sandbox.created_at, sandbox.ended_at or 0.0, pack(tombstone)),
            )
            put_usage(db, tombstone)

        await self._submit(write, {sandbox.id: None}, [end_of(tombstone)])

    def events_told(self) -> int:
        """As `keep_events_told` has kept it; 0: nothing."""
        found = self._read("SELECT value FROM meta WHERE name = 'events_told'", ())
        return int(found[0][0]) if found else 0

    async def keep_events_told(self, number: int) -> None:
        """Up to which event the log of a cluster has them."""
        insert = "INSERT OR REPLACE INTO meta (name, value) VALUES ('events_told', ?)"
        await self._writer.write(lambda db: db.execute(insert, (str(number),)))

    async def note(self, events: Collection[Event]) -> None:
        """What is told beside changes of rows."""
        await self._submit(lambda db: None, events=events)

    async def prune(self, now: float) -> None:
        """Drops tombstones and keys that are past their time, and the oldest ones above their number."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM tombstones WHERE ended_at < ?", (now - limits.TOMBSTONE_TTL_S,))
            db.execute("DELETE FROM keys WHERE at < ?", (now - limits.IDEMPOTENCY_TTL_S,))
            _drop_oldest(db, "tombstones", "ended_at", limits.TOMBSTONES_MAX)
            _drop_oldest(db, "keys", "at", limits.IDEMPOTENCY_KEYS_MAX)
            prune_usage(db, now)
            self.events.prune(db, now)

        await self._writer.write(write, long=True)

    # -- reads -------------------------------------------------------------------------------------

    def sandboxes(self) -> list[SandboxRow]:
        """Raises StorageError when one cannot be read: it must not be forgotten."""
        rows: list[SandboxRow] = []
        for id, body in self._read("SELECT id, body FROM sandboxes", ()):
            try:
                rows.append(unpack(body, SandboxRow))
            except ProtocolError as error:
                raise _damaged(self.path, f"the row of {id} is not readable: {error}") from error
        self.events.knows(rows)
        return rows

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

    def read(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        """For those who have tables of their own in it."""
        return self._read(statement, values)

    def _read(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        try:
            return self._reader.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StorageError(f"the journal {self.path} cannot be read") from error

    async def _change(
        self,
        rows: Collection[SandboxRow],
        keys: Collection[KeyRow],
        *,
        spare: str | None = None,
        events: Collection[Event] = (),
    ) -> None:
        at, told = self._clock.wall_s(), list(events)
        for row in rows:
            told += self.events.of_row(row, self.events.state_of(row.id), at)

        def write(db: sqlite3.Connection) -> None:
            if spare is not None:
                _drop_spare(db, spare)
            for row in rows:
                _put_row(db, row)
            for key in keys:
                _put_key(db, key)

        await self._submit(write, {row.id: row.state for row in rows}, told)

    async def _submit(
        self, write: Write, states: Mapping[str, str | None] | None = None, events: Collection[Event] = ()
    ) -> None:
        """`states`: of sandboxes, from here on, so that what is asked for next follows on it."""
        states = states or {}
        before = {id: self.events.state_of(id) for id in states}
        for id, state in states.items():
            self.events.settle(id, state)

        def work(db: sqlite3.Connection) -> None:
            write(db)
            self.events.note(db, events)

        try:
            await self._writer.write(work)
        except StorageError:
            for id, state in before.items():
                self.events.settle(id, state)
            raise


def _connect(path: Path) -> sqlite3.Connection:
    # Nobody else should have it open; a copy that is being made is waited for.
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_S)


def take_node_id(path: Path, node: NodeId) -> None:
    """Before a journal is opened for the first time: the node has this id. Raises HostError when it has another."""
    db, found = _open(path, node)
    db.close()
    if found != node:
        raise HostError(
            f"the journal {path} is of node {found}, and this machine was given the id {node}",
            hint=f"issue an identity for {found}, or give the node another state directory",
        )


def _open(path: Path, node: NodeId | None = None) -> tuple[sqlite3.Connection, NodeId]:
    db = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists() or path.stat().st_size == 0:
            _check_nothing_is_known(path)
        db = _connect(path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        _check_schema(db, path)
        _check_pages(db, path)
        db.executescript(_SCHEMA + USAGE_SCHEMA + EVENTS_SCHEMA)
        widen_usage(db)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        node_id = _minted_id(db, node)
        path.chmod(0o600)
        return db, node_id
    except sqlite3.DatabaseError as error:
        if db is not None:
            db.close()
        if isinstance(error, sqlite3.OperationalError):  # of the disk or the directory, not of what is in the file
            raise StorageError(
                f"the journal {path} cannot be used: {error}", hint="is its disk full, or not writable?"
            ) from error
        raise _damaged(path, str(error)) from error
    except OSError as error:
        if db is not None:
            db.close()
        raise StorageError(f"the journal {path} cannot be used: {error}") from error
    except DsecError:
        if db is not None:
            db.close()
        raise


def _check_pages(db: sqlite3.Connection, path: Path) -> None:
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _damaged(path, str(verdict).splitlines()[-1])


def _damaged(path: Path, what: str) -> StorageError:
    return StorageError(
        f"the journal {path} is damaged: {what}",
        hint=f"put a copy of it back, or try `sqlite3 {path} .recover`; without it its sandboxes cannot be taken over: "
        "moved away, the next start says what is left of them",
    )


def _check_nothing_is_known(path: Path) -> None:
    """A node that has lost its journal must not begin an empty one: sandboxes may run that nobody would know of."""
    found_there = (found for found in path.parent.glob("*/sbx_*") if found.parent.name != ENDED_DIR)
    left = [found for found in found_there if _id_of(found) is not None]
    if not left:
        return
    ids = {id for found in left if (id := _id_of(found))}
    nodes = ", ".join(sorted({node_of(id) for id in ids}))
    places = ", ".join(sorted({f"{found.parent}/sbx_*" for found in left}))
    raise StorageError(
        f"the journal {path} is missing or empty, while there are things of {len(ids)} sandboxes",
        hint="put a copy of it back; or give them up: `dsec down --launcher`, write 1 to cgroup.kill of the cgroup2 "
        f"directory {nodes} below the configured cgroup_parent, and remove {places}",
    )


def _id_of(path: Path) -> SandboxId | None:
    try:
        return parse_sandbox_id(path.name)
    except InvalidArgumentError:
        return None


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise HostError(
            f"the journal {path} was written by a newer version (schema {version}; this one knows {SCHEMA_VERSION})",
            hint="start the newer version again, or give this one another state directory",
        )


def _minted_id(db: sqlite3.Connection, node: NodeId | None) -> NodeId:
    db.execute("INSERT OR IGNORE INTO meta (name, value) VALUES ('node_id', ?)", (node or new_node_id(),))
    (found,) = db.execute("SELECT value FROM meta WHERE name = 'node_id'").fetchone()
    return parse_node_id(found)


def _put_row(db: sqlite3.Connection, row: SandboxRow) -> None:
    db.execute("INSERT OR REPLACE INTO sandboxes (id, body) VALUES (?, ?)", (row.id, pack(row)))


def _put_key(db: sqlite3.Connection, key: KeyRow) -> None:
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
