"""The backends that the backend contract is run on. One more backend is one more row."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from dsec.agent.client import AgentClient
from dsec.backends.base import Backend, Instance, InstanceSpec, Layer
from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.host import FakeHost
from dsec.backends.fullvm.images import MachineImages
from dsec.backends.registry import BackendSettings, build_backends
from dsec.core.ids import NodeId, new_node_id, new_sandbox_id
from dsec.core.spec import Substrate
from dsec.testing.hosts import Intents, instance_spec
from dsec.testing.launchers import end_launcher, remove_cgroups
from dsec.testing.leaks import Watched
from dsec.testing.machines import add_machine
from dsec.wire.agent import ClaimArgs
from tests.system.container_images import make_root


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
    clean_up: Callable[[], None] = lambda: None
    layers: tuple[Layer, ...] = ()  # what instances start from: with programs, or nothing but the agent

    claimed: bool = False  # instances were spares before
    ready: Callable[[], object] = lambda: (
        None
    )  # what they begin as is made, once it is known that they can be made at all

    def spec(self) -> InstanceSpec:
        return instance_spec(self.substrate, node=self.node, layers=self.layers)

    async def create(self, spec: InstanceSpec | None = None, *, deadline_s: float = 300.0) -> Instance:
        spec = spec or self.spec()
        if self.claimed:
            spare = replace(spec, id=new_sandbox_id(self.node), spare=True, env={}, user=None, workdir=None)
            instance = await self.backend.create(spare, intend=self.intents, deadline_s=deadline_s)
            self.created.append(instance)
            assert await self.backend.shape(spec) == await self.backend.shape(spare)
            instance = await claimed(self.backend, instance, spec)
            self.intents.records.append(instance.record)  # as the journal has it from then on
            return instance
        instance = await self.backend.create(spec, intend=self.intents, deadline_s=deadline_s)
        self.created.append(instance)
        return instance

    async def restart(self) -> Backend:
        await self.backend.close()
        self.backend = self.make()
        return self.backend

    async def close(self) -> None:
        try:
            for instance in self.created:
                await self.backend.discard(instance.id, instance.record)
            await self.backend.close()
        finally:
            await asyncio.to_thread(self.clean_up)


def _fake(directory: Path) -> BackendUnderTest:
    host = FakeHost()

    def make() -> Backend:
        return FakeBackend(host)

    return BackendUnderTest(
        "fake", make(), make, Substrate.FAKE, new_node_id(), Watched(), host.leftovers, "fake.create."
    )


def _container(directory: Path) -> BackendUnderTest:
    node = new_node_id()
    run_dir, state_dir, id_dir = directory / "run", directory / "state", directory / "ids"
    cgroup_parent = f"dsec-contract-{node}"
    settings = BackendSettings(node, run_dir, state_dir, container={"id_dir": id_dir, "cgroup_parent": cgroup_parent})

    def make() -> Backend:
        return build_backends(settings, frozenset({Substrate.CONTAINER}))[Substrate.CONTAINER]

    def clean_up() -> None:
        end_launcher(run_dir)
        remove_cgroups(cgroup_parent)

    watched = Watched(
        markers=(str(directory).encode(),),
        cgroups=(cgroup_parent,),
        directories=(run_dir, state_dir),
        lock_directories=(id_dir,),
    )
    return BackendUnderTest("container", make(), make, Substrate.CONTAINER, node, watched, clean_up=clean_up)


@cache
def shared_templates() -> Path:
    """A template takes seconds to make: all tests share them, as sandboxes of a node that has run for long do."""
    directory = Path(tempfile.mkdtemp(prefix="dsec-templates-", dir="/tmp"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _microvm(directory: Path, **more: object) -> BackendUnderTest:
    node = new_node_id()
    run_dir, state_dir, id_dir = directory / "run", directory / "state", directory / "ids"
    cgroup_parent = f"dsec-contract-{node}"
    templates = shared_templates() / "micro"
    microvm: dict[str, object] = {"id_dir": id_dir, "cgroup_parent": cgroup_parent, "templates": templates}
    # With a network card it is another template, and another kernel: tests/system/test_vm_proxied.py.
    microvm["proxied"] = False
    settings = BackendSettings(node, run_dir, state_dir, microvm=microvm | more)

    def make() -> Backend:
        return build_backends(settings, frozenset({Substrate.MICROVM}))[Substrate.MICROVM]

    def clean_up() -> None:
        remove_cgroups(cgroup_parent)

    watched = Watched(
        markers=(str(directory).encode(),),
        cgroups=(cgroup_parent,),
        directories=(run_dir, state_dir / "vm" / "sandboxes", state_dir / "vm" / "saved"),
        lock_directories=(id_dir,),
    )
    return BackendUnderTest("microvm", make(), make, Substrate.MICROVM, node, watched, clean_up=clean_up)


@cache
def shared_images() -> Path:
    """Of machines: one whose disk holds a shell and a few tools."""
    directory = shared_templates() / "images"
    root = make_root(shared_templates() / "root", python=False)
    try:
        add_machine(MachineImages(directory), "test", root, Path("/var/cache/dsec/vm"))
    finally:
        shutil.rmtree(root)
    return directory


def _fullvm(directory: Path) -> BackendUnderTest:
    node = new_node_id()
    run_dir, state_dir, id_dir = directory / "run", directory / "state", directory / "ids"
    cgroup_parent = f"dsec-contract-{node}"
    fullvm: dict[str, object] = {
        "id_dir": id_dir,
        "cgroup_parent": cgroup_parent,
        "templates": shared_templates() / "full",
        "images": shared_templates() / "images",
    }
    settings = BackendSettings(node, run_dir, state_dir, fullvm=fullvm)

    def make() -> Backend:
        return build_backends(settings, frozenset({Substrate.FULLVM}))[Substrate.FULLVM]

    def clean_up() -> None:
        remove_cgroups(cgroup_parent)

    watched = Watched(
        markers=(str(directory).encode(),),
        cgroups=(cgroup_parent,),
        directories=(run_dir, state_dir),
        lock_directories=(id_dir,),
    )
    return BackendUnderTest(
        "fullvm", make(), make, Substrate.FULLVM, node, watched, clean_up=clean_up, ready=shared_images
    )


async def claimed(backend: Backend, spare: Instance, spec: InstanceSpec) -> Instance:
    """As the node does it: a spare that cannot be claimed is removed."""
    client: AgentClient | None = None
    try:
        client = await AgentClient.connect(spare.connect, sandbox=spare.id)
        instance = await backend.claim(spare, spec)
        env = {key.encode(): value.encode() for key, value in spec.env.items()}
        workdir = None if spec.workdir is None else spec.workdir.encode()
        hostname = spec.hostname if backend.capabilities.own_machine else None
        args = ClaimArgs(sandbox=spec.id, env=env, user=spec.user, workdir=workdir, hostname=hostname)
        await client.claim(args)
    except BaseException:
        await spare.destroy()
        raise
    finally:
        if client is not None:
            client.close()
    return instance


def _once_spare(make: Callable[[Path], BackendUnderTest]) -> Callable[[Path], BackendUnderTest]:
    def made(directory: Path) -> BackendUnderTest:
        return replace(make(directory), claimed=True)

    return made


def layer_of(root: Path) -> Layer:
    return Layer(digest=hashlib.sha256(str(root).encode()).hexdigest(), kind="directory", meta=str(root))


BACKENDS: dict[str, Callable[..., BackendUnderTest]] = {
    "fake": _fake,
    "container": _container,
    "fake, claimed": _once_spare(_fake),
    "container, claimed": _once_spare(_container),
    "firecracker": partial(_microvm, monitor="firecracker"),
    "microvm": _microvm,
    "microvm, claimed": _once_spare(_microvm),
    "fullvm": _fullvm,
}
