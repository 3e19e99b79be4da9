"""One running container, seen from the node."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dsec.backends.base import InstanceExit, InstanceUsage
from dsec.backends.container.capture import ContainerCapture
from dsec.backends.container.netns import listen_inside
from dsec.backends.container.record import ContainerRecord
from dsec.backends.forwarding import NetworkPlace
from dsec.backends.pausedmemory import PausedMemory
from dsec.core.errors import FreezeTimeoutError, HostError, SandboxFaultError, UnsupportedError
from dsec.core.faults import fault_point
from dsec.core.ids import SandboxId
from dsec.core.states import EndCause
from dsec.density.cgroups import read_keyed, set_memory_limit
from dsec.density.swapping import CgroupMemory, processes_below
from dsec.density.use import CgroupUse

if TYPE_CHECKING:
    from dsec.backends.container.backend import ContainerBackend

_EXIT_REPORT_S = 5.0
_DISK_LEFT_BYTES = 64 * 1024  # of a full disk: what a file system keeps in pieces that no write fits into


async def connect_at(record: ContainerRecord, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
    """To the agent of the record. Raises SandboxFaultError when nobody listens."""
    try:
        transport, _ = await asyncio.get_running_loop().create_unix_connection(factory, record.socket)
    except OSError as error:
        id = record.sandbox
        raise SandboxFaultError(f"the agent of {id} cannot be reached: {error}", sandbox=id) from error
    return transport


class ContainerInstance:
    def __init__(
        self,
        backend: ContainerBackend,
        record: ContainerRecord,
        pidfd: int,
        limits: Mapping[str, str] = MappingProxyType({}),
    ):
        self._backend = backend
        self._record = record
        self._limits = limits
        self._pidfd: int | None = pidfd
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exit: InstanceExit | None = None
        self._destroyed = False
        self._destroying = asyncio.Lock()
        self._use = CgroupUse(record.cgroup2, record.cgroup1)
        counted = CgroupMemory.of(record.cgroup2, record.cgroup1)
        self._memory = PausedMemory(record.sandbox, self._processes, counted)
        asyncio.get_running_loop().add_reader(pidfd, self._agent_ended)

    @property
    def id(self) -> SandboxId:
        return SandboxId(self._record.sandbox)

    @property
    def record(self) -> bytes:
        return self._record.to_bytes()

    @property
    def facts(self) -> ContainerRecord:
        return self._record

    @property
    def limits(self) -> Mapping[str, str]:
        """Path → value of what was written to its cgroups when it was made here."""
        return self._limits

    def become(self, record: ContainerRecord) -> None:
        """A spare that is claimed: the same instance under its sandbox's name."""
        self._record = record
        self._limits = MappingProxyType({})

    @property
    def pid(self) -> int:
        """Host pid of the agent."""
        return self._record.pid

    # ---- channel ---------------------------------------------------------------------------------

    async def connect(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        return await connect_at(self._record, factory)

    # ---- facts -----------------------------------------------------------------------------------

    async def usage(self) -> InstanceUsage:
        v2, use = self._record.cgroup2, self._use
        frozen = read_keyed(f"{v2}/cgroup.stat.local").get("frozen_usec") if v2 else None
        used, full = self._disk()
        return InstanceUsage(
            cpu_s=use.cpu_s(),
            memory_bytes=use.memory_bytes(),
            memory_peak_bytes=use.memory_peak_bytes(),
            oom_kills=use.oom_kills(),
            pids=use.pids(),
            disk_used_bytes=used,
            disk_full=full,
            cpu_pressure_s=use.pressure_s("cpu"),
            memory_pressure_s=use.pressure_s("memory"),
            frozen_s=frozen / 1e6 if frozen is not None else None,
        )

    def _disk(self) -> tuple[int | None, bool]:
        """Bytes used, and whether it is full. An overlay tells of the file system, or the quota, of its upper
        directory: only its own is of this one."""
        if not self._record.disk_limited:
            return None, False
        try:
            found = os.statvfs(f"/proc/{self._record.pid}/root")
        except OSError:
            return None, False
        full = found.f_bavail * found.f_frsize < _DISK_LEFT_BYTES or found.f_favail == 0
        return (found.f_blocks - found.f_bfree) * found.f_frsize, full

    async def bound_memory(self, memory_bytes: int) -> None:
        record = self._record
        try:
            set_memory_limit(record.cgroup2, record.cgroup1.get("memory"), memory_bytes)
        except OSError as error:
            raise HostError(f"the memory of {self.id} cannot be limited: {error}", sandbox=self.id) from error

    async def listen(self, address: str, port: int) -> socket.socket:
        if self._pidfd is None:
            raise OSError(errno.ESRCH, "the instance has ended")
        return await asyncio.to_thread(listen_inside, self._record.pid, self._pidfd, address, port)

    @property
    def network_place(self) -> NetworkPlace:
        return NetworkPlace(self._record.pid, self._record.start_ticks)

    def memory_now(self) -> int | None:
        return self._use.memory_bytes()

    def memory_events(self) -> tuple[int | None, int]:
        return self._use.memory_peak_bytes(), self._use.oom_kills() or 0

    def forget_memory_peak(self) -> None:
        self._use.forget_memory_peak()

    # ---- pause -----------------------------------------------------------------------------------

    async def pause(self, *, deadline_s: float) -> None:
        """Commands first, the agent last, so that it never sees them stand still while it runs (ruling 10).

        Raises FreezeTimeoutError or HostError; all of it runs on then.
        """
        try:
            for part in ("work", "agent"):
                await _freeze(self._cgroup(part), deadline_s)
        except BaseException as error:
            self._thaw_what_can_be()
            if isinstance(error, TimeoutError):
                raise FreezeTimeoutError(
                    f"{self.id} did not freeze within {deadline_s:g} s and runs on", sandbox=self.id
                ) from error
            if isinstance(error, OSError):
                raise HostError(f"{self.id} cannot be frozen: {error}", sandbox=self.id) from error
            raise

    def give_back(self) -> bool:
        return self._memory.give_back()

    @property
    def gave_back(self) -> bool:
        return self._memory.given_back

    def _processes(self) -> list[int]:
        return [] if self._record.cgroup2 is None else list(processes_below(Path(self._record.cgroup2)))

    async def resume(self) -> None:
        """Raises HostError; it may be asked for again."""
        await self._memory.come_back()
        try:
            for part in ("agent", "work"):
                _thaw(self._cgroup(part))
        except OSError as error:
            raise HostError(f"{self.id} cannot be thawed: {error}", sandbox=self.id) from error

    def _thaw_what_can_be(self) -> None:
        if self._record.cgroup2 is None:
            return
        for part in ("agent", "work"):
            with contextlib.suppress(OSError):
                _thaw(self._cgroup(part))

    def _cgroup(self, part: str) -> Path:
        if self._record.cgroup2 is None:
            raise UnsupportedError("pausing needs a cgroup2 hierarchy", hint="see `dsec doctor`")
        return Path(self._record.cgroup2) / part

    async def snapshot(self) -> ContainerCapture:
        if self._record.cgroup2 is None:
            raise UnsupportedError("snapshots need a cgroup2 hierarchy", hint="see `dsec doctor`")
        return await self._backend.capture(self._record)

    # ---- end -------------------------------------------------------------------------------------

    async def wait(self) -> InstanceExit:
        await asyncio.shield(self._ended)
        if self._exit is None:
            self._exit = await self._explain()
        return self._exit

    async def _explain(self) -> InstanceExit:
        if self._destroyed or self._destroying.locked():
            return InstanceExit(EndCause.DESTROYED)
        report = self._backend.launcher.exit_of(self._record.launched_as)
        try:
            async with asyncio.timeout(_EXIT_REPORT_S):
                event = await asyncio.shield(report)
        except (TimeoutError, asyncio.CancelledError):
            return InstanceExit(EndCause.SANDBOX_FAULT, "the agent has ended; its exit status is not known")
        if os.WIFSIGNALED(event.status):
            number = os.WTERMSIG(event.status)
            if number == signal.SIGKILL and event.oom_kills > 0:
                return InstanceExit(EndCause.OOM, "the kernel killed the agent for memory")
            return InstanceExit(EndCause.SANDBOX_FAULT, f"the agent was killed by signal {number}")
        return InstanceExit(EndCause.SANDBOX_FAULT, f"the agent exited with {os.waitstatus_to_exitcode(event.status)}")

    async def destroy(self) -> None:
        async with self._destroying:
            if self._destroyed:
                return
            await self._memory.keep()
            await self._backend.remove(self._record)
            self._destroyed = True
        self._agent_ended()

    def abandon(self) -> None:
        """Stop watching; the container runs on."""
        self._memory.abandon()
        self._unwatch()

    def _agent_ended(self) -> None:
        self._unwatch()
        if not self._ended.done():
            self._ended.set_result(None)

    def _unwatch(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


async def _freeze(directory: Path, deadline_s: float) -> None:
    """Raises TimeoutError. `cgroup.events` says when every task has stopped; usually that is at once."""
    fault_point("container.freeze")
    (directory / "cgroup.freeze").write_text("1")
    pause_s = 0.0002
    async with asyncio.timeout(deadline_s):
        while read_keyed(directory / "cgroup.events").get("frozen") != 1:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)


def _thaw(directory: Path) -> None:
    fault_point("container.thaw")
    with contextlib.suppress(FileNotFoundError):
        (directory / "cgroup.freeze").write_text("0")
