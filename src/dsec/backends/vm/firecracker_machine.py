"""A machine under Firecracker that runs: its control socket, and the way to its agent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.vm.firecracker_api import FirecrackerApi
from dsec.backends.vm.vsock import AgentVsock
from dsec.core.errors import SandboxFaultError

AGENT_PORT: Final = 1024
API: Final = "api"
VSOCK: Final = "vsock"
_OWN: Final = "/disk"  # in the jail: where it may write


@dataclass(frozen=True, slots=True)
class WrittenMemory:
    """A file with all of a machine's memory, as it was when the monitor began to note which pages differ from it."""

    path: Path
    mark: tuple[int, int, int, int]

    @classmethod
    def of(cls, path: Path) -> WrittenMemory:
        """Raises OSError."""
        return cls(path, _mark_of(path.stat(follow_symlinks=False)))

    def opened(self) -> int | None:
        """For reading; None when it is not that file any more."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        if _mark_of(os.fstat(fd)) == self.mark:
            return fd
        os.close(fd)
        return None


def _mark_of(info: os.stat_result) -> tuple[int, int, int, int]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


class FirecrackerMachine:
    def __init__(self, sockets: Path, *, owner: int) -> None:
        self.notes_writes = False
        self.differs_from: WrittenMemory | None = None  # None: nobody knows, or they are not noted
        self.api = FirecrackerApi(sockets / API, owner=owner)
        self._vsock = AgentVsock(sockets / VSOCK, AGENT_PORT, owner=owner)
        self._written = False

    async def pause(self, *, timeout_s: float) -> None:
        """Its processors stand still."""
        await self.api.patch("/vm", {"state": "Paused"}, timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        await self.api.patch("/vm", {"state": "Resumed"}, timeout_s=timeout_s)
        written, self._written = self._written, False
        if written:
            # Its guest is told to forget its connections, as if it were the one that goes on from what was written.
            self._vsock.close()
            await asyncio.sleep(0)  # whoever speaks to it next knows

    async def write_down(self, *, memory: str, state: str, timeout_s: float, differences: bool = False) -> None:
        """Of one that stands still: files in the directory of its disk. With `differences` of its memory only what is
        other than in `differs_from`; from then on that is what is written here. Raises SandboxFaultError when it runs;
        after a DeadlineError they may yet be written."""
        facts = await self.api.get("/", timeout_s=timeout_s)
        if facts.get("state") != "Paused":
            raise SandboxFaultError("the machine does not stand still")
        self._written, self.differs_from = True, None
        kind = "Diff" if differences else "Full"
        paths = {"snapshot_path": f"{_OWN}/{state}", "mem_file_path": f"{_OWN}/{memory}"}
        await self.api.put("/snapshot/create", {"snapshot_type": kind, **paths}, timeout_s=timeout_s)

    async def connect(self, factory: Callable[[], asyncio.Protocol], *, timeout_s: float) -> asyncio.Transport:
        return await self._vsock.connect(factory, timeout_s=timeout_s)

    def close(self) -> None:
        self._vsock.close()
