"""What a backend asks of the monitors: the same of QEMU and of Firecracker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from dsec.backends.vm.machine import Shape
from dsec.backends.vm.monitor import Confines, MonitorProcess
from dsec.backends.vm.templates import Template
from dsec.wire.jail import JailBind


class Machine(Protocol):
    """One that runs, by its monitor's control socket. All raise MonitorError or DeadlineError."""

    async def pause(self, *, timeout_s: float) -> None: ...

    async def resume(self, *, timeout_s: float) -> None: ...

    async def connect(self, factory: Callable[[], asyncio.Protocol], *, timeout_s: float) -> asyncio.Transport:
        """A stream to its agent; it supersedes the one of before."""
        ...

    def close(self) -> None:
        """Lets go; the machine runs on."""
        ...


M = TypeVar("M", bound=Machine)


class VmDriver(Protocol[M]):
    """Of one monitor program. A template and its clones are of the same driver."""

    @property
    def name(self) -> str:
        """qemu | firecracker"""
        ...

    @property
    def memory_mode(self) -> int:
        """Of the file of a memory that clones map."""
        ...

    @property
    def accelerator(self) -> str:
        """kvm | tcg"""
        ...

    @property
    def is_current(self) -> bool:
        """Its monitor is the program that it was made for."""
        ...

    @property
    def identity(self) -> dict[str, str]:
        """What a template depends on besides its kernel, its shape and its layers."""
        ...

    @property
    def shown(self) -> dict[str, str]:
        """For people."""
        ...

    def booting(
        self, directory: Path, shape: Shape, confines: Confines, layers: list[JailBind]
    ) -> AbstractAsyncContextManager[M]:
        """A machine that boots in `directory`, of whose memory a template can be made. Its end is the block's."""
        ...

    async def save(self, found: M, directory: Path) -> None:
        """Stops a machine that booted there and makes the template of it."""
        ...

    def prepare_clone(self, template: Template, directory: Path, shape: Shape, uid: int) -> None:
        """The clone's own disk, in an empty directory of its own. Blocking."""
        ...

    def spawn(
        self, template: Template, directory: Path, shape: Shape, confines: Confines, layers: list[JailBind]
    ) -> MonitorProcess:
        """The monitor of a clone. Raises LaunchError."""
        ...

    async def go_on(
        self, found: M, process: MonitorProcess, template: Template, confines: Confines, *, stand: bool = False
    ) -> None:
        """The machine goes on where the template was stopped, or stands there, as one that was paused. Raises
        LaunchError; the process is the caller's."""
        ...

    def control(self, sockets: Path, *, owner: int) -> M:
        """Of a machine that runs."""
        ...


def said_by(what: str, process: MonitorProcess) -> str:
    words = process.words()
    return f"{what}; it says: {words}" if words else what
