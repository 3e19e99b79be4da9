"""A node on the fake backend, as tests want it: no images, no machine, no root."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from dsec.backends.base import Layer
from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.egress import FakeForwarder
from dsec.backends.fake.host import FakeHost
from dsec.core.clock import Clock
from dsec.core.errors import EnvironmentNotFoundError, NotFoundError, UnavailableError, UnsupportedError
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.image.compose import roles_of
from dsec.image.environments import StoreFacts
from dsec.image.records import Part, combine
from dsec.node.config import NodeConfig
from dsec.node.environments import Hold, Resolved
from dsec.node.node import Node
from dsec.node.registry import Registry
from dsec.node.service import Service
from dsec.node.services import Sleep
from dsec.node.warmpool import WarmPool
from dsec.storage.disks import DiskLayers
from dsec.wire.codec import pack, unpack
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    EnvironmentInfo,
    EnvironmentStats,
    EnvironmentTrace,
    LayerUse,
    MachineBuild,
    PushRequest,
)
from dsec.wire.frames import Frame
from dsec.wire.images import ExportedImage, ExportRequest
from dsec.wire.layers import CollapseRequest, ComposeRequest, LayerInfo
from dsec.wire.machines import MachineInfo
from dsec.wire.node import Caller, Method, Right

T = TypeVar("T")

FAKE_SPEC = SandboxSpec(environment=Environment(base="base"), substrate=Substrate.FAKE, memory_bytes=64 << 20)
EVERYTHING = frozenset({Right.READ, Right.USE})


def caller_of(project: str = "/test", *, rights: frozenset[str] = EVERYTHING) -> Caller:
    return Caller(principal=f"someone of {project}", project=project, rights=rights)


class NoHold:
    def release(self) -> None:
        """There is nothing to hold."""


class FakeEnvironments:
    """Environments of no layers, by the names given, each with this program; a name that is not there is not found."""

    def __init__(
        self,
        names: Collection[str] = ("base",),
        *,
        entrypoint: tuple[str, ...] = (),
        command: tuple[str, ...] = (),
        disks: DiskLayers | None = None,
    ) -> None:
        self._disks = disks
        self._program = (entrypoint, command)
        self._infos = {
            name: EnvironmentInfo(name=name, layers=(), size_bytes=0, created_at=0.0, source="fake") for name in names
        }

    async def acquire(self, environment: Environment) -> Resolved:
        for name in environment.names():
            await self.get(name)
        entrypoint, command = self._program
        return Resolved(hold=NoHold(), entrypoint=entrypoint, command=command)

    async def hold(self, digests: Collection[str]) -> Hold:
        return NoHold()

    async def layers(self, digests: Sequence[str]) -> tuple[Hold, tuple[Layer, ...]]:
        return NoHold(), tuple(Layer(digest, "fake", "") for digest in digests)

    def disks(self) -> DiskLayers:
        if self._disks is None:
            raise UnsupportedError("this node keeps no layers")
        return self._disks

    async def list(self) -> list[EnvironmentInfo]:
        return list(self._infos.values())

    async def get(self, name: str) -> EnvironmentInfo:
        if name not in self._infos:
            raise EnvironmentNotFoundError(f"no environment {name!r} on this node")
        return self._infos[name]

    async def remove(self, name: str, *, live: Collection[str]) -> None:
        await self.get(name)
        del self._infos[name]

    async def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        info = EnvironmentInfo(name=request.name, layers=(), size_bytes=0, created_at=0.0, source="fake")
        yield BuildEvent(kind="progress", stage="publish", message="nothing to do")
        self._infos[request.name] = info
        yield BuildEvent(kind="done", environment=info)

    async def push(self, request: PushRequest) -> AsyncIterator[BuildEvent]:
        info = await self.get(request.name)
        yield BuildEvent(kind="progress", stage="push", message="nothing to do")
        yield BuildEvent(kind="done", environment=info)

    async def export(self, request: ExportRequest) -> AsyncIterator[BuildEvent]:
        await self.get(request.name)
        exported = ExportedImage(reference="fake", digest="sha256:" + "0" * 64, size_bytes=0)
        yield BuildEvent(kind="progress", stage="push", message="nothing to do")
        yield BuildEvent(kind="done", exported=exported)

    async def build_machine(self, request: MachineBuild, target: Path) -> AsyncGenerator[BuildEvent]:
        (target / "disk").write_bytes(bytes(512))
        machine = MachineInfo(
            name=request.name,
            format="raw",
            firmware="kernel",
            agent="dsec",
            bus="virtio",
            boot_wait_s=0.0,
            disk_bytes=request.disk_bytes,
            used_bytes=512,
            sha256="0" * 64,
            created_at=0.0,
        )
        yield BuildEvent(kind="done", machine=machine)

    async def compose(self, request: ComposeRequest) -> EnvironmentInfo:
        parts = [(role, await self.get(reference)) for role, reference in roles_of(request.of.environment())]
        found = [Part(role, info.name, info) for role, info in parts]
        info = combine(request.name, found, follow=request.of.follow, created_at=0.0)
        return self._infos.setdefault(request.name, info)

    async def update(self, name: str) -> EnvironmentInfo:
        return await self.get(name)

    async def collapse(self, request: CollapseRequest) -> AsyncIterator[BuildEvent]:
        yield BuildEvent(kind="done", environment=await self.get(request.name))

    async def named(self) -> Collection[str]:
        return ()

    async def list_layers(self) -> Sequence[LayerInfo]:
        return ()

    async def get_layer(self, digest: str) -> LayerInfo:
        raise NotFoundError(f"there is no layer {digest} on this node")

    async def use_of_layer(self, digest: str) -> LayerUse:
        raise NotFoundError(f"there is no layer {digest} on this node")

    async def remove_layer(self, digest: str, *, live: Collection[str]) -> None:
        await self.get_layer(digest)

    async def stats(self, name: str) -> EnvironmentStats:
        return EnvironmentStats(name=(await self.get(name)).name, layers=())

    async def trace(self, name: str) -> EnvironmentTrace:
        return EnvironmentTrace(name=(await self.get(name)).name, layers=())

    async def read_failure(self, digests: Sequence[str], since_s: float) -> str | None:
        return None

    async def describe(self) -> StoreFacts | None:
        return None

    async def renew(self) -> None:
        """Nothing is loaded."""

    async def tidy(self, *, live: Collection[str]) -> None:
        """There is nothing to remove."""


def fake_config(state: Path, **changes: Any) -> NodeConfig:
    settings: dict[str, Any] = {
        "state_dir": state / "state",
        "run_dir": state / "run",
        "substrates": frozenset({Substrate.FAKE}),
        "disk_free_bytes_min": 0,
        **changes,
    }
    return NodeConfig(**settings)


def make_fake_node(
    state: Path,
    *,
    host: FakeHost | None = None,
    clock: Clock | None = None,
    sleep: Sleep = asyncio.sleep,
    environments: FakeEnvironments | None = None,
    boot_id: str = "boot",
    links_by_agent: bool = False,
    **changes: Any,
) -> Node:
    """Not started. Another one with the same `state` and `host` is the node after a restart."""
    backend = FakeBackend(host, links_by_agent=links_by_agent)
    return Node(
        fake_config(state, **changes),
        make_backends=lambda _: {Substrate.FAKE: backend},
        environments=environments or FakeEnvironments(),
        clock=clock,
        sleep=sleep,
        boot_id=boot_id,
        make_forwarder=lambda denied: FakeForwarder(backend.host, denied),
    )


@asynccontextmanager
async def fake_node(state: Path, **settings: Any) -> AsyncIterator[NodeClient]:
    """A started node, and a client of its service."""
    node = make_fake_node(state, **settings)
    await node.start()
    try:
        yield NodeClient(node)
    finally:
        await node.close()


async def crash(node: Node) -> None:
    """As near to kill -9 as one process comes: its tasks stop where they are, and nothing is told or written any more.

    What the journal has taken is on the disk, as it is in the page cache then.
    """
    stopped = [node._tasks, *(sandbox._tasks for sandbox in node.registry)]
    for sandbox in node.registry:
        if sandbox._link is not None:
            await sandbox._link.close(UnavailableError("the node was killed"))
        sandbox.execs.close()
    node._services.closing = True
    await _forget_spares(node.warm)
    for tasks in stopped:
        tasks._finishing.clear()
        await tasks.settle()
    node.registry = Registry()
    await node.close()


async def _forget_spares(warm: WarmPool) -> None:
    warm._tasks._finishing.clear()
    for shelf in warm._shelves.values():
        for spare in shelf.spares:
            spare.client.close()
    warm._shelves.clear()
    await warm._tasks.settle()


class NodeClient:
    """Records in, records out, over the service's bytes: what an API does, for one caller."""

    def __init__(self, node: Node, caller: Caller | None = None) -> None:
        self.node = node
        self.service = Service(node)
        self.caller = caller or caller_of()

    def of(self, caller: Caller) -> NodeClient:
        """The same node, asked by somebody else."""
        return NodeClient(self.node, caller)

    async def call(
        self, method: Method, request: Any, answer: type[T], *, key: str | None = None, timeout_s: float = 30.0
    ) -> T:
        body = await self.service.call(method, pack(request), caller=self.caller, key=key, timeout_s=timeout_s)
        return unpack(body, answer)

    @asynccontextmanager
    async def stream(self, method: Method, request: Any) -> AsyncIterator[StreamEnd]:
        """The caller's end of a stream; leaving the block closes it and waits for the node's side."""
        ours, theirs = stream_pair()

        async def serve() -> None:
            error: BaseException | None = None
            try:
                await self.service.serve_stream(method, pack(request), theirs, caller=self.caller)
            except Exception as failed:
                error = failed
            await theirs.close(error)

        task = asyncio.create_task(serve())
        try:
            yield ours
        finally:
            await ours.close()
            await task


