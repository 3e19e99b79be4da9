"""A machine under QEMU is written down in the middle of its life: memory, devices, disks, at one moment.

Before it stands still all that never changes is copied, or given a second name; while it does, what it has written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.base import CapturedLayer
from dsec.backends.vm.copying import PIECE_BYTES, Deadline, copy_file, link_or_copy, open_written, write_sparse
from dsec.backends.vm.guestmemory import GuestMemory
from dsec.backends.vm.machine import TEMPLATE
from dsec.backends.vm.qmp import Monitor
from dsec.backends.vm.saved import OVERLAY, SavedMachine, SavedMachines, SavedManifest
from dsec.backends.vm.screens import SCREEN, take_screen
from dsec.backends.vm.shortening import shortened
from dsec.backends.vm.templates import RAM, STATE
from dsec.core.errors import HostError, SandboxFaultError, StorageError
from dsec.core.limits import MIB

STATE_BYTES_MAX: Final = 64 * MIB  # of all devices; it is some 200 KiB
_DISK_SLACK_BYTES: Final = 64 * MIB  # tables of a qcow2, beside what is in it


@dataclass(frozen=True, slots=True)
class Below:
    """A file that the machine's disk stands on, and that nobody writes: `names` are those that it may have on the host,
    `name` what it is called in a saved machine."""

    path: str  # as the monitor sees it
    name: str
    names: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be written down."""

    sandbox: str
    pid: int
    uid: int
    directory: Path  # its own, which its monitor can write
    disk: str  # the file of its own disk, there
    memory_bytes: int
    disk_bytes: int
    below: Sequence[Below]
    overlays: int  # of those
    copied: Sequence[str] = ()  # further files of its own
    screen: bool = False
    memory_mode: int = 0o444  # of the file of its memory
    flat: bool = False  # its disk is a file by itself, and not one above others


class Draft:
    """A snapshot while it is made: its directory is removed unless it was kept."""

    def __init__(self, saved: SavedMachines) -> None:
        self._saved = saved
        self._work, self._lock = saved.begin()
        self._kept: SavedMachine | None = None
        self._closed = False

    async def _finish(self, manifest: SavedManifest, *, shorten: bool) -> CapturedLayer:
        """`shorten`: no machine has its disk above these overlays yet, and they may become fewer."""
        if shorten:
            manifest = await asyncio.to_thread(shortened, self._saved, self._work, manifest)
        self._kept = await asyncio.to_thread(self._saved.finish, self._work, manifest)
        size = await asyncio.to_thread(_allocated, self._kept.directory)
        return CapturedLayer("", size, 0, machine=self._kept.id)

    async def close(self) -> None:
        """What was kept is held until here."""
        if self._closed:
            return
        self._closed = True
        os.close(self._lock)
        if self._kept is not None:
            self._saved.let_go(self._kept.id)
        else:
            await asyncio.to_thread(shutil.rmtree, self._work, ignore_errors=True)


