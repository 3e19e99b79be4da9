"""Who writes the journal: in the event loop, where a write costs less than telling a thread of it; in a thread what may
take long, and everything meanwhile waits for it.

What was asked for in one turn of the loop is one transaction. A write ends in the page cache, as the exec logs' do.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from dsec.core.errors import StorageError
from dsec.core.faults import fault_point

Write = Callable[[sqlite3.Connection], Any]

_BATCH_MAX: Final = 512
_QUEUE_MAX: Final = 65_536
_BUSY_S = 10.0  # somebody else has the journal: a copy that is being made is waited for
_CHECKPOINT_WRITES: Final = 200  # of some six pages each: the log is about as long as SQLite itself would let it become


class JournalWriter:
    """Owns the connection, which nobody else uses. Made by `Journal.open`, in the loop that asks for writes."""

    def __init__(self, db: sqlite3.Connection, *, settled: Callable[[], None] = lambda: None) -> None:
        """`settled` is called after each transaction."""
        self._db = db
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._jobs: list[_Job] = []
        self._called = False  # the next turn of the loop writes
        self._away: asyncio.Future[None] | None = None  # the thread has the connection
        self._thread = ThreadPoolExecutor(1, "journal")
        self._unchecked = 0
        self._closed = False
        db.execute("PRAGMA busy_timeout = 0")
        db.execute("PRAGMA wal_autocheckpoint = 0")

    async def write(self, write: Write, *, long: bool = False) -> None:
        """Returns when it is written; it happens, whatever becomes of who asked for it. `long`: not in the loop.
        Raises StorageError."""
        if self._closed:
            raise StorageError("the journal is closed")
        if len(self._jobs) >= _QUEUE_MAX:
            raise StorageError(f"{_QUEUE_MAX} writes wait for the journal's disk")
        job = _Job(write, self._loop.create_future(), long)
        self._jobs.append(job)
        self._call()
        await asyncio.shield(job.done)

    async def close(self) -> None:
        """Writes what was asked for, and ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        while self._jobs or self._away is not None:
            if self._away is not None:
                await asyncio.wait([self._away])
            else:
                self._write_waiting()
        await self._loop.run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._called = False
        if self._away is None and self._jobs:
            self._write_waiting()

    def _write_waiting(self) -> None:
        batch, self._jobs = self._jobs[:_BATCH_MAX], self._jobs[_BATCH_MAX:]
        left = batch if any(job.long for job in batch) else _write_batch(self._db, batch)
        if left:
            self._give_away(lambda: _write_patiently(self._db, left), left)
        _settle([job for job in batch if job not in left] if left else batch)
        self._settled()
        self._unchecked += len(batch)
        if self._unchecked >= _CHECKPOINT_WRITES and self._away is None:
            self._unchecked = 0
            self._give_away(lambda: _checkpoint(self._db), [])
        if self._jobs:
            self._call()

    def _give_away(self, work: Callable[[], None], batch: list[_Job]) -> None:
        self._away = self._loop.run_in_executor(self._thread, work)
        self._away.add_done_callback(lambda away: self._back(away, batch))

    def _back(self, away: asyncio.Future[None], batch: list[_Job]) -> None:
        self._away = None
        if (error := away.exception()) is not None:
            for job in batch:
                job.error = error
        _settle(batch)
        self._settled()
        if self._jobs:
            self._call()


class _Job:
    __slots__ = ("done", "error", "long", "write")

    def __init__(self, write: Write, done: asyncio.Future[None], long: bool) -> None:
        self.write = write
        self.done = done
        self.long = long
        self.error: BaseException | None = None


def _write_batch(db: sqlite3.Connection, batch: list[_Job]) -> list[_Job]:
    """Gives those that are left, as another program has the journal. A failure is in its job."""
    try:
        _transact(db, batch)
    except sqlite3.OperationalError as error:
        if _is_busy(error):
            return batch
        return _write_each(db, batch, error)
    except Exception as error:
        return _write_each(db, batch, error)
    return []


def _write_each(db: sqlite3.Connection, batch: list[_Job], error: Exception) -> list[_Job]:
    """One job's failure is its own: each gets a transaction of its own."""
    if len(batch) == 1:
        batch[0].error = error
        return []
    return [left for job in batch for left in _write_batch(db, [job])]


def _write_patiently(db: sqlite3.Connection, batch: list[_Job]) -> None:
    db.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
    try:
        for job in _write_batch(db, batch):
            job.error = sqlite3.OperationalError("database is locked")
    finally:
        db.execute("PRAGMA busy_timeout = 0")


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def _transact(db: sqlite3.Connection, batch: list[_Job]) -> None:
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


def _checkpoint(db: sqlite3.Connection) -> None:
    """From the log into the database. What fails is tried again with the next; nothing of it is lost."""
    with contextlib.suppress(sqlite3.Error):
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        # The first write after that begins the log anew, which waits for the disk: here rather than in the loop.
        db.execute("UPDATE meta SET value = value WHERE name = 'node_id'")


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
