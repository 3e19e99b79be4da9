"""One running machine, seen from the node."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from msgspec.structs import replace

from dsec.backends.base import Capture, InstanceExit, InstanceUsage, Layer
from dsec.backends.forwarding import NetworkPlace
from dsec.backends.pausedmemory import PausedMemory
from dsec.backends.vm.drivers import Machine
from dsec.backends.vm.monitor import MonitorProcess
from dsec.backends.vm.qemu_machine import QemuMachine
from dsec.backends.vm.qmp import Monitor, MonitorError
from dsec.backends.vm.record import MachineRecord
from dsec.core.errors import (
    DeadlineError,
    FreezeTimeoutError,
    GoneError,
    LaunchError,
    SandboxFaultError,
    UnsupportedError,
)
from dsec.core.faults import fault_point
from dsec.core.ids import SandboxId
from dsec.core.states import EndCause
from dsec.density.swapping import CgroupMemory
from dsec.density.use import CgroupUse

_MONITOR_S: Final = 10.0
_SAVE_S: Final = 600.0  # to the disk; it stands still meanwhile, as was wanted
AGENT_S: Final = 10.0

R = TypeVar("R", bound=MachineRecord)
R_contra = TypeVar("R_contra", bound=MachineRecord, contravariant=True)


class Remover(Protocol[R_contra]):
    """The backend that made it."""

    async def remove(self, record: R_contra) -> None: ...

    async def capture(self, record: R_contra, found: Machine, *, whole: bool = True) -> Capture:
        """Raises UnsupportedError, StorageError."""
        ...

    async def capture_asleep(self, record: R_contra) -> Capture:
        """Of one that sleeps. Raises as `capture`."""
        ...

    async def sync_machine(self, id: str) -> None: ...

    def control(self, record: R_contra) -> Machine: ...

    async def woken(self, record: R_contra, layers: tuple[Layer, ...]) -> tuple[MonitorProcess, dict[str, object]]:
        """Its monitor runs, and the machine stands still; and what its record says of that. Raises LaunchError,
        StorageError, UnsupportedError: then nothing of it runs."""
        ...

    async def forget_asleep(self, id: str) -> None:
        """What it has slept as is needed no more."""
        ...


class MachineInstance(Generic[R]):
    def __init__(
        self,
        backend: Remover[R],
        record: R,
        process: MonitorProcess | None,
        machine: Machine | None = None,
        *,
        page_out: bool = False,
    ) -> None:
        """`process`: None while it sleeps. `page_out`: while it is paused its memory goes to swap."""
        self._backend = backend
        self._record = record
        self._page_out = page_out
        self._machine = machine or QemuMachine(Path(record.sockets), owner=record.uid)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._saving: Capture | None = None
        self._slept = ""  # as what it did, until it goes on
        self._process: MonitorProcess | None = None
        self._memory: PausedMemory | None = None
        if process is not None:
            self._follow(process)
        self._use = CgroupUse(record.cgroup2, record.cgroup1)
        self._destroyed = False
        self._destroying = asyncio.Lock()

    @property
    def id(self) -> SandboxId:
        return SandboxId(self._record.sandbox)

    @property
    def record(self) -> bytes:
        return self._record.to_bytes()

    @property
    def facts(self) -> R:
        return self._record

    def become(self, record: R) -> None:
        """A spare that is claimed: the same machine under its sandbox's name."""
        self._record = record

    def take(self, monitor: Monitor) -> None:
        """Of QEMU: a connection to it that was made already."""
        assert isinstance(self._machine, QemuMachine)
        self._machine.take(monitor)

    @property
    def pid(self) -> int:
        """Host pid of the monitor; 0 while it sleeps."""
        return self._process.pid if self._process is not None else 0

    @property
    def network_place(self) -> NetworkPlace:
        """Its monitor's, which what is behind its network card is of."""
        return NetworkPlace(self.pid, self._record.start_ticks)

    async def run_attached(self, attach: Callable[[NetworkPlace], Awaitable[None]] | None) -> None:
        """Of one that was just begun: with an `attach` it stands still, and goes on once that is done. Raises what that
        raises, LaunchError."""
        if attach is None:
            return
        await attach(self.network_place)
        try:
            await self._machine.resume(timeout_s=_MONITOR_S)
        except (MonitorError, DeadlineError) as error:
            raise LaunchError(f"a clone did not start: {error.message}", step="clone") from error

    def _follow(self, process: MonitorProcess) -> None:
        self._process = process
        counted = CgroupMemory.of(self._record.cgroup2, self._record.cgroup1)
        self._memory = PausedMemory(self._record.sandbox, lambda: (process.pid,), counted, monitor=True)
        process.ended.add_done_callback(lambda _: self._monitor_ended(process))

    def _monitor_ended(self, process: MonitorProcess) -> None:
        if self._process is process and not self._ended.done():
            self._ended.set_result(None)

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], *, timeout_s: float = AGENT_S
    ) -> asyncio.Transport:
        try:
            return await self._machine.connect(factory, timeout_s=timeout_s)
        except MonitorError as error:
            raise SandboxFaultError(f"the agent of {self.id} cannot be reached: {error}", sandbox=self.id) from error

    # ---- facts -----------------------------------------------------------------------------------

    async def usage(self) -> InstanceUsage:
        """Of the monitor with all that its guest does. What the guest ends for memory its agent tells of each exec."""
        use = self._use
        return InstanceUsage(
            cpu_s=use.cpu_s(),
            memory_bytes=0 if self.asleep else use.memory_bytes(),  # what the cgroup has then are pages of files
            memory_peak_bytes=use.memory_peak_bytes(),
            disk_used_bytes=self._disk_bytes(),
            cpu_pressure_s=use.pressure_s("cpu"),
            memory_pressure_s=use.pressure_s("memory"),
        )

    def _disk_bytes(self) -> int | None:
        """On the node's disk."""
        try:
            return sum(path.stat().st_blocks * 512 for path in Path(self._record.directory).iterdir())
        except OSError:
            return None

    async def bound_memory(self, memory_bytes: int) -> None:
        raise UnsupportedError("a machine has the memory that it was made with")

    async def listen(self, address: str, port: int) -> socket.socket:
        raise UnsupportedError("the loopback of a machine is out of its node's reach")

    def memory_now(self) -> int | None:
        return self._use.memory_bytes()

    def memory_events(self) -> tuple[int | None, int]:
        return self._use.memory_peak_bytes(), 0

    def forget_memory_peak(self) -> None:
        self._use.forget_memory_peak()

    # ---- pause -----------------------------------------------------------------------------------

    async def pause(self, *, deadline_s: float) -> None:
        """Its processors stand still, and its clock with them."""
        fault_point("vm.pause")
        try:
            async with asyncio.timeout(deadline_s):
                await self._machine.pause(timeout_s=deadline_s)
        except (TimeoutError, DeadlineError) as error:
            raise FreezeTimeoutError(f"{self.id} did not stop within {deadline_s:g} s", sandbox=self.id) from error
        if self._page_out and self._memory is not None:
            self._memory.give_back()

    def give_back(self) -> bool:
        return self._memory is not None and self._memory.give_back()

    @property
    def gave_back(self) -> bool:
        return self._memory is not None and self._memory.given_back

    async def resume(self) -> None:
        """Raises HostError; it may be asked for again."""
        fault_point("vm.resume")
        if self._memory is not None:
            await self._memory.come_back()
        await self._machine.resume(timeout_s=_MONITOR_S)
        slept, self._slept = self._slept, ""
        if slept:
            await self._backend.forget_asleep(slept)

    async def _keep_memory(self) -> None:
        if self._memory is not None:
            await self._memory.keep()

    async def control(self) -> Monitor:
        """Of QEMU."""
        assert isinstance(self._machine, QemuMachine)
        return await self._machine.monitor()

    async def snapshot(self) -> Capture:
        if self.asleep:
            return await self._backend.capture_asleep(self._record)
        if self._ended.done():
            raise GoneError(f"the machine of {self.id} has ended", sandbox=self.id)
        return await self._backend.capture(self._record, self._machine)

    # ---- sleep -----------------------------------------------------------------------------------

    @property
    def can_sleep(self) -> bool:
        return bool(self._record.shape)

    @property
    def asleep(self) -> bool:
        return bool(self._record.asleep)

    async def save(self) -> None:
        await self._keep_memory()
        capture = await self._backend.capture(self._record, self._machine, whole=False)
        try:
            await capture.look()
            await capture.take(within_s=_SAVE_S)
            kept = await capture.keep()
            await self._backend.sync_machine(kept.machine)
        except BaseException:
            await asyncio.shield(capture.close())
            raise
        self._saving = capture  # holds what was kept until the record is written down
        self._record = replace(self._record, asleep=kept.machine)

    async def stay(self) -> None:
        kept = self._record.asleep
        self._record = replace(self._record, asleep="")
        await self._let_go_of_saved()
        await self._backend.forget_asleep(kept)

    async def sleep(self) -> None:
        fault_point("vm.sleep")
        await self._end_monitor()
        await self._let_go_of_saved()

    async def sleep_on(self) -> None:
        self._record = replace(self._record, asleep=self._slept or self._record.asleep)
        self._slept = ""
        await self._end_monitor()

    async def _end_monitor(self) -> None:
        await self._keep_memory()
        process, self._process = self._process, None  # its end is no news
        self._memory = None
        self._machine.close()
        if process is not None:
            try:
                await process.end()
            except BaseException:
                self._process = process
                raise
        self._record = replace(self._record, pid=0, start_ticks=0)

    async def wake(self, layers: tuple[Layer, ...]) -> None:
        fault_point("vm.wake")
        process, known = await self._backend.woken(self._record, layers)
        self._slept = self._record.asleep
        self._record = replace(self._record, asleep="", **known)
        self._machine = self._backend.control(self._record)
        self._follow(process)

    async def _let_go_of_saved(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving.close()

    # ---- end -------------------------------------------------------------------------------------

    async def wait(self) -> InstanceExit:
        await asyncio.shield(self._ended)
        if self._destroyed or self._destroying.locked():
            return InstanceExit(EndCause.DESTROYED)
        return InstanceExit(EndCause.SANDBOX_FAULT, "its machine has ended: its agent, its kernel, or its monitor")

    async def destroy(self) -> None:
        async with self._destroying:
            if self._destroyed:
                return
            if self._memory is not None:
                self._memory.abandon()
            self._machine.close()
            if self._process is not None:
                await self._process.end()
            await self._keep_memory()
            await self._let_go_of_saved()
            await self._backend.remove(self._record)
            self._destroyed = True
            if not self._ended.done():
                self._ended.set_result(None)

    def abandon(self) -> None:
        """Stop watching; the machine runs on."""
        if self._memory is not None:
            self._memory.abandon()
        self._machine.close()
        if self._process is not None:
            self._process.forget()
