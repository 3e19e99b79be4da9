"""Imagined sandboxes whose memory can go to swap and to the disk, as that of machines."""

from __future__ import annotations

from dataclasses import replace

from dsec.backends.base import Instance, InstanceSpec, InstanceUsage, Intend, Layer
from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.host import FakeHost
from dsec.backends.fake.instance import FakeInstance
from dsec.core.errors import StorageError
from dsec.core.ids import SandboxId


class Drowsy(FakeInstance):
    """As a machine: its memory can go to swap and to the disk."""

    __slots__ = ("_backend",)

    def __init__(self, backend: DrowsyBackend, of: FakeInstance) -> None:
        super().__init__(backend.host, of.sandbox, of.record, backend.capabilities)
        self._backend = backend

    async def usage(self) -> InstanceUsage:
        return replace(await super().usage(), memory_bytes=self._backend.memory_bytes)

    def give_back(self) -> bool:
        self._backend.given_back.add(self.id)
        return True

    @property
    def gave_back(self) -> bool:
        return self.id in self._backend.given_back

    @property
    def can_sleep(self) -> bool:
        return True

    @property
    def asleep(self) -> bool:
        return self.id in self._backend.asleep

    async def save(self) -> None:
        if self._backend.full:
            raise StorageError("the disk is full")
        self._backend.asleep.add(self.id)

    async def stay(self) -> None:
        self._backend.asleep.discard(self.id)

    async def sleep(self) -> None:
        self._backend.given_back.discard(self.id)

    async def wake(self, layers: tuple[Layer, ...]) -> None:
        self._backend.asleep.discard(self.id)

    async def sleep_on(self) -> None:
        self._backend.asleep.add(self.id)

    async def resume(self) -> None:
        await super().resume()
        self._backend.given_back.discard(self.id)


class DrowsyBackend(FakeBackend):
    def __init__(self, host: FakeHost | None = None) -> None:
        super().__init__(host)
        self.asleep: set[str] = set()
        self.given_back: set[str] = set()
        self.full = False
        self.memory_bytes = 0  # of each, in use

    async def create(self, instance: InstanceSpec, *, intend: Intend, deadline_s: float) -> Instance:
        return self._drowsy(await super().create(instance, intend=intend, deadline_s=deadline_s))

    async def adopt(self, id: SandboxId, record: bytes) -> Instance:
        return self._drowsy(await super().adopt(id, record))

    def _drowsy(self, made: Instance) -> Instance:
        assert isinstance(made, FakeInstance)
        return Drowsy(self, made)
