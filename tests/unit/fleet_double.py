"""A cluster of replicas over nodes of the simplest kind, which fail as a test wants."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dsec.cluster.many import ManyNodes
from dsec.cluster.members.nodes import Nodes
from dsec.cluster.registry import Bucket
from dsec.core.errors import (
    DsecError,
    NodeRetiredError,
    Outcome,
    UnavailableError,
)
from dsec.core.ids import NodeId, new_sandbox_id
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.testing.clock import ManualClock
from dsec.testing.shared_state import State, embedded
from dsec.wire.cluster import Card, Heartbeat, Member
from dsec.wire.codec import pack, unpack
from dsec.wire.errors import body_of
from dsec.wire.iam import Holdings, HoldingsQuery
from dsec.wire.many import Created, CreatedMany, CreateMany
from dsec.wire.node import Caller, Method, Stream
from dsec.wire.plans import CreatePlan, PlanRequest
from dsec.wire.records import CreateRequest, ListQuery, NodeLoad, Sandbox, SandboxPage, SandboxRef

CALLER = Caller(principal="p", project="/p", rights=frozenset({"use"}))
NODES = tuple(NodeId(f"aaaaaaa{letter}") for letter in "abcd")


def request(name: str | None = None, cpu: float = 1.0) -> CreateRequest:
    return CreateRequest(
        spec=SandboxSpec(environment=Environment(base="base"), substrate=Substrate.FAKE, name=name, cpu=cpu)
    )


@dataclass
class FakeNode:
    """What of a node matters here: it makes a sandbox once per key, or fails in a given way."""

    id: NodeId
    sandboxes: list[Sandbox] = field(default_factory=list)
    keys: dict[tuple[str, str], Sandbox] = field(default_factory=dict)
    fails: list[DsecError] = field(default_factory=list)  # the next calls, before anything is done
    loses: list[DsecError] = field(default_factory=list)  # the next answers, after all is done
    faults: list[DsecError | str | None] = field(default_factory=list)  # of the next that are asked for together
    destroyed: list[str] = field(default_factory=list)
    calls: int = 0
    gate: asyncio.Event | None = None

    async def call(self, method: Method, body: bytes, caller: Caller, key: str | None) -> bytes:
        if method == Method.LIST:
            query = unpack(body, ListQuery)
            found = [one for one in self.sandboxes if query.name in (None, one.name) and one.ended_at is None]
            return pack(SandboxPage(found[: query.limit]))
        if method == Method.HOLDINGS:
            live = sum(one.ended_at is None for one in self.sandboxes)
            return pack(Holdings({name: {"sandboxes": live} for name in unpack(body, HoldingsQuery).projects}))
        if method == Method.DESTROY:
            self.destroyed.append(unpack(body, SandboxRef).id)
            return pack(None)
        if method == Method.CREATE_PLAN:
            create = unpack(body, PlanRequest).create
            assert create is not None
            known = (caller.project, key) in self.keys
            return pack(CreatePlan(node=self.id, project=caller.project, spec=create.spec, known=known))
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.fails:
            raise self.fails.pop(0)
        made: Sandbox | CreatedMany
        if method == Method.CREATE_MANY:
            many = unpack(body, CreateMany)
            made = CreatedMany(tuple(self.one_of_many(caller.project, many.create, one) for one in many.keys))
        else:
            made = self.once(caller.project, unpack(body, CreateRequest), key)
        if self.loses:
            raise self.loses.pop(0)
        return pack(made)

    def one_of_many(self, project: str, request: CreateRequest, key: str) -> Created:
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, DsecError):
            return Created(error=body_of(fault))
        made = self.once(project, request, key)
        return Created() if fault == "under way" else Created(sandbox=made)

    def once(self, project: str, request: CreateRequest, key: str | None) -> Sandbox:
        sandbox = self.keys.get((project, key)) if key else None
        if sandbox is None:
            sandbox = self.make(project, request)
            if key:
                self.keys[project, key] = sandbox
        return sandbox

    def make(self, project: str, request: CreateRequest) -> Sandbox:
        sandbox = Sandbox(
            id=new_sandbox_id(self.id), state="running", node=self.id, substrate="fake", environment="base",
            project=project, created_at=float(len(self.sandboxes)), cpu=1.0, memory_bytes=1, pids_max=1,
            network="none", name=request.spec.name,
        )  # fmt: skip
        self.sandboxes.append(sandbox)
        return sandbox


@dataclass
class FakeRpc:
    nodes: dict[NodeId, FakeNode]

    async def call(
        self, node: NodeId, method: Method, body: bytes, *, caller: Caller, timeout_s: float, key: str | None = None
    ) -> bytes:
        if node not in self.nodes:
            raise NodeRetiredError(f"no node {node}")
        return await self.nodes[node].call(method, body, caller, key)

    def load(self, node: NodeId) -> NodeLoad | None:
        return None

    async def open(self, node: NodeId, method: Method, body: bytes, *, caller: Caller) -> Stream:
        raise NotImplementedError

    async def close(self) -> None:
        pass


@dataclass
class Cluster:
    state: State
    rpc: FakeRpc
    view: Nodes
    replicas: list[ManyNodes]
    clock: ManualClock

    @property
    def nodes(self) -> list[FakeNode]:
        return list(self.rpc.nodes.values())

    @property
    def one(self) -> ManyNodes:
        return self.replicas[0]

    async def create(self, replica: int = 0, *, key: str | None = None, name: str | None = None) -> Sandbox:
        return await self.replicas[replica].create(request(name), caller=CALLER, key=key, timeout_s=60)

    def all(self) -> list[Sandbox]:
        return [sandbox for node in self.nodes for sandbox in node.sandboxes]

    def only(self, *keep: int) -> None:
        """Other nodes take nothing new."""
        for number, node in enumerate(NODES):
            self.beat(node, admits=number in keep)

    def beat(self, node: NodeId, *, admits: bool = True, load: NodeLoad | None = None) -> None:
        beat = Heartbeat(node=node, term=1, load=load or NodeLoad(sandboxes_max=100), admits=admits)
        self.view.heard(node, pack(beat))


@pytest.fixture
async def cluster(tmp_path: Path, rng: random.Random) -> AsyncIterator[Cluster]:
    clock = ManualClock()
    async with embedded(tmp_path / "state.db") as state:
        for node in NODES:
            member = Member(node=node, installation="i", term=1, joined_at=0.0)
            card = Card(
                node=node, term=1, host="h", port=1, version="1", substrates=("fake",), networks={"fake": ("none",)},
                labels={"zone": node[-1]},
            )  # fmt: skip
            await state.registry.create(Bucket.MEMBERS, node, pack(member))
            await state.registry.create(Bucket.NODES, node, pack(card))
        view = Nodes(state.registry, clock)
        await view.start()
        rpc = FakeRpc({node: FakeNode(node) for node in NODES})
        replicas = [ManyNodes(rpc, view, state.registry, clock, rng=rng) for _ in range(3)]
        found = Cluster(state, rpc, view, replicas, clock)
        for node in NODES:
            found.beat(node)
        yield found
        await view.close()


def lost() -> UnavailableError:
    return UnavailableError("the connection is lost", outcome=Outcome.UNKNOWN)


def unreachable() -> UnavailableError:
    return UnavailableError("it cannot be reached", outcome=Outcome.UNCHANGED)
