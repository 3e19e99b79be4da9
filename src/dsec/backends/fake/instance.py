"""One fake instance, as a node holds it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsec.backends.base import Capabilities, InstanceExit, InstanceSpec, InstanceUsage, Keeps
from dsec.backends.fake.capture import FakeCapture
from dsec.backends.fake.host import STEPS, FakeHost
from dsec.backends.fake.sandbox import FakeSandbox
from dsec.backends.forwarding import NetworkPlace
from dsec.core.errors import FreezeTimeoutError, HostError, SandboxFaultError, UnsupportedError
from dsec.core.faults import fault_point
from dsec.core.ids import SandboxId

if TYPE_CHECKING:
    from typing import NoReturn


class FakeInstance:
    """Any number of these may stand for one sandbox of the host: after a restart, the adopted one."""

    __slots__ = ("_capabilities", "_host", "_record", "_sandbox")

    def __init__(self, host: FakeHost, sandbox: FakeSandbox, record: bytes, capabilities: Capabilities) -> None:
        self._host = host
        self._sandbox = sandbox
        self._record = record
        self._capabilities = capabilities

    @property
    def id(self) -> SandboxId:
        return self._sandbox.spec.id

    @property
    def record(self) -> bytes:
        return self._record

    @property
    def sandbox(self) -> FakeSandbox:
        """For tests: to crash it, or to look inside."""
        return self._sandbox

    def become(self, spec: InstanceSpec, record: bytes) -> None:
        """A spare is claimed; what its agent gives to execs is told to the agent."""
        self._sandbox.spec = spec
        self._record = record

    async def connect(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        try:
            fault_point("fake.connect")
        except OSError as error:
            raise SandboxFaultError("the agent cannot be reached", sandbox=self.id) from error
        await self._host.delay("connect")
        return self._sandbox.connect(factory)

    async def usage(self) -> InstanceUsage:
        if self._sandbox.ended is not None:
            return InstanceUsage()
        return InstanceUsage(
            pids=1 + self._sandbox.execs_live,
            disk_used_bytes=self._sandbox.disk_used_bytes,
            frozen_s=self._sandbox.frozen_s,
        )

    async def bound_memory(self, memory_bytes: int) -> None:
        self._refuse("memory limits")

    async def listen(self, address: str, port: int) -> socket.socket:
        """On a port of the host; `FakeHost.listening` says on which."""
        if self._sandbox.ended is not None:
            raise OSError(errno.ESRCH, "the instance has ended")
        return self._host.listen(self.id, address, port)

    @property
    def network_place(self) -> NetworkPlace:
        return NetworkPlace(pid=1, start_ticks=0)

    def memory_now(self) -> int | None:
        return None

    def forget_memory_peak(self) -> None:
        """There is none."""

    def memory_events(self) -> tuple[int | None, int]:
        return None, 0

    async def pause(self, *, deadline_s: float) -> None:
        if not self._capabilities.pause:
            self._refuse("pause")
        self._check_running()
        try:
            async with asyncio.timeout(deadline_s):
                await self._host.delay("pause")
        except TimeoutError as error:
            raise FreezeTimeoutError(f"not frozen within {deadline_s:g} s", sandbox=self.id) from error
        self._sandbox.freeze()

    async def resume(self) -> None:
        if not self._capabilities.pause:
            self._refuse("resume")
        self._check_running()
        await self._host.delay("resume")
        self._sandbox.thaw()

    async def snapshot(self) -> FakeCapture:
        if self._capabilities.snapshot is Keeps.NOTHING:
            self._refuse("take a snapshot of")
        self._check_running()
        return FakeCapture(self._host, self._sandbox)

    async def wait(self) -> InstanceExit:
        return await self._sandbox.wait()

    async def destroy(self) -> None:
        await destroy_on(self._host, self._sandbox.place, self._sandbox)

    def _check_running(self) -> None:
        ended = self._sandbox.ended
        if ended is not None:
            raise SandboxFaultError(f"the sandbox has ended: {ended.detail}", sandbox=self.id)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(f"the fake backend cannot {what} an instance", sandbox=self.id)


async def destroy_on(host: FakeHost, id: SandboxId, sandbox: FakeSandbox | None) -> None:
    """Idempotent. Raises HostError when the host refuses a step; it can then be tried again."""
    try:
        fault_point("fake.destroy")
    except OSError as error:
        raise HostError(f"{id} could not be removed: {error}", sandbox=id) from error
    await host.delay("destroy")
    if sandbox is not None:
        await sandbox.stop("destroyed")
    present = host.sandboxes.get(id)
    if present is sandbox or sandbox is None:
        host.sandboxes.pop(id, None)
        for step in reversed(STEPS):
            host.give_back(id, step)
