"""A machine under Firecracker is written down in the middle of its life.

Firecracker writes all of its memory, whatever the machine has written of it, while it stands still; its disk is a file
by itself. What comes of that stands beside no template.
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
from dsec.backends.vm.copying import Deadline, copy_file, open_written
from dsec.backends.vm.firecracker_machine import FirecrackerMachine
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

    async def look(self) -> bool:
        return True  # all of its memory is written once it stands still

    async def take(self, *, within_s: float) -> int:
        deadline = Deadline(within_s)
        memory, state = _WRITTEN
        try:
            await asyncio.to_thread(self._clean)
            await self._machine.write_down(memory=memory, state=state, timeout_s=within_s)
            return await asyncio.to_thread(self._take, deadline)
        finally:
            await asyncio.shield(asyncio.to_thread(self._clean))

    async def keep(self, run: tuple[str, ...] = ()) -> CapturedLayer:
        (self._work / RAM).chmod(self._source.memory_mode)
        return await self._finish(msgspec.structs.replace(self._manifest, overlays=0), shorten=False)

    # ---- inside ------------------------------------------------------------------------------------

    def _take(self, deadline: Deadline) -> int:
        """Copies: what the monitor has written it could hold open, and write again."""
        memory, state = _WRITTEN
        source = self._source
        try:
            copied = self._copy(memory, self._work / RAM, deadline, size=source.memory_bytes)
            copied += self._copy(state, self._work / STATE, deadline, size=None)
            if self._whole:
                copied += take_file(source, source.disk, self._work / DISK, deadline)
        except OSError as error:
            raise not_copied(error) from error
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
