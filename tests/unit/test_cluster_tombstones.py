"""Sandboxes of nodes that are lost or retired: for a day owners are told what they were, and that they are gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.cluster.events import events_of
from dsec.cluster.leases import RegistryLease
from dsec.cluster.log import Log, LogStream, node_subject, verdict_subject
from dsec.cluster.many import ManyNodes
from dsec.cluster.members.nodes import Nodes, NodeState, NodeView
from dsec.cluster.members.rulings import want
from dsec.cluster.members.watcher import Watcher
from dsec.cluster.registry import Bucket, Registry
from dsec.cluster.tombstones import Living, TombstoneRpc
from dsec.core.errors import GoneError, NodeRetiredError, SandboxNotFoundError, UnavailableError
from dsec.core.ids import NodeId, SandboxId, new_sandbox_id
from dsec.testing.clock import ManualClock
from dsec.testing.nodes import caller_of
from dsec.testing.shared_state import State, embedded
from dsec.testing.waiting import eventually
from dsec.wire.cluster import Card, Heartbeat, Member, Wanted
from dsec.wire.codec import pack, unpack
from dsec.wire.events import Denied, Event, Events, Figures
from dsec.wire.node import Caller, ExecStart, Method, Stream
from dsec.wire.records import CreateRequest, ExecRequest, ListQuery, NodeLoad, Sandbox, SandboxPage, SandboxRef
from tests.unit.fleet_double import request

NODE, OTHER = NodeId("aaaaaaaa"), NodeId("bbbbbbbb")
OWNER, ABOVE, STRANGER = caller_of("/team/run"), caller_of("/team"), caller_of("/else")
FIGURES = Figures(created_at=1.0, cpu=2.0, memory_bytes=1 << 30, pids_max=99, network="none")


class Remote:
    """What is behind: nodes that are not there cannot be asked."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.asked: list[NodeId] = []

    async def call(
        self, node: NodeId, method: Method, body: bytes, *, caller: Caller, timeout_s: float, key: str | None = None
    ) -> bytes:
        self.nodes.address(node)
        self.asked.append(node)
        if method == Method.LIST:
            return pack(SandboxPage())
        made = unpack(body, CreateRequest)
        return pack(Sandbox(
            id=new_sandbox_id(node), state="running", node=node, substrate="fake", environment="base", cpu=1.0,
            project=caller.project, created_at=9.0, memory_bytes=1, pids_max=1, network="none", name=made.spec.name,
        ))  # fmt: skip

    async def open(self, node: NodeId, method: Method, body: bytes, *, caller: Caller) -> Stream:
        self.nodes.address(node)
        raise AssertionError("it is not there")

    def load(self, node: NodeId) -> NodeLoad | None:
        return None

    async def close(self) -> None:
        pass


@dataclass
class Cluster:
    state: State
    nodes: Nodes
    rpc: TombstoneRpc
    watcher: Watcher
    clock: ManualClock
    fleet: ManyNodes

    def view(self, node: NodeId = NODE) -> NodeState:
        found = self.nodes.find(node)
        assert found is not None
        return found.state(self.clock.monotonic_s())

    def buried(self) -> bool:
        found = self.nodes.find(NODE)
        return found is not None and found.buried

    def beat(self, node: NodeId, *, admits: bool = True) -> None:
        load = NodeLoad(sandboxes_max=10)
        self.nodes.heard(node, pack(Heartbeat(node=node, term=1, load=load, admits=admits)))

    async def tell(self, *events: Event) -> None:
        id = f"e{events[0].number}-{events[-1].number}"
        await self.state.log.append(LogStream.EVENTS, node_subject(NODE), pack(Events(events)), id=id)

    async def lose(self) -> None:
        """Its card ends; the watcher says that it is lost."""
        await self.state.registry.delete(Bucket.NODES, NODE)
        await eventually(lambda: self.view() == NodeState.AWAY)
        await self.clock.advance(30)
        self.beat(OTHER)
        await self.watcher.look()
        await eventually(lambda: self.view() == NodeState.LOST)

    async def ask(self, id: str, caller: Caller = OWNER, method: Method = Method.GET) -> Sandbox:
        body = pack(SandboxRef(id))
        return unpack(await self.rpc.call(NODE, method, body, caller=caller, timeout_s=5.0), Sandbox)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    clock = ManualClock()
    async with embedded(tmp_path / "state.db") as state:
        for node in (NODE, OTHER):
            member = Member(node=node, installation="i", term=1, joined_at=0.0)
            card = Card(
                node=node, term=1, host="h", port=1, version="1", substrates=("fake",), networks={"fake": ("none",)}
            )
            await state.registry.create(Bucket.MEMBERS, node, pack(member))
            await state.registry.create(Bucket.NODES, node, pack(card))
        nodes = Nodes(state.registry, clock)
        await nodes.start()
        rpc = TombstoneRpc(Remote(nodes), nodes, state.registry, clock)
        watcher = Watcher(
            state.registry, state.log, nodes, RegistryLease(state.registry, clock), clock, engine_since=lambda: 0.0
        )
        found = Cluster(state, nodes, rpc, watcher, clock, ManyNodes(rpc, nodes, state.registry, clock))
        yield found
        await watcher._end_burial()
        await nodes.close()


