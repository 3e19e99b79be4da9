"""Records of sandboxes that have ended: what their commands said, while their tombstones tell how they ended.

A directory moves here by one rename once the tombstone is written. A node that is killed in between leaves it where
those of living sandboxes are, and the next one takes it in from there. Nothing is here without a tombstone.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from dsec.core.errors import ProtocolError, UnavailableError
from dsec.core.faults import fault_point
from dsec.core.limits import ENDED_RECORDS_MAX, TOMBSTONE_TTL_S
from dsec.node.exectable import ExecTable
from dsec.node.recordplace import RecordPlace
from dsec.node.rows import Tombstone
from dsec.node.tasks import Tasks
from dsec.observe.logs import get_logger
from dsec.storage.volumes import REMOVED
from dsec.wire.records import Sandbox

log = get_logger(__name__)

_OPEN_MAX: Final = 2  # tables that are kept in memory for whoever asks again; one may take some 100 MB
_PRUNED_AT_ONCE: Final = 100  # then others get their turn


class Kept(NamedTuple):
    ended_at: float
    bytes: int  # on the disk


class EndedRecords:
    """Bounded in time by the tombstones, and in bytes and number, all sandboxes together: the oldest ends go first."""

    def __init__(
        self, directory: Path, *, bytes_max: int, buried: Callable[[str], Tombstone | None], tasks: Tasks
    ) -> None:
        self.directory = directory
        self.bytes = 0
        self._bytes_max = bytes_max
        self._buried = buried
        self._tasks = tasks
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # in order of their ends
        self._open: OrderedDict[str, ExecTable] = OrderedDict()  # asked for last at the end
        self._opening = asyncio.Lock()
        self._doomed: list[Path] = []
        self._removing = False

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, id: str) -> bool:
        return id in self._kept

    # -- coming ------------------------------------------------------------------------------------

    async def load(self, records: Path, living: Collection[str]) -> None:
        """What an earlier process has left here and in `records`, where those of `living` stay. Raises OSError and
        StorageError.

        Before anything of this process is kept.
        """
        doomed = []
        for path in await asyncio.to_thread(_entries, records):
            if path.name not in living and not self._take_in(path):
                doomed.append(path)
        ends = {}
        for path in await asyncio.to_thread(_entries, self.directory):
            ended_at = self._end_of(path.name)
            if ended_at is None:
                doomed.append(path)
            else:
                ends[path] = ended_at
        found = await asyncio.to_thread(_measured, ends, doomed)
        for path in sorted(found, key=lambda path: found[path].ended_at):
            self._add(path.name, found[path])

    def keep(self, table: ExecTable, ended_at: float) -> None:
        """Of a sandbox whose tombstone has just been written. What cannot be kept is removed. Never raises."""
        path = self.directory / table.sandbox
        try:
            fault_point("node.ended.keep")
            if not table.move(path):
                return
            kept = _measure(path, ended_at)
        except OSError as error:
            log.warning("the records of an ended sandbox are not kept", sandbox=table.sandbox, error=str(error))
            table.close()
            _remove(table.directory)
            return
        if kept.bytes > self._bytes_max:
            self._put_away(path)  # it would drive out all others, and not fit even then
        else:
            self._add(table.sandbox, kept)

    # -- being read --------------------------------------------------------------------------------

    async def open(self, sandbox: Sandbox) -> ExecTable | None:
        """The execs of an ended sandbox, for reading; None when they are not kept. Raises StorageError."""
        async with self._opening:  # a log may be large: one at a time
            found = self._open.pop(sandbox.id, None)
            if found is None and sandbox.id in self._kept:
                found = await self._read(sandbox)
            if found is None:
                return None
            if sandbox.id not in self._kept:  # dropped while it was read
                found.close()
                return None
            self._open[sandbox.id] = found
            while len(self._open) > _OPEN_MAX:
                self._open.popitem(last=False)[1].close()
            return found

    async def _read(self, sandbox: Sandbox) -> ExecTable:
        table = ExecTable(sandbox.id, RecordPlace(self.directory, bytes_max=0, has_room=lambda: False))
        table.load_ended(await asyncio.to_thread(table.read_log), sandbox)
        return table

    # -- going -------------------------------------------------------------------------------------

    def drop_oldest(self) -> bool:
        """Its room is free when this returns, unless somebody reads it. False when there is none."""
        if not self._kept:
            return False
        self._drop(next(iter(self._kept)), at_once=True)
        return True

    async def prune(self, now: float) -> None:
        """Those whose tombstones are past their time."""
        old = [id for id, kept in self._kept.items() if kept.ended_at < now - TOMBSTONE_TTL_S]
        for index, id in enumerate(old, 1):
            if id in self._kept:
                self._drop(id)
            if index % _PRUNED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    # -- inside ------------------------------------------------------------------------------------

    def _take_in(self, path: Path) -> bool:
        if self._end_of(path.name) is None:
            return False
        with suppress(OSError):
            path.rename(self.directory / path.name)
            return True
        return False

    def _end_of(self, name: str) -> float | None:
        """None without a tombstone that can be read."""
        try:
            tombstone = self._buried(name)
        except ProtocolError:
            return None
        return None if tombstone is None else tombstone.sandbox.ended_at or 0.0

    def _add(self, id: str, kept: Kept) -> None:
        self._kept[id] = kept
        self.bytes += kept.bytes
        while self.bytes > self._bytes_max or len(self._kept) > ENDED_RECORDS_MAX:
            self._drop(next(iter(self._kept)))

    def _drop(self, id: str, *, at_once: bool = False) -> None:
        kept = self._kept.pop(id)
        self.bytes -= kept.bytes
        table = self._open.pop(id, None)
        if table is not None:
            table.close()
        self._put_away(self.directory / id, at_once=at_once)

    def _put_away(self, path: Path, *, at_once: bool = False) -> None:
        """By one rename, so that a half of it is never taken for the whole; what a kill leaves goes at the start."""
        doomed = path.with_name(f"{REMOVED}{path.name}")
        try:
            path.rename(doomed)
        except OSError as error:
            log.warning("records of an ended sandbox resist", sandbox=path.name, error=str(error))
            return
        if at_once:
            _remove(doomed)
            return
        self._doomed.append(doomed)
        if not self._removing:
            with suppress(UnavailableError):  # the node stops
                self._tasks.spawn(self._remove_doomed(), finishes=True)

    async def _remove_doomed(self) -> None:
        self._removing = True
        try:
            while self._doomed:
                doomed, self._doomed = self._doomed, []
                await asyncio.to_thread(_remove_all, doomed)
        finally:
            self._removing = False


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def _measured(ends: dict[Path, float], doomed: list[Path]) -> dict[Path, Kept]:
    """What there is of `ends`; `doomed`, and what cannot be looked at, is removed."""
    found = {}
    for path, ended_at in ends.items():
        try:
            found[path] = _measure(path, ended_at)
        except OSError:
            doomed.append(path)
    _remove_all(doomed)
    return found


def _measure(path: Path, ended_at: float) -> Kept:
    """Records are sparse: what counts is what they take."""
    return Kept(ended_at, 512 * sum(entry.lstat().st_blocks for entry in (path, *path.iterdir())))


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
