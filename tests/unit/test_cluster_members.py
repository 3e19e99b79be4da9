"""Joining, staying, being fenced, being declared lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from dsec.cluster.directory import Address
from dsec.cluster.events import events_of
from dsec.cluster.log import LogStream, verdict_subject
from dsec.cluster.members.fence import FencedService
from dsec.cluster.members.membership import Membership, Standing, Timing
from dsec.cluster.members.nodes import SUSPECT_S, Nodes, NodeState, NodeView
from dsec.cluster.members.rulings import declare_lost, want
from dsec.cluster.members.verdicts import GRACE_S, Verdicts, verdicts
from dsec.cluster.members.watcher import Watcher
from dsec.cluster.registry import Bucket
from dsec.core.clock import SystemClock
from dsec.core.errors import CapacityError, ForbiddenError, NodeRetiredError, NotFoundError, UnavailableError
from dsec.core.ids import NodeId
from dsec.testing.shared_state import State, embedded
from dsec.wire.cluster import Card, Heartbeat, Member, Ruling, Wanted
from dsec.wire.codec import pack, unpack
from dsec.wire.node import Caller, Method, Stream
from dsec.wire.records import NodeLoad
from tests.contract.served import until

NODE = NodeId("aaaaaaaa")
CALLER = Caller(principal="p", project="/p")
QUICK = Timing(card_ttl_s=60.0, refresh_s=0.05, heartbeat_s=0.02)
SLOW = Timing(card_ttl_s=3_600, refresh_s=3_600, heartbeat_s=0.02)


@dataclass
class Cluster:
    state: State
    nodes: Nodes
    came_back: list[str] = field(default_factory=list)
    clock: SystemClock = field(default_factory=SystemClock)

    def member(self, node: NodeId = NODE, *, installation: str = "i", timing: Timing = QUICK) -> Membership:
        async def tell(body: bytes) -> None:
            self.nodes.heard(node, body)

        async def came_back() -> None:
            self.came_back.append(node)

        card = Card(node=node, term=0, host="127.0.0.1", port=7, version="1")
        return Membership(
            self.state.registry, tell, card, installation=installation, clock=self.clock,
            load=lambda: NodeLoad(sandboxes=5), came_back=came_back, timing=timing,
        )  # fmt: skip

    def standing(self, node: NodeId = NODE) -> NodeState | None:
        view = self.nodes.find(node)
        return view.state(self.clock.monotonic_s()) if view else None


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with embedded(tmp_path / "state.db") as state:
        nodes = Nodes(state.registry, SystemClock())
        await nodes.start()
        yield Cluster(state, nodes)
        await nodes.close()


@contextlib.asynccontextmanager
async def joined(member: Membership) -> AsyncIterator[Membership]:
    await member.join()
    try:
        yield member
    finally:
        await member.leave()


async def test_a_node_that_stops_is_told_as_stopped_and_one_that_comes_back_is_not(cluster: Cluster) -> None:
    def why() -> str:
        view = cluster.nodes.find(NODE)
        assert view is not None
        return str(view.closed(cluster.nodes._clock.monotonic_s() + later_s))

    later_s = 0.0

    member = cluster.member()
    async with joined(member):
        await until(lambda: cluster.standing() == NodeState.LIVE)
    await until(lambda: why().startswith("it has been stopped"))  # at once
    later_s = SUSPECT_S + 1
    await until(lambda: why().startswith("it has been stopped, "))
    async with joined(member):
        await until(lambda: why().startswith("it is late"))


async def test_a_node_that_joins_is_seen_with_its_address_and_load(cluster: Cluster) -> None:
    async with joined(cluster.member()) as member:
        await until(lambda: cluster.standing() == NodeState.LIVE and cluster.nodes.find(NODE).load)  # type: ignore[union-attr]

        assert member.standing == Standing.MEMBER
        assert cluster.nodes.address(NODE) == Address("127.0.0.1", 7, 1)
        assert cluster.nodes.find(NODE).load == NodeLoad(sandboxes=5)  # type: ignore[union-attr]


async def test_each_join_has_a_term_of_its_own(cluster: Cluster) -> None:
    for term in (1, 2, 3):
        async with joined(cluster.member()) as member:
            assert member.term == term


async def test_an_installation_that_is_another_does_not_get_the_id(cluster: Cluster) -> None:
    async with joined(cluster.member(installation="first")):
        pass

    with pytest.raises(ForbiddenError):
        await cluster.member(installation="second").join()


async def test_a_card_that_is_refreshed_outlives_its_time(cluster: Cluster) -> None:
    async with joined(cluster.member(timing=Timing(3.0, 0.05, 0.02))) as member:
        await asyncio.sleep(4.0)

        assert (member.standing, member.term) == (Standing.MEMBER, 1)
        assert cluster.standing() == NodeState.LIVE


async def test_the_older_of_two_processes_with_one_id_serves_no_more(cluster: Cluster) -> None:
    async with joined(cluster.member()) as older, joined(cluster.member()) as newer:
        async with asyncio.timeout(60):
            await older.fenced.wait()

        assert (older.standing, newer.standing) == (Standing.FENCED, Standing.MEMBER)
        with pytest.raises(UnavailableError, match="not in charge"):
            await FencedService(Service(), older).call(Method.GET, b"", caller=CALLER, key=None, timeout_s=1)
        assert cluster.nodes.address(NODE).term == newer.term


async def test_a_member_that_cannot_refresh_admits_nothing_new_and_serves_on(cluster: Cluster) -> None:
    async with joined(cluster.member(timing=Timing(3.0, 3_600, 3_600))) as member:
        service = FencedService(Service(), member)
        await service.call(Method.CREATE, b"", caller=CALLER, key=None, timeout_s=1)
        await until(lambda: member.standing == Standing.LAPSED)

        with pytest.raises(UnavailableError) as told:
            await service.call(Method.CREATE, b"", caller=CALLER, key=None, timeout_s=1)
        assert told.value.outcome == "unchanged"
        assert await service.call(Method.GET, b"x", caller=CALLER, key=None, timeout_s=1) == b"x"


async def test_a_card_that_ended_is_shown_again_under_a_new_term(cluster: Cluster) -> None:
    async with joined(cluster.member()) as member:
        entry = await cluster.state.registry.get(Bucket.NODES, NODE)
        assert entry is not None
        await cluster.state.registry.delete(Bucket.NODES, NODE)
        await until(lambda: member.term == 2 and member.standing == Standing.MEMBER)

    assert cluster.came_back == []


async def test_a_card_that_was_overwritten_with_noise_is_put_right(cluster: Cluster) -> None:
    async with joined(cluster.member()) as member:
        await cluster.state.registry.put(Bucket.NODES, NODE, b"noise")
        await until(lambda: member.term == 2 and cluster.standing() == NodeState.LIVE)


async def test_what_an_operator_wants_reaches_node_and_replicas(cluster: Cluster) -> None:
    async with joined(cluster.member()) as member:
        await want(cluster.state.registry, NODE, Wanted.CORDON)
        await until(lambda: member.wanted == Wanted.CORDON)
        service = FencedService(Service(), member)

        with pytest.raises(CapacityError) as told:
            await service.call(Method.CREATE, b"", caller=CALLER, key=None, timeout_s=1)
        view = cluster.nodes.find(NODE)
        assert view is not None
        assert told.value.detail == {"reason": "cordon"}
        assert not view.takes_new(cluster.clock.monotonic_s())
        assert await service.call(Method.GET, b"x", caller=CALLER, key=None, timeout_s=1) == b"x"

        await want(cluster.state.registry, NODE, Wanted.SERVE)
        await until(lambda: member.admits and view.takes_new(cluster.clock.monotonic_s()))


async def test_a_retired_node_is_gone_for_good(cluster: Cluster) -> None:
    async with joined(cluster.member()) as member:
        await want(cluster.state.registry, NODE, Wanted.RETIRE)
        async with asyncio.timeout(60):
            await member.fenced.wait()
    await until(lambda: cluster.standing() == NodeState.RETIRED)

    with pytest.raises(NodeRetiredError):
        cluster.nodes.address(NODE)
    with pytest.raises(NodeRetiredError):
        await cluster.member().join()
    with pytest.raises(NodeRetiredError):
        await want(cluster.state.registry, NODE, Wanted.SERVE)


async def test_what_never_was_a_member_is_unknown(cluster: Cluster) -> None:
    with pytest.raises(NodeRetiredError):
        cluster.nodes.address(NodeId("zzzzzzzz"))
    with pytest.raises(NotFoundError):
        await want(cluster.state.registry, NodeId("zzzzzzzz"), Wanted.CORDON)


async def test_a_node_that_is_silent_gets_nothing_new_and_then_is_away(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.members.nodes.SUSPECT_S", 0.2)
    await cluster.member(timing=Timing(4.0, 3_600, 3_600)).join()
    await until(lambda: cluster.standing() == NodeState.SUSPECT)
    await until(lambda: cluster.standing() == NodeState.AWAY)

    assert cluster.nodes.address(NODE).port == 7  # its sandboxes may be there yet


async def test_a_heartbeat_of_a_term_that_is_over_counts_for_nothing(cluster: Cluster) -> None:
    async with joined(cluster.member(timing=SLOW)) as older, joined(cluster.member(timing=SLOW)) as newer:
        await until(lambda: cluster.nodes.find(NODE).card and cluster.nodes.address(NODE).term == newer.term)  # type: ignore[union-attr]
        view = cluster.nodes.find(NODE)
        assert view is not None
        await newer.leave()
        before = view.heard_at
        await asyncio.sleep(0.1)

        assert older.term == 1
        assert view.heard_at == before


async def test_a_heartbeat_counts_for_the_node_on_whose_subject_it_came(cluster: Cluster) -> None:
    other = NodeId("bbbbbbbb")
    async with joined(cluster.member()), joined(cluster.member(other)):
        await until(lambda: cluster.standing(other) == NodeState.LIVE and cluster.nodes.find(other).load)  # type: ignore[union-attr]
        forged = Heartbeat(node=other, term=1, load=NodeLoad(sandboxes=99), admits=False)
        cluster.nodes.heard(NODE, pack(forged))

        view = cluster.nodes.find(other)
        assert view is not None
        assert (view.load, view.admits) == (NodeLoad(sandboxes=5), True)


# ---- verdicts ------------------------------------------------------------------------------------


async def test_a_lost_node_is_unavailable_and_is_told_when_it_comes_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.members.verdicts.GRACE_S", 0.5)
    registry = cluster.state.registry
    watchers = [
        Watcher(
            registry, cluster.state.log, cluster.nodes, cluster.state.lease(), cluster.clock,
            engine_since=lambda: 0.0, look_s=0.02,
        )
        for _ in range(2)
    ]  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        tasks = [asyncio.create_task(watcher.run()) for watcher in watchers]
        for number in range(4):
            await stack.enter_async_context(joined(cluster.member(NodeId(f"bbbbbbb{'abcd'[number]}"))))
        await cluster.member(timing=Timing(1.0, 3_600, 0.02)).join()
        await until(lambda: cluster.standing() == NodeState.LOST)
        with pytest.raises(UnavailableError, match="lost"):
            cluster.nodes.address(NODE)
        assert sum(watcher.acts for watcher in watchers) == 1
        assert cluster.came_back == []

        async with joined(cluster.member()) as member:
            await until(lambda: cluster.standing() == NodeState.LIVE)
            assert (member.term, cluster.came_back) == (2, [NODE])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    told = await cluster.state.log.read(LogStream.EVENTS, verdict_subject(NODE))
    kinds = [event.kind for record in told for event in events_of(record)]
    assert kinds.count("node_lost") == 1
    assert kinds.index("node_suspect") < kinds.index("node_lost")


async def test_a_member_that_says_that_it_is_another_brings_no_verdict_over_that_one(cluster: Cluster) -> None:
    other = NodeId("bbbbbbbb")
    await cluster.member(other).join()
    forged = Member(node=other, installation="i", term=1_000, joined_at=0.0)
    await cluster.state.registry.put(Bucket.MEMBERS, NODE, pack(forged))
    await cluster.state.registry.put(Bucket.MEMBERS, "cccccccc", pack(msgspec.structs.replace(forged, node="cccccccc")))
    await until(lambda: cluster.nodes.find(NodeId("cccccccc")) is not None)

    view = cluster.nodes.find(NODE)
    assert view is None or view.member is None


async def test_a_verdict_does_not_hit_a_node_that_has_joined_again(cluster: Cluster) -> None:
    async with joined(cluster.member()):
        entry = await cluster.state.registry.get(Bucket.MEMBERS, NODE)
        assert entry is not None
        old = unpack(entry.value, Member)
    async with joined(cluster.member()):
        await declare_lost(cluster.state.registry, old, at=0.0)
        await asyncio.sleep(0.2)

        assert cluster.standing() == NodeState.LIVE


def view(
    number: int, *, away_since: float | None = None, wanted: Wanted = Wanted.SERVE, lost: bool = False
) -> NodeView:
    id = NodeId(f"node{number:04}".translate(str.maketrans("0123456789", "abcdefghij")))
    card = None if away_since is not None else Card(node=id, term=1, host="h", port=1, version="1")
    member = Member(node=id, installation="i", term=1, joined_at=0.0)
    ruling = Ruling(wanted=wanted, lost_term=1 if lost else 0)
    return NodeView(id, member=member, card=card, ruling=ruling, away_since=away_since, heard_at=100.0)


def judge(nodes: list[NodeView], *, now: float = 100.0, engine_since: float | None = 0.0) -> Verdicts:
    return verdicts(nodes, now=now, engine_since=engine_since)


def test_one_that_is_away_is_lost_after_its_grace() -> None:
    nodes = [view(0, away_since=100.0 - GRACE_S), view(1), view(2)]

    assert judge(nodes).lost == (nodes[0].id,)
    assert judge(nodes, now=99.9) == Verdicts()


def test_many_that_go_together_are_an_outage() -> None:
    nodes = [view(number, away_since=0.0 if number < 3 else None) for number in range(10)]

    assert judge(nodes) == Verdicts(frozen=True)
    assert len(judge(nodes + [view(number) for number in range(10, 20)]).lost) == 3
    assert judge([view(0, away_since=0.0), view(1, away_since=0.0), view(2)]) == Verdicts(frozen=True)
    assert judge([view(0, away_since=0.0), view(1)]).lost != ()


def test_nobody_is_lost_while_the_engine_is_away_or_has_just_come_back() -> None:
    nodes = [view(0, away_since=0.0), *map(view, range(1, 9))]

    assert judge(nodes, engine_since=None) == Verdicts(frozen=True)
    assert judge(nodes, engine_since=95.0) == Verdicts()
    assert judge(nodes, engine_since=90.0).lost == (nodes[0].id,)


def test_those_that_are_lost_or_retired_already_do_not_count() -> None:
    gone = [view(number, away_since=0.0, lost=True) for number in range(5)]
    gone += [view(number, away_since=0.0, wanted=Wanted.RETIRE) for number in range(5, 10)]

    assert judge([*gone, view(10, away_since=0.0), view(11)]).lost == (view(10).id,)


class Service:
    def load(self) -> NodeLoad:
        return NodeLoad()

    async def call(self, method: Method, body: bytes, *, caller: Caller, key: str | None, timeout_s: float) -> bytes:
        return body

    async def serve_stream(self, method: Method, body: bytes, stream: Stream, *, caller: Caller) -> None:
        pass
