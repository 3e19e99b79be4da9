"""How a machine runs under QEMU, whatever it is made of: in its jail, saved as a template, gone on with as a clone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dsec.backends.vm import machine
from dsec.backends.vm.console import BootConsole
from dsec.backends.vm.monitor import Confines, MonitorProcess, jail_plan
from dsec.backends.vm.network import resolver_file
from dsec.backends.vm.qemu import Qemu
from dsec.backends.vm.qmp import Monitor, MonitorError
from dsec.backends.vm.screens import put_screen
from dsec.backends.vm.templates import RAM, STATE, Template
from dsec.core.errors import DeadlineError, DsecError, LaunchError
from dsec.core.faults import fault_point
from dsec.wire.jail import JailBind

_MIGRATED_S: Final = 60.0
_POLL_S: Final = 0.002
_MONITOR_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Runner:
    qemu: Qemu
    accelerator: str  # kvm | tcg

    @property
    def is_current(self) -> bool:
        return self.qemu.is_current

    async def save_state(self, monitor: Monitor, directory: Path) -> None:
        """Stops the machine and writes its devices' state; its memory is in `directory` already."""
        fault_point("vm.template.save")
        await monitor.execute("stop")
        await self._ignore_memory(monitor)
        fd = os.open(directory / STATE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o444)
        try:
            await self._migrate(monitor, "migrate", fd, f"{machine.TEMPLATE}/{STATE}")
        finally:
            os.close(fd)
        (directory / STATE).chmod(0o444)
        (directory / RAM).chmod(self.memory_mode)

    @property
    def memory_mode(self) -> int:
        """Of the file of a memory that clones map: before 8.2 a monitor cannot open it for reading only."""
        return 0o444 if self.qemu.keeps_templates else 0o666

    def start(self, confines: Confines, argv: list[str]) -> MonitorProcess:
        return MonitorProcess.start(jail_plan(confines, argv))

    async def start_clone(
        self, process: MonitorProcess, template: Template, sockets: Path, owner: int, *, stand: bool = False
    ) -> Monitor:
        """The machine goes on where the template was stopped, or stands there. Raises LaunchError; the process is the
        caller's."""
        try:
            monitor = await connect_monitor(process, sockets, owner)
            try:
                if not template.bare:
                    await self._ignore_memory(monitor)
                with (template.directory / STATE).open("rb") as state:
                    await self._migrate(monitor, "migrate-incoming", state.fileno(), f"{machine.TEMPLATE}/{STATE}")
                if template.bare:
                    await put_screen(monitor, process.pid, template.directory)
                if not stand:
                    await monitor.execute("cont")
            except BaseException:
                monitor.close()
                raise
        except (MonitorError, DeadlineError) as error:
            raise LaunchError(_said(f"a clone did not start: {error.message}", process), step="clone") from error
        process.hush()
        return monitor

    @asynccontextmanager
    async def running(
        self, confines: Confines, argv: list[str], console: BootConsole | None = None
    ) -> AsyncIterator[Monitor]:
        process = self.start(confines, argv)
        try:
            monitor = await connect_monitor(process, confines.sockets, confines.uid)
            try:
                yield monitor
            finally:
                monitor.close()
        except (DsecError, TimeoutError) as error:
            message = error.message if isinstance(error, DsecError) else "it did not come up in time"
            said = _said(f"a template did not come up: {message}", process)
            words = "" if console is None else console.last_words()
            raise LaunchError(f"{said}{words}", step="template") from error
        finally:
            await asyncio.shield(process.end())
            process.forget()

    async def _ignore_memory(self, monitor: Monitor) -> None:
        capabilities = [{"capability": "x-ignore-shared", "state": True}]
        await monitor.execute("migrate-set-capabilities", {"capabilities": capabilities})

    async def _migrate(self, monitor: Monitor, command: str, fd: int, path: str) -> None:
        if self.qemu.reads_state_files:
            uri = f"file:{path}"
        else:
            await monitor.give("state", fd)
            uri = "fd:state"
        await monitor.execute(command, {"uri": uri})
        async with asyncio.timeout(_MIGRATED_S):
            while True:
                answer = await monitor.execute("query-migrate")
                status = answer.get("status") if isinstance(answer, dict) else None
                if status == "completed":
                    return
                if status in ("failed", "cancelled"):
                    raise MonitorError(f"{command} failed: {str(answer.get('error-desc', status))[:300]}")
                await asyncio.sleep(_POLL_S)


def confined(confines: Confines, binds: Sequence[JailBind], *, network: bool) -> Confines:
    """With the files of one machine, and what its network card needs."""
    files = (resolver_file(),) if network else ()
    return replace(confines, binds=(*confines.binds, *binds), files=files)


async def connect_monitor(process: MonitorProcess, sockets: Path, owner: int) -> Monitor:
    """Its control socket appears some milliseconds after its start. Raises MonitorError when it ends before."""
    async with asyncio.timeout(_MONITOR_S):
        while True:
            if process.ended.done():
                raise MonitorError("the monitor ended at its start")
            try:
                return await Monitor.connect(sockets / "qmp", timeout_s=_MONITOR_S, owner=owner)
            except MonitorError:
                await asyncio.sleep(_POLL_S)


def _said(what: str, process: MonitorProcess) -> str:
    words = process.words()
    return f"{what}; it says: {words}" if words else what