def event(number: int, kind: str, sandbox: SandboxId, **more: Any) -> Event:
    made = FIGURES if kind == "created" else None
    given: dict[str, Any] = {"project": "/team/run", "name": "n", "labels": {"a": "b"}, "made": made, **more}
    return Event(kind=kind, at=float(number), node=NODE, number=number, sandbox=sandbox, substrate="fake", **given)


# ---- what there was ------------------------------------------------------------------------------


def test_what_lives_is_what_began_and_did_not_end_however_often_it_is_told() -> None:
    one, two, three = (new_sandbox_id(NODE) for _ in range(3))
    told = [
        event(1, "created", one), event(2, "running", one), event(3, "created", two), event(4, "paused", one),
        event(5, "destroyed", two), event(6, "running", three),
    ]  # fmt: skip

    living = Living()
    living.take([*told, *told[:3]])

    found = living.found
    assert {id: found[id].kind for id in found} == {one: "paused", three: "running"}
    assert found[one].made == FIGURES
    assert found[three].made is None


# ---- lost ----------------------------------------------------------------------------------------


async def test_until_the_watcher_has_written_it_down_nothing_is_said_to_be_gone(cluster: Cluster) -> None:
    id = new_sandbox_id(NODE)
    await cluster.tell(event(1, "created", id))
    await cluster.lose()

    with pytest.raises(UnavailableError):
        await cluster.ask(id)


async def test_the_owner_of_a_lost_sandbox_is_told_what_it_was_and_others_nothing(cluster: Cluster) -> None:
    id, ended = new_sandbox_id(NODE), new_sandbox_id(NODE)
    await cluster.tell(event(1, "created", id), event(2, "running", id), event(3, "created", ended))
    refused = {"detail": "evil.example (rules)", "denied": (Denied(host="evil.example"),), "snapshot": "s"}
    await cluster.tell(event(4, "destroyed", ended), event(5, "egress_denied", id, **refused))
    await cluster.lose()
    await cluster.watcher.look()
    await eventually(cluster.buried)

    for who in (OWNER, ABOVE):
        for method in (Method.GET, Method.DESTROY):
            found = await cluster.ask(id, who, method)
            assert (found.id, found.state, found.cause, found.project) == (id, "failed", "node_lost", "/team/run")
            assert (found.cpu, found.memory_bytes, found.created_at, found.labels) == (2.0, 1 << 30, 1.0, {"a": "b"})
    for method, body in (
        (Method.EXEC_START, ExecStart(id, ExecRequest(id="exe_abcdefghabcdefgh", argv=["true"]))),
        (Method.PAUSE, SandboxRef(id)),
    ):
        with pytest.raises(GoneError, match="node_lost") as gone:
            await cluster.rpc.call(NODE, method, pack(body), caller=OWNER, timeout_s=5.0)
        assert gone.value.detail["cause"] == "node_lost"
    with pytest.raises(GoneError):
        await cluster.rpc.open(NODE, Method.SCREEN_VIEW, pack(SandboxRef(id)), caller=OWNER)
    for method in (Method.GET, Method.DESTROY, Method.PAUSE):
        with pytest.raises(SandboxNotFoundError):
            await cluster.ask(id, STRANGER, method)
    with pytest.raises(NodeRetiredError, match="lost"):
        await cluster.ask(ended)

    told = [e for r in await cluster.state.log.read(LogStream.EVENTS, verdict_subject(NODE)) for e in events_of(r)]
    (end,) = (one for one in told if one.sandbox)
    assert (end.kind, end.sandbox, end.cause, end.project) == ("failed", id, "node_lost", "/team/run")
    assert (end.detail, end.denied, end.snapshot) == (None, (), None), "of what had happened before it says nothing"


async def test_listings_have_them_among_the_ended_and_nobody_is_missing(cluster: Cluster) -> None:
    ids = sorted(new_sandbox_id(NODE) for _ in range(5))
    for number, id in enumerate(ids):
        made = msgspec.structs.replace(FIGURES, created_at=float(number))
        await cluster.tell(event(number + 1, "created", id, made=made, job="j" if number == 1 else None))
    await cluster.lose()
    before = await cluster.fleet.listing(ListQuery(), caller=OWNER, timeout_s=5.0)
    await cluster.watcher.look()
    await eventually(cluster.buried)

    after = await cluster.fleet.listing(ListQuery(), caller=OWNER, timeout_s=5.0)
    assert (before.missing, after.missing, after.sandboxes) == ([NODE], [], [])
    seen: list[str] = []
    query = ListQuery(states=["failed"], limit=2)
    while True:
        page = await cluster.fleet.listing(query, caller=OWNER, timeout_s=5.0)
        seen += [one.id for one in page.sandboxes]
        if page.next is None:
            break
        query = msgspec.structs.replace(query, cursor=page.next)
    assert seen == ids
    for asked, who in ((ListQuery(states=["failed"], job="j"), OWNER), (ListQuery(states=["failed"]), STRANGER)):
        page = await cluster.fleet.listing(asked, caller=who, timeout_s=5.0)
        assert [one.id for one in page.sandboxes] == (ids[1:2] if who is OWNER else [])
    assert list(cluster.fleet.silent()) == []


