"""Simulated nodes, many in a process: the real link, membership and heartbeats; of sandboxes, only that there are some.

`python -m bench.simnodes`: reads a `Plan` as JSON from its standard input, joins with each of its identities and runs
until SIGTERM. What a node answered for good is in its journal, a line each, so that one that is started again after a
kill has the sandboxes of before, as real nodes do.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import random
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from dsec import __version__
from dsec.cluster.engine.connection import Engine, EngineSettings
from dsec.cluster.engine.layout import Layout
from dsec.cluster.engine.own import OwnKeys
from dsec.cluster.link.server import NodeListener
from dsec.cluster.members.fence import FencedService
from dsec.cluster.members.membership import Membership
from dsec.core.clock import SystemClock
from dsec.core.errors import CapacityError, SandboxNotFoundError, UnsupportedError
from dsec.core.ids import NodeId, new_sandbox_id
from dsec.serve.identity import Identity
from dsec.wire.cluster import Card
from dsec.wire.codec import pack, unpack
from dsec.wire.errors import body_of
from dsec.wire.iam import Holdings, HoldingsQuery
from dsec.wire.many import Created, CreatedMany, CreateMany
from dsec.wire.node import Caller, Method, Stream
from dsec.wire.records import CreateRequest, ListQuery, NodeLoad, Sandbox, SandboxPage, SandboxRef

PRELOADED = "/preloaded"
_GIB = 1 << 30


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    servers: tuple[str, ...]
    identities: tuple[str, ...]  # directories
    journals: str  # directory
    preload: int  # sandboxes that each has when it first starts
    sandboxes_max: int
    create_s: float  # what a create takes
    refuse: float = 0.0  # part of the creates that the node refuses
    seed: int = 1


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A line of a journal: a sandbox that was made; with no `ends_at`, one that was destroyed."""

    id: str
    ends_at: float  # wall clock; 0: it was destroyed
    key: str
    project: str
    memory_bytes: int


