"""One SQLite file and the one thread that works on it: what gathers while it syncs is committed together."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from dsec.core.errors import DsecError, HostError, StorageError
from dsec.core.faults import fault_point

T = TypeVar("T")

SCHEMA_VERSION: Final = 1
_BATCH_MAX: Final = 256
_QUEUE_MAX: Final = 16_384
_BUSY_S: Final = 10.0
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS kv (
    bucket TEXT NOT NULL, key TEXT NOT NULL, revision INTEGER NOT NULL, value BLOB NOT NULL, ttl_s REAL, ends_at REAL,
    PRIMARY KEY (bucket, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS revisions (bucket TEXT PRIMARY KEY, last INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, stream TEXT NOT NULL, subject TEXT NOT NULL, id TEXT NOT NULL,
    body BLOB NOT NULL, UNIQUE (stream, id)
);
CREATE INDEX IF NOT EXISTS log_subject ON log (stream, subject, sequence);
"""


class Database:
    """Opened with `open`. `run` answers once what the work has written is on the disk."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_QUEUE_MAX)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._thread = threading.Thread(
            target=_work, args=(connection, self._jobs, self._loop), name="cluster state", daemon=True
        )
        self._thread.start()

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Raises HostError when a newer version wrote it, StorageError when it cannot be used."""
        return cls(path, await asyncio.to_thread(_open, path))

    async def run(self, work: Callable[[sqlite3.Connection], T], *, tell: Callable[[T], None] | None = None) -> T:
        """`work` reads and writes in the thread, inside a transaction that it may share. It raises DsecErrors, and then
        must have written nothing. `tell` hears of its result in the loop, in the order of writing, also when the caller
        has been cancelled: the work is done all the same."""
        if self._closed:
            raise StorageError(f"{self.path} is closed")
        job = _Job(work, self._loop.create_future(), tell)
        try:
            self._jobs.put_nowait(job)
        except queue.Full as error:
            raise StorageError(f"{_QUEUE_MAX} writes wait for the disk of {self.path}") from error
        answer: T = await asyncio.shield(job.done)
        return answer

    async def close(self) -> None:
        """What was asked for is done first. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._jobs.put, None)
            await asyncio.to_thread(self._thread.join)


class _Job:
    __slots__ = ("done", "error", "result", "tell", "work")

    def __init__(
        self,
        work: Callable[[sqlite3.Connection], Any],
        done: asyncio.Future[Any],
        tell: Callable[[Any], None] | None,
    ) -> None:
        self.work = work
        self.done = done
        self.tell = tell
        self.result: Any = None
        self.error: BaseException | None = None


def _work(db: sqlite3.Connection, jobs: queue.Queue[_Job | None], loop: asyncio.AbstractEventLoop) -> None:
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
            _attempt(db, work)
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(_settle, work)


def _attempt(db: sqlite3.Connection, batch: list[_Job]) -> None:
    try:
        _transact(db, batch)
    except Exception as error:
        if len(batch) == 1:
            batch[0].error = error
            return
        for job in batch:  # one job's failure is its own: each gets a transaction of its own
            _attempt(db, [job])


def _transact(db: sqlite3.Connection, batch: list[_Job]) -> None:
    if not batch:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        for job in batch:
            job.result = job.error = None
            fault_point("cluster.embedded.write")
            try:
                job.result = job.work(db)
            except DsecError as error:
                job.error = error
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _settle(batch: list[_Job]) -> None:
    for job in batch:
        if job.error is None and job.tell is not None:
            job.tell(job.result)
        if job.done.done():
            continue
        if job.error is None:
            job.done.set_result(job.result)
        elif isinstance(job.error, DsecError):
            job.done.set_exception(job.error)
        else:
            failure = StorageError("shared state could not be written", hint="is the disk of its state directory full?")
            failure.__cause__ = job.error
            job.done.set_exception(failure)


def _open(path: Path) -> sqlite3.Connection:
    db = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_S)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise HostError(
                f"{path} was written by a newer version (schema {version}; this one knows {SCHEMA_VERSION})",
                hint="start the newer version again",
            )
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        path.chmod(0o600)
        return db
    except (sqlite3.Error, OSError) as error:
        if db is not None:
            db.close()
        raise StorageError(f"{path} cannot be used: {error}", hint="is its disk full, or not writable?") from error
    except DsecError:
        if db is not None:
            db.close()
        raise
