"""One running full machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from dsec.backends.fullvm.absent import connect_absent
from dsec.backends.fullvm.record import FullvmRecord
from dsec.backends.fullvm.screen import MachineScreen
from dsec.backends.vm.instance import AGENT_S, MachineInstance, Remover
from dsec.backends.vm.monitor import MonitorProcess
from dsec.core.errors import SandboxFaultError
from dsec.core.machines import Agent


class FullvmInstance(MachineInstance[FullvmRecord]):
    spare_of = b""  # of a spare: what it may become

    def __init__(self, backend: Remover[FullvmRecord], record: FullvmRecord, process: MonitorProcess | None) -> None:
        super().__init__(backend, record, process)
        self.screen = MachineScreen(self.control, Path(record.sockets), owner=record.uid, sandbox=record.sandbox)
        self._absent: asyncio.Transport | None = None

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], *, timeout_s: float = AGENT_S
    ) -> asyncio.Transport:
        if self.facts.agent is Agent.DSEC:
            return await super().connect(factory, timeout_s=timeout_s)
        process = self._process
        if process is None or process.ended.done():
            raise SandboxFaultError(f"the machine of {self.id} has ended", sandbox=self.id)
        if self._absent is not None:
            self._absent.abort()
        self._absent = await connect_absent(factory, boot_id=self.id, on_shutdown=process.kill)
        return self._absent

    async def destroy(self) -> None:
        await super().destroy()
        self._hang_up()

    def abandon(self) -> None:
        self._hang_up()
        super().abandon()

    def _hang_up(self) -> None:
        if self._absent is not None:
            self._absent.abort()
