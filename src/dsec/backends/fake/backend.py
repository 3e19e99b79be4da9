"""The backend that needs no machine: instances in memory, for tests and simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

import msgspec

from dsec.backends.base import Capabilities, Instance, InstanceSpec, Intend, Keeps, Probe
from dsec.backends.fake.host import STEPS, FakeHost
from dsec.backends.fake.instance import FakeInstance, destroy_on
from dsec.backends.fake.sandbox import FakeSandbox
from dsec.core.errors import DeadlineError, GoneError, LaunchError, Outcome, ProtocolError, UnsupportedError
from dsec.core.faults import fault_point
from dsec.core.ids import SandboxId
from dsec.core.spec import NetworkMode, Substrate
from dsec.wire.codec import pack, unpack


class FakeRecord(msgspec.Struct, frozen=True):
    """What a node's journal keeps of a fake instance."""

    id: str
    serial: int
    version: int = 1
    place: str = ""  # what it is called on the host, where that is not its id


class FakeBackend:
    """Implements `Backend` on a FakeHost; several in turn may work on one host, as nodes that restart do."""

    def __init__(self, host: FakeHost | None = None, *, pause: bool = True, links_by_agent: bool = False) -> None:
        self.host = host or FakeHost()
        self._capabilities = Capabilities(
            substrate=Substrate.FAKE,
            networks=frozenset({NetworkMode.NONE, NetworkMode.PROXIED}),
            pause=pause,
            snapshot=Keeps.DISK if pause else Keeps.NOTHING,
            fork=Keeps.DISK if pause else Keeps.NOTHING,
            survives_node=True,
            warm=True,
            links=not links_by_agent,
            links_by_agent=links_by_agent,
            disk_limit="imagined",
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def probe(self) -> Probe:
        return Probe(usable=True, facts={"fake": "in memory; isolates nothing"})

    def approach(self, record: bytes) -> None:
        """It is there at once."""

    async def create(self, instance: InstanceSpec, *, intend: Intend, deadline_s: float) -> Instance:
        network = instance.spec.network
        if network not in self._capabilities.networks:
            raise UnsupportedError(f"the fake backend has no network {network.value!r}", sandbox=instance.id)
        record = FakeRecord(instance.id, self.host.next_serial())
        sandbox = FakeSandbox(self.host, instance, record.serial)
        await intend(pack(record))
        step, done = STEPS[0], []
        try:
            async with asyncio.timeout(deadline_s):
                for step in STEPS:
                    await self._do(step, sandbox)
                    done.append(step)
        except BaseException as error:
            await self._undo(sandbox, done)
            if isinstance(error, TimeoutError):
                message = f"{instance.id} was not ready in time and has been removed"
                raise DeadlineError(message, sandbox=instance.id, step=step, outcome=Outcome.GONE) from error
            if isinstance(error, OSError):
                raise LaunchError(f"step {step} failed: {error}", step=step, sandbox=instance.id) from error
            raise
        return FakeInstance(self.host, sandbox, pack(record), self._capabilities)

    async def shape(self, instance: InstanceSpec) -> bytes | None:
        return pack([[layer.digest for layer in instance.layers], instance.spec.privilege_gain])

    async def claim(self, spare: Instance, instance: InstanceSpec) -> Instance:
        assert isinstance(spare, FakeInstance)
        try:
            fault_point("fake.claim")
        except OSError as error:
            raise LaunchError(f"a spare cannot become {instance.id}: {error}", step="claim") from error
        await self.host.delay("claim")
        sandbox = spare.sandbox
        if sandbox.ended is not None:
            raise LaunchError(f"the spare for {instance.id} has ended", step="claim", sandbox=instance.id)
        spare.become(replace(instance, spare=True), pack(FakeRecord(instance.id, sandbox.serial, place=sandbox.place)))
        return spare

    async def adopt(self, id: SandboxId, record: bytes) -> Instance:
        sandbox = self._recorded(id, record)
        if sandbox is None or sandbox.ended is not None:
            raise GoneError(f"{id} does not run any more", sandbox=id)
        return FakeInstance(self.host, sandbox, record, self._capabilities)

    async def discard(self, id: SandboxId, record: bytes) -> None:
        sandbox = self._recorded(id, record)
        place = id if sandbox is None else sandbox.place
        if sandbox is not None or id not in self.host.sandboxes:  # another of that id is left alone
            await destroy_on(self.host, place, sandbox)

    async def keep_layers(self, digests: Collection[str]) -> None:
        """Instances here have no layers."""

    def names(self, records: Collection[bytes]) -> frozenset[str]:
        return frozenset()  # nothing of them is on a disk

    async def sweep(self, records: Collection[bytes]) -> None:
        """A machine in memory has no disk that outlives it."""

    async def close(self) -> None:
        """Nothing is held here: instances run on at the host."""

    async def _do(self, step: str, sandbox: FakeSandbox) -> None:
        id = sandbox.spec.id
        if step == "ids":
            self._check_room(id)
        fault_point(f"fake.create.{step}")
        await self.host.delay(f"create.{step}")
        self.host.hold(id, step)
        if step == "launch":
            self.host.sandboxes[id] = sandbox

    def _check_room(self, id: SandboxId) -> None:
        if self.host.holds(id):
            raise LaunchError(f"{id} is on this host already", step="ids", sandbox=id)
        most = self.host.instances_max
        if most is not None and len(self.host.sandboxes) >= most:
            raise LaunchError(f"this host holds {most} instances, and no more", step="ids", sandbox=id)

    async def _undo(self, sandbox: FakeSandbox, done: list[str]) -> None:
        await sandbox.stop("never became ready")
        if "launch" in done:
            del self.host.sandboxes[sandbox.spec.id]
        for step in reversed(done):
            self.host.give_back(sandbox.spec.id, step)

    def _recorded(self, id: SandboxId, record: bytes) -> FakeSandbox | None:
        """The sandbox of a record; None when there is none, or the record is not one of ours."""
        try:
            known = unpack(record, FakeRecord)
        except ProtocolError:
            return None
        sandbox = self.host.sandboxes.get(SandboxId(known.place or id))
        return sandbox if sandbox is not None and sandbox.serial == known.serial and known.id == id else None
