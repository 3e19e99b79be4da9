"""A machine under Firecracker is written down in the middle of its life.

Firecracker writes all of its memory, whatever the machine has written of it, while it stands still; its disk is a file
by itself. What comes of that stands beside no template. Where the monitor notes which pages differ from what is on the
disk already, that is copied before, and only those are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.base import CapturedLayer
from dsec.backends.vm.capture import STATE_BYTES_MAX, Draft, Source, not_copied, take_file
from dsec.backends.vm.copying import PIECE_BYTES, Deadline, copy_file, data_of, open_written, write_sparse
from dsec.backends.vm.firecracker_machine import FirecrackerMachine, WrittenMemory
from dsec.backends.vm.saved import SavedMachines, SavedManifest
from dsec.backends.vm.templates import DISK, RAM, STATE
from dsec.core.errors import SandboxFaultError
from dsec.core.limits import MIB

_WRITTEN: Final = (".memory", ".state")  # in the directory of its disk, for as long as they are copied
_SLACK_BYTES: Final = MIB  # of a file, beside what is in it


class FirecrackerCapture(Draft):
    """As `Capture`. With `whole` its disk is copied, too; else it stays where it is, for the machine alone."""

    def __init__(
        self,
        saved: SavedMachines,
        source: Source,
        manifest: SavedManifest,
        machine: FirecrackerMachine,
        *,
        whole: bool = True,
    ) -> None:
        super().__init__(saved)
        self._source = source
        self._manifest = manifest
        self._machine = machine
        self._whole = whole
        self._copied: WrittenMemory | None = None

    async def look(self) -> bool:
        """What is written while it stands still is all of its memory, or what differs from the copy made here."""
        base = self._machine.differs_from
        if base is not None and base != self._copied and await asyncio.to_thread(self._copy_base, base):
            self._copied = base
        return True

    async def take(self, *, within_s: float) -> int:
        deadline = Deadline(within_s)
        memory, state = _WRITTEN
        try:
            await asyncio.to_thread(self._clean)
            differences = self._copied is not None and self._copied == self._machine.differs_from
            self._copied = None  # it is written into
            await self._machine.write_down(memory=memory, state=state, timeout_s=within_s, differences=differences)
            return await asyncio.to_thread(self._take, deadline, differences)
        finally:
            await asyncio.shield(asyncio.to_thread(self._clean))

    async def keep(self, run: tuple[str, ...] = ()) -> CapturedLayer:
        (self._work / RAM).chmod(self._source.memory_mode)
        kept = await self._finish(msgspec.structs.replace(self._manifest, overlays=0), shorten=False)
        if self._machine.notes_writes:
            self._machine.differs_from = WrittenMemory.of(self._saved.directory / kept.machine / RAM)
        return kept

    # ---- inside ------------------------------------------------------------------------------------

    def _copy_base(self, base: WrittenMemory) -> bool:
        fd = base.opened()
        if fd is None:
            return False
        try:
            (self._work / RAM).unlink(missing_ok=True)
            copy_file(fd, self._work / RAM, Deadline(float("inf")))
        finally:
            os.close(fd)
        return True

    def _take(self, deadline: Deadline, differences: bool) -> int:
        """Copies: what the monitor has written it could hold open, and write again."""
        memory, state = _WRITTEN
        source = self._source
        try:
            if differences:
                copied = self._copy_differences(memory, deadline)
            else:
                copied = self._copy(memory, self._work / RAM, deadline, size=source.memory_bytes)
            copied += self._copy(state, self._work / STATE, deadline, size=None)
            if self._whole:
                copied += take_file(source, source.disk, self._work / DISK, deadline)
        except OSError as error:
            raise not_copied(error) from error
        return copied

    def _copy_differences(self, name: str, deadline: Deadline) -> int:
        """Over the copy of what they differ from. What is a hole in the file is as it was."""
        size, copied = self._source.memory_bytes, 0
        fd = open_written(self._source.directory / name, owner=self._source.uid, bytes_max=size + _SLACK_BYTES)
        try:
            if os.fstat(fd).st_size != size:
                raise SandboxFaultError("what the monitor has written (memory) is not of the size that it should be")
            target = os.open(self._work / RAM, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for start, end in data_of(fd, size):
                    for at in range(start, end, PIECE_BYTES):
                        deadline.check()
                        piece = os.pread(fd, min(PIECE_BYTES, end - at), at)
                        copied += write_sparse(target, piece, at, over=True)
            finally:
                os.close(target)
        finally:
            os.close(fd)
        return copied

    def _copy(self, name: str, target: Path, deadline: Deadline, *, size: int | None) -> int:
        most = STATE_BYTES_MAX if size is None else size
        fd = open_written(self._source.directory / name, owner=self._source.uid, bytes_max=most + _SLACK_BYTES)
        try:
            found = os.fstat(fd).st_size
            if not 0 < found <= most or (size is not None and found != size):
                raise SandboxFaultError(
                    f"what the monitor has written ({name[1:]}) is not of the size that it should be"
                )
            target.unlink(missing_ok=True)
            return copy_file(fd, target, deadline)
        finally:
            os.close(fd)

    def _clean(self) -> None:
        for name in _WRITTEN:
            with contextlib.suppress(OSError):
                (self._source.directory / name).unlink()