async def test_names_and_keys_are_free_again_and_what_comes_back_is_there(cluster: Cluster) -> None:
    cluster.beat(NODE)
    cluster.beat(OTHER, admits=False)
    made = await cluster.fleet.create(request("name"), caller=OWNER, key="k", timeout_s=30.0)
    assert made.node == NODE
    await cluster.tell(event(1, "created", SandboxId(made.id), name="name"))
    await cluster.lose()
    await cluster.watcher.look()
    await eventually(cluster.buried)

    again = await cluster.fleet.create(request("name"), caller=OWNER, key="k", timeout_s=30.0)
    assert again.node == OTHER
    member = Member(node=NODE, installation="i", term=2, joined_at=0.0)
    await cluster.state.registry.put(Bucket.MEMBERS, NODE, pack(member))
    await cluster.state.registry.put(Bucket.NODES, NODE, pack(Card(node=NODE, term=2, host="h", port=1, version="1")))
    await eventually(lambda: cluster.view() == NodeState.LIVE)

    remote = cluster.rpc._rpc
    assert isinstance(remote, Remote)
    remote.asked.clear()
    await cluster.rpc.call(NODE, Method.LIST, pack(ListQuery()), caller=OWNER, timeout_s=5.0)
    assert remote.asked == [NODE]
    await cluster.state.registry.delete(Bucket.NODES, NODE)
    await eventually(lambda: cluster.view() == NodeState.AWAY)
    assert cluster.rpc._cause(NODE) is None  # it was buried under another term


async def test_a_retired_node_is_told_as_that(cluster: Cluster) -> None:
    id = new_sandbox_id(NODE)
    await cluster.tell(event(1, "created", id))
    await want(cluster.state.registry, NODE, Wanted.RETIRE)
    await eventually(lambda: cluster.view() == NodeState.RETIRED)
    with pytest.raises(NodeRetiredError):
        await cluster.ask(id)
    await cluster.watcher.look()
    await eventually(cluster.buried)

    assert (await cluster.ask(id)).cause == "node_retired"


async def test_a_burial_that_fails_is_done_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [new_sandbox_id(NODE) for _ in range(3)]
    await cluster.tell(*(event(number + 1, "created", id) for number, id in enumerate(ids)))
    await cluster.lose()
    put, fails = cluster.state.registry.put, [True, True]

    async def unreliable(*given: Any, **more: Any) -> int:
        if fails:
            fails.pop()
            raise UnavailableError("away")
        return await put(*given, **more)

    monkeypatch.setattr(cluster.state.registry, "put", unreliable)

    async def look() -> bool:
        await cluster.watcher.look()
        return cluster.buried()

    await eventually(look)
    assert [(await cluster.ask(id)).cause for id in ids] == ["node_lost"] * 3


async def test_of_too_many_the_youngest_are_kept(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.cluster.tombstones.TOMBSTONES_OF_NODE_MAX", 2)
    ids = [new_sandbox_id(NODE) for _ in range(4)]
    await cluster.tell(*(event(number + 1, "created", id) for number, id in enumerate(ids)))
    await cluster.lose()
    await cluster.watcher.look()
    await eventually(cluster.buried)

    assert len(await cluster.state.registry.entries(Bucket.SANDBOXES)) == 2
    assert [(await cluster.ask(id)).cause for id in ids[2:]] == ["node_lost"] * 2
    with pytest.raises(NodeRetiredError):
        await cluster.ask(ids[0])


async def test_what_a_node_has_told_without_measure_keeps_nothing_else_from_being_buried(cluster: Cluster) -> None:
    huge, real = new_sandbox_id(NODE), new_sandbox_id(NODE)
    await cluster.tell(event(1, "created", huge, labels={"a": "x" * 100_000}), event(2, "created", real))
    await cluster.lose()
    await cluster.watcher.look()
    await eventually(cluster.buried)

    assert (await cluster.ask(real)).cause == "node_lost"
    with pytest.raises(NodeRetiredError):
        await cluster.ask(huge)


async def test_a_node_that_cannot_be_buried_does_not_keep_others_from_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.lose()
    other = cluster.nodes.find(OTHER)
    assert other is not None
    monkeypatch.setattr(other, "ruling", msgspec.structs.replace(other.ruling, wanted=Wanted.RETIRE))
    asked: list[str] = []

    async def fails(registry: Registry, log: Log, view: NodeView, *_: Any, **more: Any) -> int:
        asked.append(view.id)
        raise UnavailableError("never")

    monkeypatch.setattr("dsec.cluster.members.watcher.bury", fails)
    for _ in range(4):
        before = len(asked)
        await cluster.clock.advance(0.1)
        cluster.watcher._bury_next()
        await eventually(lambda before=before: len(asked) > before)
        await cluster.watcher._end_burial()

    assert min(NODE, OTHER) in asked
    assert max(NODE, OTHER) in asked