class MachineCapture(Draft):
    """As `Capture`. With `whole` its disk is copied, too; else it stays where it is, for the machine alone."""

    def __init__(
        self,
        saved: SavedMachines,
        source: Source,
        manifest: SavedManifest,
        monitor: Callable[[], Awaitable[Monitor]],
        *,
        whole: bool = True,
    ) -> None:
        """`monitor`: gives a connection to it."""
        super().__init__(saved)
        self._source = source
        self._manifest = manifest
        self._monitor = monitor
        self._whole = whole
        self._looked = False

    async def look(self) -> bool:
        if not self._looked:
            await asyncio.to_thread(self._begin)
            self._looked = True
        return True

    async def take(self, *, within_s: float) -> int:
        await self.look()
        deadline = Deadline(within_s)
        try:
            monitor = await self._monitor()
            await self._take_devices(monitor, within_s)
            copied = await asyncio.to_thread(self._take_rest, deadline)
            if self._source.screen and (content := await take_screen(monitor, self._source.pid)) is not None:
                await asyncio.to_thread(_write, self._work / SCREEN, content)
                copied += len(content)
        except OSError as error:
            raise not_copied(error) from error
        return copied

    async def keep(self, run: tuple[str, ...] = ()) -> CapturedLayer:
        overlays = self._source.overlays + (1 if self._whole else 0)
        (self._work / RAM).chmod(self._source.memory_mode)
        return await self._finish(msgspec.structs.replace(self._manifest, overlays=overlays), shorten=self._whole)

    # ---- inside ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        source = self._source
        memory = GuestMemory.of(source.pid, f"{TEMPLATE}/{RAM}", source.memory_bytes)
        try:
            fd = os.open(self._work / RAM, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, source.memory_bytes)
                memory.copy_file(fd)
            finally:
                os.close(fd)
            opened = _opened(source.pid)
            for below in source.below:
                self._keep_below(below, opened)
        except OSError as error:
            raise not_copied(error) from error

    def _keep_below(self, below: Below, opened: dict[str, str]) -> None:
        path = opened.get(below.path)
        if path is None:
            raise SandboxFaultError(f"the monitor has not opened {below.path}")
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SandboxFaultError(f"{below.path} of the monitor is no file")
            target = self._work / below.name
            name = next((name for name in below.names if _is_same(name, fd)), None)
            deadline = Deadline(float("inf"))
            if name is None:
                copy_file(fd, target, deadline)
            else:
                link_or_copy(name, fd, target, deadline)
        finally:
            os.close(fd)

    async def _take_devices(self, monitor: Monitor, within_s: float) -> None:
        status = await monitor.execute("query-status")
        if not isinstance(status, dict) or status.get("running") is not False:
            raise SandboxFaultError("the machine does not stand still")
        # What the monitor writes it could hold open, and write again: another file is kept than it was given.
        with tempfile.TemporaryFile(dir=self._work) as given:
            fd = os.open(f"/proc/self/fd/{given.fileno()}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                await monitor.write_to(fd, "xen-save-devices-state", {"live": False}, timeout_s=within_s)
            finally:
                os.close(fd)
            content = os.pread(given.fileno(), STATE_BYTES_MAX + 1, 0)
        if not 0 < len(content) <= STATE_BYTES_MAX:
            raise HostError("the state that the monitor has written is none, or too large")
        (self._work / STATE).write_bytes(content)
        (self._work / STATE).chmod(0o444)

    def _take_rest(self, deadline: Deadline) -> int:
        source = self._source
        try:
            memory = GuestMemory.of(source.pid, f"{TEMPLATE}/{RAM}", source.memory_bytes)
            fd = os.open(self._work / RAM, os.O_RDWR | os.O_CLOEXEC)
            try:
                copied = memory.copy_own(fd, deadline)
            finally:
                os.close(fd)
            if self._whole:
                copied += take_file(source, source.disk, self._work / OVERLAY.format(source.overlays + 1), deadline)
            for name in source.copied:
                copied += take_file(source, name, self._work / name, deadline)
        except OSError as error:
            raise not_copied(error) from error
        return copied


class SleepingCapture(Draft):
    """As `Capture`, of a machine that is on the disk already; only its own disk is copied."""

    def __init__(self, saved: SavedMachines, asleep: SavedMachine, source: Source) -> None:
        super().__init__(saved)
        self._asleep = asleep
        self._source = source

    async def look(self) -> bool:
        return True

    async def take(self, *, within_s: float) -> int:
        return await asyncio.to_thread(self._take, Deadline(within_s))

    def _take(self, deadline: Deadline) -> int:
        try:
            for name in self._asleep.manifest.files:
                path = self._asleep.directory / name
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    link_or_copy(path, fd, self._work / name, deadline)
                finally:
                    os.close(fd)
            return take_file(self._source, self._source.disk, self._work / self._overlay, deadline)
        except OSError as error:
            raise not_copied(error) from error

    @property
    def _overlay(self) -> str:
        return self._source.disk if self._source.flat else OVERLAY.format(self._asleep.manifest.overlays + 1)

    async def keep(self, run: tuple[str, ...] = ()) -> CapturedLayer:
        manifest = self._asleep.manifest
        more = 0 if self._source.flat else 1
        return await self._finish(msgspec.structs.replace(manifest, overlays=manifest.overlays + more), shorten=True)


def take_file(source: Source, own: str, target: Path, deadline: Deadline) -> int:
    """A file that its monitor can write. Raises DeadlineError, SandboxFaultError, StorageError."""
    bytes_max = source.disk_bytes * 9 // 8 + _DISK_SLACK_BYTES
    fd = open_written(source.directory / own, owner=source.uid, bytes_max=bytes_max)
    try:
        target.unlink(missing_ok=True)
        return copy_file(fd, target, deadline)
    finally:
        os.close(fd)


def _opened(pid: int) -> dict[str, str]:
    """Of a monitor: files that it has open, by the names by which it knows them."""
    found = {}
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found[str(path.readlink()).removesuffix(" (deleted)")] = str(path)
    except OSError as error:
        raise SandboxFaultError(f"the machine has ended: {error.strerror}") from error
    return found


def _is_same(name: Path, fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(name.stat(follow_symlinks=False), os.fstat(fd))
    return False


def not_copied(error: OSError) -> StorageError:
    return StorageError(f"the machine cannot be copied: {error.strerror}", hint="is the disk full?")


def _write(path: Path, content: bytes) -> None:
    """What shows nothing takes no room."""
    try:
        with path.open("wb") as file:
            file.truncate(len(content))
            for at in range(0, len(content), PIECE_BYTES):
                write_sparse(file.fileno(), content[at : at + PIECE_BYTES], at, over=False)
    except OSError as error:
        raise StorageError(f"{path.name} of a machine cannot be written: {error.strerror}") from error


def _allocated(directory: Path) -> int:
    """Of files that no other machine has."""
    infos = [path.stat(follow_symlinks=False) for path in directory.iterdir()]
    return sum(info.st_blocks * 512 for info in infos if info.st_nlink == 1)