class SimulatedNode:
    """`wire.node.NodeService`, of what a cluster's front asks of nodes: create, get, list, destroy, holdings."""

    def __init__(self, node: NodeId, journal: Path, plan: Plan, rng: random.Random) -> None:
        self.node = node
        self._plan = plan
        self._rng = rng
        self._held: dict[str, Held] = {}
        self._ends: list[tuple[float, str]] = []
        self._by_key: dict[tuple[str, str], str] = {}
        self._making: dict[tuple[str, str], asyncio.Future[Sandbox]] = {}
        self._under_way = 0
        self._memory = 0
        known = journal.exists()
        self._journal = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._fill()
        if known:
            self._read(journal)

    def _fill(self) -> None:
        now, mean_s = time.time(), self.mean_s
        for _ in range(self._plan.preload):
            self._add(Held(new_sandbox_id(self.node), now + self._rng.expovariate(1 / mean_s), "", PRELOADED, 1 << 29))

    @property
    def mean_s(self) -> float:
        """With as many creates a second as end, what is there stays as much."""
        return 1_520.0

    def _read(self, journal: Path) -> None:
        for line in journal.read_bytes().splitlines():
            held = msgspec.json.decode(line, type=Held)
            if held.ends_at:
                self._add(held)
            else:
                self._drop(held.id)

    # -- the service -------------------------------------------------------------------------------

    def load(self) -> NodeLoad:
        self._expire()
        return NodeLoad(
            sandboxes=len(self._held) + self._under_way,
            sandboxes_max=self._plan.sandboxes_max,
            memory_promised_bytes=self._memory,
            memory_promised_bytes_max=self._plan.sandboxes_max * _GIB,
        )

    def knows(self, project: str, key: str) -> bool:
        return (project, key) in self._by_key or (project, key) in self._making

    async def call(self, method: Method, body: bytes, *, caller: Caller, key: str | None, timeout_s: float) -> bytes:
        self._expire()
        if method == Method.CREATE:
            return pack(await self._create(unpack(body, CreateRequest), caller, key))
        if method == Method.CREATE_MANY:
            return pack(await self._create_many(unpack(body, CreateMany), caller))
        if method == Method.DESTROY:
            return pack(self._destroy(unpack(body, SandboxRef).sandbox))
        if method == Method.GET:
            return pack(self._get(unpack(body, SandboxRef).sandbox))
        if method == Method.LIST:
            return pack(self._list(unpack(body, ListQuery)))
        if method == Method.HOLDINGS:
            return pack(self._holdings(unpack(body, HoldingsQuery)))
        raise UnsupportedError(f"a simulated node has no {method}")

    async def serve_stream(self, method: Method, body: bytes, stream: Stream, *, caller: Caller) -> None:
        raise UnsupportedError(f"a simulated node has no {method}")

    async def _create(self, request: CreateRequest, caller: Caller, key: str | None) -> Sandbox:
        place = None if key is None else (caller.project, key)
        if place in self._by_key:
            return self._get(self._by_key[place])  # type: ignore[index]
        if place in self._making:
            return await asyncio.shield(self._making[place])  # type: ignore[index]
        if len(self._held) + self._under_way >= self._plan.sandboxes_max or self._rng.random() < self._plan.refuse:
            raise CapacityError("the node is full", retry_after_s=1.0)
        task = asyncio.ensure_future(self._make(request, caller, key))
        if place is not None:
            self._making[place] = task
            task.add_done_callback(lambda _: self._making.pop(place, None))
        return await asyncio.shield(task)

    async def _create_many(self, request: CreateMany, caller: Caller) -> CreatedMany:
        done = await asyncio.gather(
            *(self._create(request.create, caller, key) for key in request.keys), return_exceptions=True
        )
        items = (Created(sandbox=one) if isinstance(one, Sandbox) else Created(error=body_of(one)) for one in done)
        return CreatedMany(tuple(items))

    async def _make(self, request: CreateRequest, caller: Caller, key: str | None) -> Sandbox:
        self._under_way += 1
        try:
            await asyncio.sleep(self._plan.create_s * self._rng.uniform(0.5, 1.5))
            spec = request.spec
            id = new_sandbox_id(self.node)
            lives_s = spec.ttl_running_s or self._rng.expovariate(1 / self.mean_s)
            held = Held(id, time.time() + lives_s, key or "", caller.project, spec.memory_bytes)
            self._write(held)
            self._add(held)
            return self._shown(held)
        finally:
            self._under_way -= 1

    def _destroy(self, id: str) -> Sandbox:
        held = self._find(id)
        self._write(Held(id, 0.0, held.key, held.project, 0))
        self._drop(id)
        return self._shown(held, "gone")

    def _get(self, id: str) -> Sandbox:
        return self._shown(self._find(id))

    def _find(self, id: str) -> Held:
        held = self._held.get(id)
        if held is None:
            raise SandboxNotFoundError(f"no sandbox {id}", sandbox=id)
        return held

    def _list(self, query: ListQuery) -> SandboxPage:
        found = [self._shown(held) for held, _ in zip(self._held.values(), range(query.limit), strict=False)]
        return SandboxPage(sandboxes=found)

    def _holdings(self, query: HoldingsQuery) -> Holdings:
        own = [held for held in self._held.values() if held.project != PRELOADED]
        found: dict[str, dict[str, int]] = {}
        for project in query.projects:
            under = [h for h in own if h.project == project or h.project.startswith(project.rstrip("/") + "/")]
            found[project] = {"sandboxes": len(under), "memory_bytes": sum(held.memory_bytes for held in under)}
        return Holdings(found)

    # -- inside ------------------------------------------------------------------------------------

    def _shown(self, held: Held, state: str = "running") -> Sandbox:
        return Sandbox(
            id=held.id,
            state=state,
            node=self.node,
            substrate="container",
            environment="base",
            project=held.project,
            created_at=time.time(),
            cpu=1.0,
            memory_bytes=held.memory_bytes,
            pids_max=1024,
            network="none",
        )

    def _write(self, held: Held) -> None:
        os.write(self._journal, msgspec.json.encode(held) + b"\n")

    def _add(self, held: Held) -> None:
        self._held[held.id] = held
        self._memory += held.memory_bytes
        heapq.heappush(self._ends, (held.ends_at, held.id))
        if held.key:
            self._by_key[(held.project, held.key)] = held.id

    def _drop(self, id: str) -> None:
        held = self._held.pop(id, None)
        if held is not None:
            self._memory -= held.memory_bytes

    def _expire(self) -> None:
        now = time.time()
        while self._ends and self._ends[0][0] <= now:
            self._drop(heapq.heappop(self._ends)[1])


async def run(plan: Plan) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with AsyncExitStack() as stack:
        for number, directory in enumerate(plan.identities):
            await _join(plan, Identity.load(Path(directory)), random.Random(plan.seed + number), stack)
        print("ready", flush=True)
        await stop.wait()


async def _join(plan: Plan, identity: Identity, rng: random.Random, stack: AsyncExitStack) -> None:
    node = identity.node
    assert node is not None
    layout = Layout(identity.unit)
    engine = await Engine.connect(
        EngineSettings(plan.servers, layout, node, identity.credentials, identity.to_engine())
    )
    stack.push_async_callback(engine.close)
    service = SimulatedNode(node, Path(plan.journals) / node, plan, rng)
    card = Card(
        node=node,
        term=0,
        host="",
        port=0,
        version=__version__,
        substrates=("container",),
        networks={"container": ("none",)},
        features={"container": ("disk",)},
        started_at=time.time(),
    )

    async def tell(body: bytes) -> None:
        await engine.tell(layout.heartbeat(node), body)

    async def came_back() -> None:
        """These sandboxes have no names."""

    membership = Membership(
        OwnKeys(engine, node),
        tell,
        card,
        installation=node,
        clock=SystemClock(),
        load=service.load,
        came_back=came_back,
    )
    listener = NodeListener(
        FencedService(service, membership, knows=service.knows),
        node,
        tls=identity.of_node(),
        term=lambda: membership.term,
    )
    membership.reached_at(*await listener.listen("127.0.0.1", 0))
    stack.push_async_callback(listener.close)
    await membership.join()
    stack.push_async_callback(membership.leave)


if __name__ == "__main__":
    import uvloop

    uvloop.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)))
