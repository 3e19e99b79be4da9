"""The Registry of one machine."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dsec.cluster.embedded.database import Database
from dsec.cluster.registry import (
    Bucket,
    Change,
    Entry,
    Snapshot,
    check_key,
    check_prefix,
    check_together,
    check_value,
    is_below,
    whole_ttl_s,
)
from dsec.core.clock import Clock
from dsec.core.errors import ConflictError, StorageError
from dsec.core.limits import REGISTRY_WATCH_CHANGES_MAX
from dsec.observe.logs import get_logger

log = get_logger(__name__)

_FAR_S: Final = 3_600.0
_RETRY_S: Final = 1.0


class EmbeddedRegistry:
    """Times to live count on the monotonic clock, so a step of the wall clock ends nothing; the wall clock says only
    how much is left after a restart."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._ends: dict[tuple[str, str], float] = {}  # on the monotonic clock
        self._watchers: set[_Watcher] = set()
        self._sooner = asyncio.Event()
        self._expiring: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Before anything else. Times to live of before go on with what was left of them."""
        now, wall = self._clock.monotonic_s(), self._clock.wall_s()
        select = "SELECT bucket, key, ttl_s, ends_at FROM kv WHERE ttl_s IS NOT NULL"
        for bucket, key, ttl_s, ends_at in await self._database.run(lambda db: db.execute(select).fetchall()):
            self._ends[bucket, key] = now + min(max(ends_at - wall, 0.0), ttl_s)
        self._expiring = asyncio.create_task(self._expire(), name="times to live")

    async def close(self) -> None:
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.gather(self._expiring, return_exceptions=True)

    async def get(self, bucket: Bucket, key: str) -> Entry | None:
        check_key(key)
        entry = await self._database.run(lambda db: _find(db, bucket, key))
        return entry if entry is not None and not self._over(bucket, key) else None

    async def entries(self, bucket: Bucket, prefix: str = "") -> list[Entry]:
        check_prefix(prefix)
        select = "SELECT key, value, revision FROM kv WHERE bucket = ? ORDER BY key"
        found = await self._database.run(lambda db: db.execute(select, (bucket,)).fetchall())
        return [Entry(*row) for row in found if is_below(row[0], prefix) and not self._over(bucket, row[0])]

    async def create(self, bucket: Bucket, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        def check(entry: Entry | None) -> None:
            if entry is not None:
                raise ConflictError(f"{bucket}/{key} is there already")

        return await self._write(bucket, key, value, ttl_s, check)

    async def create_all(
        self, bucket: Bucket, entries: Sequence[tuple[str, bytes]], *, ttl_s: float | None = None
    ) -> list[int]:
        check_together(bucket, entries)
        ttl = whole_ttl_s(ttl_s)
        ends_at = None if ttl is None else self._clock.wall_s() + ttl

        def work(db: sqlite3.Connection) -> list[int]:
            for key, _ in entries:
                if self._live(db, bucket, key) is not None:
                    raise ConflictError(f"{bucket}/{key} is there already")
            return [self._put(db, bucket, key, value, ttl, ends_at) for key, value in entries]

        def tell(revisions: list[int]) -> None:
            for (key, value), revision in zip(entries, revisions, strict=True):
                self._tell(bucket, key, value, revision)

        return await self._database.run(work, tell=tell)

    async def update(self, bucket: Bucket, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        return await self._write(bucket, key, value, ttl_s, _expects(bucket, key, revision))

    async def put(self, bucket: Bucket, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return await self._write(bucket, key, value, ttl_s, lambda _: None)

    async def delete(self, bucket: Bucket, key: str, *, revision: int | None = None) -> None:
        check_key(key)

        def work(db: sqlite3.Connection) -> int | None:
            entry = self._live(db, bucket, key)
            if revision is not None:
                _expects(bucket, key, revision)(entry)
            self._ends.pop((bucket, key), None)
            return _remove(db, bucket, key)

        await self._database.run(work, tell=lambda removed: self._tell(bucket, key, None, removed))

    async def watch(self, bucket: Bucket, prefix: str = "") -> AsyncGenerator[Snapshot | Change, None]:
        check_prefix(prefix)
        watcher = _Watcher(bucket, prefix)
        self._watchers.add(watcher)
        try:
            while True:
                watcher.begin()
                entries = await self.entries(bucket, prefix)
                known = max((entry.revision for entry in entries), default=0)
                yield Snapshot(tuple(entries))
                async for change in watcher.changes():
                    if change.revision > known:
                        yield change
        finally:
            self._watchers.discard(watcher)

    async def _write(
        self, bucket: Bucket, key: str, value: bytes, ttl_s: float | None, check: Callable[[Entry | None], None]
    ) -> int:
        check_key(key)
        check_value(value)
        ttl = whole_ttl_s(ttl_s)
        ends_at = None if ttl is None else self._clock.wall_s() + ttl

        def work(db: sqlite3.Connection) -> int:
            check(self._live(db, bucket, key))
            return self._put(db, bucket, key, value, ttl, ends_at)

        return await self._database.run(work, tell=lambda revision: self._tell(bucket, key, value, revision))

    def _put(
        self, db: sqlite3.Connection, bucket: str, key: str, value: bytes, ttl: int | None, ends_at: float | None
    ) -> int:
        revision = _next_revision(db, bucket)
        db.execute("INSERT OR REPLACE INTO kv VALUES (?, ?, ?, ?, ?, ?)", (bucket, key, revision, value, ttl, ends_at))
        # Here, and not after the commit is told of: whoever writes next in this thread finds it.
        if ttl is None:
            self._ends.pop((bucket, key), None)
        else:
            self._ends[bucket, key] = self._clock.monotonic_s() + ttl
        return revision

    def _live(self, db: sqlite3.Connection, bucket: str, key: str) -> Entry | None:
        return None if self._over(bucket, key) else _find(db, bucket, key)

    def _over(self, bucket: str, key: str) -> bool:
        ends = self._ends.get((bucket, key))
        return ends is not None and ends <= self._clock.monotonic_s()

    def _tell(self, bucket: str, key: str, value: bytes | None, revision: int | None) -> None:
        self._sooner.set()
        if revision is None:
            return  # nothing was there to be removed
        for watcher in self._watchers:
            if watcher.bucket == bucket and is_below(key, watcher.prefix):
                watcher.add(Change(key, value, revision))

    async def _expire(self) -> None:
        while True:
            self._sooner.clear()
            now = self._clock.monotonic_s()
            # Copied at once: the thread changes it.
            for bucket, key in [place for place, ends in list(self._ends.items()) if ends <= now]:
                await self._bury(bucket, key)
            due = min(list(self._ends.values()), default=now + _FAR_S) - self._clock.monotonic_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(due, 0.0)):
                    await self._sooner.wait()

    async def _bury(self, bucket: str, key: str) -> None:
        def work(db: sqlite3.Connection) -> int | None:
            if not self._over(bucket, key):
                return None  # it was written again
            self._ends.pop((bucket, key), None)
            return _remove(db, bucket, key)

        try:
            await self._database.run(work, tell=lambda removed: self._tell(bucket, key, None, removed))
        except StorageError as error:
            log.warning("what is over could not be removed; it counts as gone", bucket=bucket, error=str(error))
            await asyncio.sleep(_RETRY_S)


@dataclass(eq=False)
class _Watcher:
    bucket: str
    prefix: str
    _changes: deque[Change] = field(default_factory=deque)
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _behind: bool = False

    def begin(self) -> None:
        self._changes.clear()
        self._behind = False

    def add(self, change: Change) -> None:
        if len(self._changes) < REGISTRY_WATCH_CHANGES_MAX:
            self._changes.append(change)
        else:
            self._behind = True
        self._woken.set()

    async def changes(self) -> AsyncGenerator[Change, None]:
        """Until some are lost."""
        while True:
            while self._changes:
                yield self._changes.popleft()
            if self._behind:
                return
            self._woken.clear()
            await self._woken.wait()


def _expects(bucket: str, key: str, revision: int) -> Callable[[Entry | None], None]:
    def check(entry: Entry | None) -> None:
        if entry is None or entry.revision != revision:
            raise ConflictError(f"{bucket}/{key} is not at revision {revision} any more")

    return check


def _find(db: sqlite3.Connection, bucket: str, key: str) -> Entry | None:
    found = db.execute("SELECT key, value, revision FROM kv WHERE bucket = ? AND key = ?", (bucket, key)).fetchone()
    return Entry(*found) if found else None


def _remove(db: sqlite3.Connection, bucket: str, key: str) -> int | None:
    if db.execute("DELETE FROM kv WHERE bucket = ? AND key = ?", (bucket, key)).rowcount == 0:
        return None
    return _next_revision(db, bucket)


def _next_revision(db: sqlite3.Connection, bucket: str) -> int:
    (revision,) = db.execute(
        "INSERT INTO revisions VALUES (?, 1) ON CONFLICT (bucket) DO UPDATE SET last = last + 1 RETURNING last",
        (bucket,),
    ).fetchone()
    return int(revision)
