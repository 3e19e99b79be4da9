"""A machine under QEMU that runs: its control socket, and the serial ports to its agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsec.backends.vm.ports import AgentPorts
from dsec.backends.vm.qmp import Monitor

_MONITOR_S: Final = 10.0


class QemuMachine:
    def __init__(self, sockets: Path, *, owner: int) -> None:
        self._sockets = sockets
        self._owner = owner
        self._monitor: Monitor | None = None
        self._ports = AgentPorts(sockets, owner=owner)

    def take(self, monitor: Monitor) -> None:
        """A connection that somebody has made already."""
        self._monitor = monitor

    async def monitor(self) -> Monitor:
        """Connected when it is needed: QEMU serves one at a time, and a node that was killed has left none."""
        if self._monitor is None or self._monitor.closed:
            self._monitor = await Monitor.connect(self._sockets / "qmp", timeout_s=_MONITOR_S, owner=self._owner)
        return self._monitor

    async def pause(self, *, timeout_s: float) -> None:
        """Its processors stand still, and its clock with them."""
        await (await self.monitor()).execute("stop", timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        await (await self.monitor()).execute("cont", timeout_s=timeout_s)

    async def connect(self, factory: Callable[[], asyncio.Protocol], *, timeout_s: float) -> asyncio.Transport:
        return await self._ports.connect(factory, timeout_s=timeout_s)

    def close(self) -> None:
        self._ports.close()
        if self._monitor is not None:
            self._monitor.close()