class StreamEnd:
    """One end of an in-memory stream; `send` waits while the other side is `_BEHIND_MAX` frames behind."""

    _BEHIND_MAX = 8

    def __init__(self) -> None:
        self._incoming: asyncio.Queue[Frame | BaseException | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(self._BEHIND_MAX)
        self._closed = asyncio.Event()
        self.peer: StreamEnd = self

    async def send(self, frame: Frame) -> None:
        taking = asyncio.create_task(self.peer._room.acquire())
        gone = asyncio.create_task(self.peer._closed.wait())
        try:
            await asyncio.wait({taking, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self.peer._closed.is_set() or self._closed.is_set():
                raise UnavailableError("the other side has closed")
        finally:
            taking.cancel()
            gone.cancel()
        self.peer._incoming.put_nowait(frame)

    async def recv(self) -> Frame | None:
        got = await self._incoming.get()
        if isinstance(got, Frame):
            self._room.release()
            return got
        self._incoming.put_nowait(got)  # it stays closed
        if got is not None:
            raise got
        return None

    async def close(self, error: BaseException | None = None) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self.peer._incoming.put_nowait(error)

    async def all(self) -> list[Frame]:
        """Every frame up to the other side's close. Raises the error with which it closed."""
        frames: list[Frame] = []
        while (frame := await self.recv()) is not None:
            frames.append(frame)
        return frames


def stream_pair() -> tuple[StreamEnd, StreamEnd]:
    one, other = StreamEnd(), StreamEnd()
    one.peer, other.peer = other, one
    return one, other


def fake_instance(node: Node, id: str) -> Any:
    """The fake's own sandbox behind an id: to crash it, or to look inside."""
    found = node.registry.find(id)
    assert found is not None
    assert found.instance is not None
    return cast(Any, found.instance).sandbox
