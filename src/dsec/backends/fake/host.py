"""The machine under a fake backend: what a backend leaves there, and what outlives the node's process."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from dsec.backends.fake.files import FileTree
from dsec.backends.fake.sandbox import FakeSandbox
from dsec.backends.forwarding import Rules
from dsec.core.clock import Clock, SystemClock
from dsec.core.faults import fault_point
from dsec.core.ids import SandboxId
from dsec.wire.egress import EgressCounts, EgressDenied

STEPS: Final = ("ids", "directories", "cgroup", "launch", "agent")
"""What a create takes, in order; each is given back by destroy."""


class FakeHost:
    """Shared by the backends of "node processes" that come and go on one machine.

        host = FakeHost()
        first = FakeBackend(host)                 # a node
        instance = await first.create(spec, intend=intend, deadline_s=5)
        await first.close()                       # its process ends
        again = await FakeBackend(host).adopt(instance.id, instance.record)

    `delay_s` gives the time that a step takes; `sleep` and `clock` let a test own time. Failures come through the fault
    points `fake.create.<step>`, `fake.connect`, `fake.destroy`, `fake.snapshot.<step>` and `fake.agent.<op>`
    (dsec.testing.faults).
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        delay_s: Callable[[str], float] | None = None,
        instances_max: int | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.sleep = sleep
        self.instances_max = instances_max
        self.sandboxes: dict[SandboxId, FakeSandbox] = {}
        self.layers: dict[str, FileTree] = {}  # made of snapshots, by digest
        self.listening: dict[tuple[SandboxId, str, int], int] = {}  # of whom, and where → port of this machine
        self.ports_taken: set[tuple[SandboxId, int]] = set()  # by programs inside, as far as anybody asks
        self.egress: dict[str, Rules] = {}  # of those that are attached to their network
        self.traffic: dict[str, EgressCounts] = {}  # of those, as tests have it
        self.tell_denied: Callable[[EgressDenied], None] = lambda denied: None  # the node's ear, for tests
        self._delay_s = delay_s
        self._held: dict[SandboxId, int] = {}  # bit i: step i of STEPS was done
        self._serial = 0

    def next_serial(self) -> int:
        """Tells an instance from an earlier one of the same id."""
        self._serial += 1
        return self._serial

    def listen(self, id: SandboxId, address: str, port: int) -> socket.socket:
        """On a port of the host; `listening` says on which."""
        fault_point("fake.listen")
        if (id, port) in self.ports_taken:
            raise OSError(errno.EADDRINUSE, "address in use")
        found = socket.create_server(("127.0.0.1", 0))
        found.setblocking(False)
        self.listening[id, address, port] = found.getsockname()[1]
        return found

    async def delay(self, step: str) -> None:
        if self._delay_s is not None and (delay_s := self._delay_s(step)) > 0:
            await self.sleep(delay_s)

    def hold(self, id: SandboxId, step: str) -> None:
        self._held[id] = self._held.get(id, 0) | 1 << STEPS.index(step)

    def holds(self, id: SandboxId) -> bool:
        return id in self._held

    def give_back(self, id: SandboxId, step: str) -> None:
        left = self._held.get(id, 0) & ~(1 << STEPS.index(step))
        if left:
            self._held[id] = left
        else:
            self._held.pop(id, None)

    def leftovers(self) -> list[str]:
        """Everything of any instance that is on the machine, in words."""
        return [f"{step} of {id}" for id, held in self._held.items() for i, step in enumerate(STEPS) if held >> i & 1]

    async def reboot(self) -> None:
        """Every instance is lost, as by a power cut; what is on the disk stays."""
        for id, sandbox in list(self.sandboxes.items()):
            await sandbox.stop("the machine was started again")
            del self.sandboxes[id]
            for step in ("cgroup", "launch", "agent"):
                self.give_back(id, step)
