"""The backends that the backend contract is run on. One more backend is one more row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dsec.backends.base import Backend, Instance, InstanceSpec
from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.host import FakeHost
from dsec.backends.registry import BackendSettings, build_backends
from dsec.core.ids import NodeId, new_node_id
from dsec.core.spec import Substrate
from dsec.testing.hosts import Intents, instance_spec
from dsec.testing.leaks import Watched


@dataclass(slots=True)
class BackendUnderTest:
    """`restart` gives a backend as a new node process on the same machine would have it."""

    name: str
    backend: Backend
    make: Callable[[], Backend]
    substrate: Substrate
    node: NodeId
    watched: Watched
    leftovers: Callable[[], list[str]] = lambda: []
    fault_prefix: str | None = None  # of the fault points in `create`
    intents: Intents = field(default_factory=Intents)
    created: list[Instance] = field(default_factory=list)

    def spec(self) -> InstanceSpec:
        return instance_spec(self.substrate, node=self.node)

    async def create(self, spec: InstanceSpec | None = None, *, deadline_s: float = 30.0) -> Instance:
        instance = await self.backend.create(spec or self.spec(), intend=self.intents, deadline_s=deadline_s)
        self.created.append(instance)
        return instance

    async def restart(self) -> Backend:
        await self.backend.close()
        self.backend = self.make()
        return self.backend

    async def close(self) -> None:
        for instance in self.created:
            await self.backend.discard(instance.id, instance.record)
        await self.backend.close()


def _fake(directory: Path) -> BackendUnderTest:
    host = FakeHost()

    def make() -> Backend:
        return FakeBackend(host)

    return BackendUnderTest(
        "fake", make(), make, Substrate.FAKE, new_node_id(), Watched(), host.leftovers, "fake.create."
    )


def _container(directory: Path) -> BackendUnderTest:
    node = new_node_id()
    run_dir, state_dir = directory / "run", directory / "state"
    settings = BackendSettings(
        node, run_dir, state_dir, container={"id_dir": directory / "ids", "cgroup_parent": "dsec-contract"}
    )

    def make() -> Backend:
        return build_backends(settings, frozenset({Substrate.CONTAINER}))[Substrate.CONTAINER]

    watched = Watched(
        markers=(str(directory).encode(),),
        cgroups=(f"dsec-contract/{node}",),
        directories=(run_dir, state_dir),
        lock_directories=(directory / "ids",),
    )
    return BackendUnderTest("container", make(), make, Substrate.CONTAINER, node, watched)


BACKENDS: dict[str, Callable[[Path], BackendUnderTest]] = {"fake": _fake, "container": _container}
