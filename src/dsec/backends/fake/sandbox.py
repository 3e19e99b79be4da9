"""What runs in a fake instance. An idle one is a small object: agent and files come with the first connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dsec.backends.base import InstanceExit, InstanceSpec
from dsec.backends.fake.agent import FakeAgent
from dsec.backends.fake.files import FileTree
from dsec.backends.fake.transport import connect_in_memory
from dsec.core.errors import SandboxFaultError
from dsec.core.ids import SandboxId
from dsec.core.states import EndCause
from dsec.wire.agent import ClaimArgs

if TYPE_CHECKING:
    from dsec.backends.fake.host import FakeHost


class FakeSandbox:
    """Outlives the backend that made it. Lost by `stop`, by its agent's exit, or by `crash`."""

    __slots__ = (
        "_agent",
        "_ended",
        "_frozen_at_s",
        "_frozen_s",
        "_host",
        "_orphans",
        "_thawed",
        "_waiters",
        "place",
        "serial",
        "spare",
        "spec",
        "started_s",
    )

    def __init__(self, host: FakeHost, spec: InstanceSpec, serial: int) -> None:
        self._host = host
        self.spec = spec
        self.place = spec.id  # what it has on the host goes by this name, whoever claims it
        self.spare = spec.spare
        self.serial = serial
        self.started_s = host.clock.monotonic_s()
        self._agent: FakeAgent | None = None
        self._ended: InstanceExit | None = None
        self._waiters: list[asyncio.Future[None]] | None = None
        self._frozen_at_s: float | None = None
        self._frozen_s = 0.0
        self._thawed: asyncio.Event | None = None
        self._orphans: set[asyncio.Task[int]] | None = None

    def listen(self, address: str, port: int) -> socket.socket:
        return self._host.listen(self.spec.id, address, port)

    # -- for the instance --------------------------------------------------------------------------

    @property
    def agent(self) -> FakeAgent:
        if self._agent is None:
            self._agent = FakeAgent(self)
        return self._agent

    @property
    def ended(self) -> InstanceExit | None:
        return self._ended

    @property
    def frozen(self) -> bool:
        return self._frozen_at_s is not None

    @property
    def frozen_s(self) -> float:
        now = 0.0 if self._frozen_at_s is None else self.monotonic_s() - self._frozen_at_s
        return self._frozen_s + now

    @property
    def execs_live(self) -> int:
        return 0 if self._agent is None else sum(exec.end is None for exec in self._agent.execs.values())

    @property
    def disk_used_bytes(self) -> int:
        return 0 if self._agent is None else self._agent.files.used_bytes

    def first_files(self, now_ns: Callable[[], int]) -> FileTree:
        """Those of the snapshot that it was made from, or the few that every instance has."""
        for layer in reversed(self.spec.layers):
            if (snapshot := self._host.layers.get(layer.digest)) is not None:
                return snapshot.copy(now_ns)
        return FileTree(now_ns)

    def connect(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        if self._ended is not None:
            raise SandboxFaultError(f"the sandbox has ended: {self._ended.detail}", sandbox=self.spec.id)
        transport, agent_end = connect_in_memory(factory, self.agent.connection)
        if self.frozen:
            agent_end.pause_reading()
        return transport

    def freeze(self) -> None:
        if self._frozen_at_s is None:
            self._frozen_at_s = self.monotonic_s()
            self._thawed = asyncio.Event()
            if self._agent is not None:
                self._agent.pause_connections()

    def thaw(self) -> None:
        if self._frozen_at_s is not None:
            self._frozen_s += self.monotonic_s() - self._frozen_at_s
            self._frozen_at_s = None
            if self._thawed is not None:
                self._thawed.set()
            if self._agent is not None:
                self._agent.resume_connections()

    async def wait(self) -> InstanceExit:
        while self._ended is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters = [*(self._waiters or []), waiter]
            await waiter
        return self._ended

    async def stop(self, detail: str, cause: EndCause = EndCause.DESTROYED) -> None:
        """Everything in it ends; no task of it is left."""
        self._end(cause, detail)
        tasks: list[asyncio.Task[None] | asyncio.Task[int]] = list(self._orphans or ())
        for task in tasks:
            task.cancel()
        if self._agent is not None:
            tasks += [task for exec in self._agent.execs.values() for task in exec.cancel()]
            self._agent.drop_connections()
        self._agent = None
        self.thaw()
        if tasks:
            await asyncio.wait(tasks)

    async def crash(self, cause: EndCause = EndCause.SANDBOX_FAULT, detail: str = "the agent was killed") -> None:
        """For tests: the agent dies, and with it, as pid 1, everything."""
        await self.stop(detail, cause)

    # -- for the agent (World and Sandbox) ---------------------------------------------------------

    @property
    def env(self) -> dict[bytes, bytes]:
        return {
            k.encode("utf-8", "surrogateescape"): v.encode("utf-8", "surrogateescape") for k, v in self.spec.env.items()
        }

    @property
    def user(self) -> str | None:
        return self.spec.user

    @property
    def workdir(self) -> bytes | None:
        return None if self.spec.workdir is None else self.spec.workdir.encode("utf-8", "surrogateescape")

    def wall_s(self) -> float:
        return self._host.clock.wall_s()

    def wall_ns(self) -> int:
        return int(self._host.clock.wall_s() * 1e9)

    def monotonic_s(self) -> float:
        return self._host.clock.monotonic_s()

    async def sleep(self, seconds: float) -> None:
        """Frozen time does not count."""
        until_s, left_s = self._unfrozen_s() + seconds, seconds
        while left_s > 0:
            frozen_s = self.frozen_s
            await self._host.sleep(left_s)
            await self.running()
            left_s = 0.0 if self.frozen_s == frozen_s else until_s - self._unfrozen_s()

    def _unfrozen_s(self) -> float:
        return self.monotonic_s() - self.frozen_s

    async def running(self) -> None:
        while self._frozen_at_s is not None and self._thawed is not None:
            await self._thawed.wait()

    def adopt_orphan(self, task: asyncio.Task[int]) -> None:
        if self._orphans is None:
            self._orphans = set()
        self._orphans.add(task)
        task.add_done_callback(self._orphans.discard)

    @property
    def orphans_live(self) -> int:
        """Background processes whose exec has ended."""
        return len(self._orphans or ())

    def claimed(self, args: ClaimArgs) -> None:
        self.spare = False
        self.spec = replace(
            self.spec,
            id=SandboxId(args.sandbox),
            env={_text(key): _text(value) for key, value in args.env.items()},
            user=args.user,
            workdir=None if args.workdir is None else _text(args.workdir),
        )

    def agent_exited(self) -> None:
        self._end(EndCause.SANDBOX_FAULT, "the agent exited with 0")
        if self._agent is not None:
            for exec in self._agent.execs.values():
                exec.cancel()

    def _end(self, cause: EndCause, detail: str) -> None:
        if self._ended is not None:
            return
        self._ended = InstanceExit(cause, detail)
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(None)
        self._waiters = None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
