"""Creates over many nodes: placed, placed again, once per key; listings in one order."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.cluster.many import ManyNodes
from dsec.cluster.members.nodes import SUSPECT_S
from dsec.cluster.members.rulings import want
from dsec.cluster.pages import merge_pages
from dsec.cluster.placement import Burst
from dsec.cluster.registry import Bucket
from dsec.core import spec
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    EnvironmentNotFoundError,
    IdempotencyError,
    InvalidArgumentError,
    LaunchError,
    Outcome,
    PlatformError,
    ProtocolError,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.ids import NodeId, new_sandbox_id
from dsec.wire.cluster import Card, Wanted
from dsec.wire.codec import pack, unpack
from dsec.wire.cursors import Place, encode_cursor
from dsec.wire.node import Caller, Method
from dsec.wire.records import CreateRequest, ListQuery, NodeLoad, Sandbox, SandboxPage
from tests.contract.served import until
from tests.unit.fleet_double import CALLER, NODES, Cluster, cluster, lost, request, unreachable

__all__ = ["cluster"]

# ---- placing -------------------------------------------------------------------------------------


async def test_creates_spread_over_the_nodes(cluster: Cluster) -> None:
    await asyncio.gather(*(cluster.create() for _ in range(200)))

    assert all(20 < len(node.sandboxes) < 80 for node in cluster.nodes)


async def test_a_full_node_gets_less_than_an_empty_one(cluster: Cluster) -> None:
    for node in NODES[:3]:
        cluster.beat(node, load=NodeLoad(sandboxes=90, sandboxes_max=100))
    for _ in range(40):
        await cluster.create()

    assert len(cluster.nodes[3].sandboxes) > 15


async def test_a_node_that_refuses_is_passed_over(cluster: Cluster) -> None:
    for node in cluster.nodes[:3]:
        node.fails = [CapacityError("full"), EnvironmentNotFoundError("not here")]
    for key in ("a", None):
        await cluster.create(key=key)

    assert len(cluster.nodes[3].sandboxes) >= 1
    assert len(cluster.all()) == 2


async def test_when_all_refuse_the_last_refusal_is_told(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.fails = [CapacityError("full here", retry_after_s=7.0)]

    with pytest.raises(CapacityError, match="full here"):
        await cluster.create(key="a")
    assert [node.calls for node in cluster.nodes] == [1, 1, 1, 1]
    assert await cluster.create(key="a")


async def test_without_a_node_that_takes_anything_new_there_is_no_capacity(cluster: Cluster) -> None:
    cluster.only()
    with pytest.raises(CapacityError, match="no node"):
        await cluster.create(key="a")
    cluster.only(0)
    await cluster.clock.advance(10)  # no heartbeats: all are suspect
    assert {why.text for why in cluster.one.closed().values()} == {"it is late: nothing was heard of it for 10 s"}
    with pytest.raises(CapacityError, match="it is late: nothing was heard of it for 10 s") as told:
        await cluster.create()
    assert "does it run" in str(told.value.hint)

    assert cluster.all() == []


async def test_a_cordoned_node_gets_nothing_new(cluster: Cluster) -> None:
    for node in NODES[1:]:
        await want(cluster.state.registry, node, Wanted.CORDON)
    await until(lambda: [view.takes_new(cluster.clock.monotonic_s()) for view in cluster.view].count(True) == 1)
    for _ in range(5):
        await cluster.create()

    assert len(cluster.nodes[0].sandboxes) == 5


async def test_that_all_nodes_are_cordoned_or_away_is_the_cause_that_is_told(cluster: Cluster) -> None:
    for node in NODES:
        await want(cluster.state.registry, node, Wanted.CORDON)
    await until(lambda: not any(view.takes_new(cluster.clock.monotonic_s()) for view in cluster.view))
    with pytest.raises(CapacityError) as told:
        await cluster.create()
    assert told.value.message.endswith(f"now: it is cordoned (nodes {', '.join(NODES)})")
    assert told.value.hint == f"`dsec cluster serve {NODES[0]}` lets node {NODES[0]} take new sandboxes again"
    assert told.value.retry_after_s is None  # no client waits for what people do

    for node in NODES[1:]:
        await want(cluster.state.registry, node, Wanted.SERVE)
        await cluster.state.registry.delete(Bucket.NODES, node)
    await until(lambda: sum(view.card is None for view in cluster.view) == len(NODES) - 1)
    with pytest.raises(CapacityError) as told:
        await cluster.create()
    assert told.value.retry_after_s  # those that are away may come back

    for node in NODES[:1]:
        await cluster.state.registry.delete(Bucket.NODES, node)
    await until(lambda: all(view.card is None for view in cluster.view))
    await cluster.clock.advance(7)
    with pytest.raises(CapacityError, match=r"it is away, for 7 s \(nodes"):
        await cluster.create()

    for node in NODES:
        await want(cluster.state.registry, node, Wanted.RETIRE)
    await until(lambda: cluster.one.closed() == {})
    with pytest.raises(CapacityError, match=r"sandbox now \(`dsec cluster nodes`"):
        await cluster.create()


async def test_an_environment_that_only_a_cordoned_node_has_is_there(cluster: Cluster) -> None:
    entry = await cluster.state.registry.get(Bucket.NODES, NODES[3])
    assert entry is not None
    card = msgspec.structs.replace(unpack(entry.value, Card), images=("base",))
    await cluster.state.registry.put(Bucket.NODES, NODES[3], pack(card))
    await want(cluster.state.registry, NODES[3], Wanted.CORDON)
    await until(lambda: any(view.card and view.card.images and view.ruling.note == "" for view in cluster.view))
    await until(lambda: not cluster.view.find(NODES[3]).takes_new(cluster.clock.monotonic_s()))  # type: ignore[union-attr]
    for node in cluster.nodes:
        node.fails = [EnvironmentNotFoundError("not here", hint="build it")]

    with pytest.raises(CapacityError, match=f"'base' is on node {NODES[3]} only, and nothing new goes there") as told:
        await cluster.create()

    assert told.value.message.endswith("it is cordoned")
    assert str(told.value.hint).startswith(f"`dsec cluster serve {NODES[3]}`")
    assert told.value.retry_after_s is None


async def test_labels_choose_the_node_and_what_no_node_has_is_unsupported(cluster: Cluster) -> None:
    def asked(zone: str) -> CreateRequest:
        return CreateRequest(spec=msgspec.structs.replace(request().spec, place=spec.Place(labels={"zone": zone})))

    for _ in range(4):
        made = await cluster.one.create(asked("c"), caller=CALLER, key=None, timeout_s=60)
        assert made.node == NODES[2]
    with pytest.raises(UnsupportedError, match="zone"):
        await cluster.one.create(asked("z"), caller=CALLER, key="z", timeout_s=60)


async def test_a_launch_that_failed_is_told_and_not_tried_elsewhere(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.fails = [LaunchError("broken")]

    with pytest.raises(LaunchError):
        await cluster.create(key="a")
    assert sum(node.calls for node in cluster.nodes) == 1


async def test_a_named_node_and_the_one_with_the_environment_are_chosen(cluster: Cluster) -> None:
    entry = await cluster.state.registry.get(Bucket.NODES, NODES[1])
    assert entry is not None
    card = msgspec.structs.replace(unpack(entry.value, Card), images=("base",))
    await cluster.state.registry.put(Bucket.NODES, NODES[1], pack(card))
    await until(lambda: any(view.card is not None and view.card.images for view in cluster.view))
    assert {(await cluster.create()).node for _ in range(5)} == {NODES[1]}
    assert {cluster.one.node_for(Method.CALL, None, image="base") for _ in range(20)} == {NODES[1]}
    assert len({cluster.one.node_for(Method.CALL, None, image="another") for _ in range(100)}) > 1

    named = CreateRequest(spec=msgspec.structs.replace(request().spec, place=spec.Place(node=NODES[3])))
    assert (await cluster.one.create(named, caller=CALLER, key="n", timeout_s=60)).node == NODES[3]
    unknown = CreateRequest(spec=msgspec.structs.replace(request().spec, place=spec.Place(node="zzzzzzzz")))
    with pytest.raises(UnsupportedError, match="node zzzzzzzz, which was asked for"):
        await cluster.one.create(unknown, caller=CALLER, key=None, timeout_s=60)

    await cluster.state.registry.delete(Bucket.NODES, NODES[3])
    await until(lambda: sum(view.card is not None for view in cluster.view) == len(NODES) - 1)
    with pytest.raises(UnavailableError, match=f"node {NODES[3]}, which was asked for, is away") as away:
        await cluster.one.create(named, caller=CALLER, key=None, timeout_s=60)
    assert away.value.retry_after_s is not None


async def test_an_environment_that_no_node_has_may_be_on_one_that_is_away(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.fails = [EnvironmentNotFoundError("not here", hint="build it")] * 2
    with pytest.raises(EnvironmentNotFoundError) as told:
        await cluster.create()
    assert told.value.hint == "build it"

    await cluster.clock.advance(SUSPECT_S + 1)
    for node in NODES[:3]:
        cluster.beat(node)
    with pytest.raises(EnvironmentNotFoundError) as told:
        await cluster.create()
    late = "it is late: nothing was heard of it for 6 s"
    assert told.value.hint == f"it may be where nothing new goes now (node {NODES[3]}: {late}); build it"


async def test_what_overflows_goes_to_nodes_of_the_pool_and_is_refused_in_words(cluster: Cluster) -> None:
    for node, labels in ((NODES[0], {}), (NODES[1], {"pool": "cloud"})):
        card = Card(
            node=node, term=1, host="h", port=1, version="1", substrates=("fake",), networks={"fake": ("none",)},
            labels=labels, images=("base",),
        )  # fmt: skip
        await cluster.state.registry.put(Bucket.NODES, node, pack(card))
    await until(lambda: sum(bool(view.card and view.card.images) for view in cluster.view) == 2)
    cluster.only(0, 1)
    fleet = ManyNodes(cluster.rpc, cluster.view, cluster.state.registry, cluster.clock, bursts=[Burst("cloud", 0.8)])

    async def place() -> str:
        return (await fleet.create(request(), caller=CALLER, key=None, timeout_s=60)).node

    assert await place() == NODES[0]
    cluster.beat(NODES[0], load=NodeLoad(sandboxes=90, sandboxes_max=100))
    assert await place() == NODES[1]
    cluster.beat(NODES[0], load=NodeLoad(sandboxes=10, sandboxes_max=100))
    assert await place() == NODES[0]
    cluster.beat(NODES[0], admits=False)  # what is closed has no room at all
    assert await place() == NODES[1]


# ---- once per key --------------------------------------------------------------------------------


async def test_a_key_gives_one_sandbox_whichever_replica_is_asked(cluster: Cluster) -> None:
    made = await asyncio.gather(*(cluster.create(number % 3, key="k") for number in range(12)))

    assert len({sandbox.id for sandbox in made}) == 1
    assert len(cluster.all()) == 1


async def test_what_a_key_has_made_is_answered_when_nothing_new_is_taken(cluster: Cluster) -> None:
    made = await cluster.create(key="k")
    cluster.only()

    assert await cluster.create(1, key="k") == made
    assert await cluster.replicas[2].node_of_key(CALLER.project, "k") == made.node
    with pytest.raises(CapacityError):
        await cluster.create(key="other")
    assert await cluster.one.node_of_key(CALLER.project, "other") is None


async def test_a_key_is_of_one_request(cluster: Cluster) -> None:
    await cluster.create(key="k")

    with pytest.raises(IdempotencyError):
        await cluster.replicas[1].create(request(cpu=2.0), caller=CALLER, key="k", timeout_s=60)


async def test_projects_do_not_share_keys(cluster: Cluster) -> None:
    other = Caller(principal="p", project="/q", rights=frozenset({"use"}))
    await cluster.create(key="k")
    await cluster.one.create(request(), caller=other, key="k", timeout_s=60)

    assert len(cluster.all()) == 2


async def test_an_answer_that_was_lost_is_found_at_the_same_node(cluster: Cluster) -> None:
    cluster.only(0, 1)
    for node in cluster.nodes:
        node.loses = [lost()]
    with pytest.raises(UnavailableError) as told:
        await cluster.create(key="k")
    cluster.only(2, 3)

    again = await cluster.create(1, key="k")

    assert told.value.outcome == Outcome.UNKNOWN
    assert cluster.all() == [again]


async def test_a_node_that_cannot_be_reached_again_is_not_given_up(cluster: Cluster) -> None:
    cluster.only(0)
    cluster.nodes[0].loses = [lost()]
    with pytest.raises(UnavailableError):
        await cluster.create(key="k")
    cluster.only(1, 2, 3)
    cluster.nodes[0].fails = [unreachable(), CapacityError("cordoned")]

    for replica, error in ((1, UnavailableError), (2, CapacityError)):
        with pytest.raises(error) as told:
            await cluster.create(replica, key="k")
        assert len(cluster.all()) == 1
        if error is UnavailableError:
            assert told.value.outcome == Outcome.UNKNOWN  # the try before may have done it
    assert (await cluster.create(key="k")).node == NODES[0]


async def test_a_node_that_was_never_reached_is_given_up(cluster: Cluster) -> None:
    for node in cluster.nodes[:3]:
        node.fails = [unreachable()]
    made = await cluster.create(key="k")

    assert cluster.all() == [made]
    assert await cluster.create(1, key="k") == made


async def test_a_key_whose_node_has_been_retired_is_placed_anew(cluster: Cluster) -> None:
    made = await cluster.create(key="k")
    del cluster.rpc.nodes[NodeId(made.node)]
    cluster.beat(NodeId(made.node), admits=False)

    again = await cluster.create(key="k")

    assert again.node != made.node
    assert await cluster.create(2, key="k") == again


async def test_two_replicas_that_are_refused_at_once_agree_on_another_node(cluster: Cluster) -> None:
    for node in cluster.nodes[:2]:
        node.gate = asyncio.Event()
        node.fails = [CapacityError("full")] * 8
    creating = [asyncio.create_task(cluster.create(number, key="k")) for number in range(3)]
    for _ in range(200):
        await asyncio.sleep(0)
    for node in cluster.nodes[:2]:
        assert node.gate is not None
        node.gate.set()
    results = await asyncio.gather(*creating, return_exceptions=True)

    made = {result.id for result in results if isinstance(result, Sandbox)}
    assert len(cluster.all()) == len(made) <= 1
    for node in cluster.nodes:
        node.gate, node.fails = None, []
    await cluster.clock.advance(200)  # all tries of before are over
    for node_id in NODES:
        cluster.beat(node_id)
    assert {(await cluster.create(number, key="k")).id for number in range(3)} == {cluster.all()[0].id}


# ---- names ---------------------------------------------------------------------------------------


async def test_a_name_is_given_once_in_the_whole_cluster(cluster: Cluster) -> None:
    results = await asyncio.gather(
        *(cluster.create(number % 3, name="db") for number in range(9)), return_exceptions=True
    )

    made = [result for result in results if isinstance(result, Sandbox)]
    refused = [result for result in results if isinstance(result, ConflictError)]
    assert (len(made), len(refused)) == (1, 8)
    with pytest.raises(ConflictError) as told:
        await cluster.create(1, name="db")
    assert told.value.sandbox == made[0].id


async def test_a_name_is_free_again_when_its_sandbox_has_ended(cluster: Cluster) -> None:
    first = await cluster.create(name="db")
    for node in cluster.nodes:
        node.sandboxes.clear()

    assert (await cluster.create(1, name="db")).id != first.id


async def test_a_create_that_failed_gives_its_name_back(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.fails = [LaunchError("broken")]
    with pytest.raises(LaunchError):
        await cluster.create(name="db")
    for node in cluster.nodes:
        node.fails = []

    assert await cluster.create(1, name="db")


async def test_a_name_whose_node_does_not_answer_is_not_given_away(cluster: Cluster) -> None:
    made = await cluster.create(name="db")
    node = cluster.rpc.nodes.pop(NodeId(made.node))

    async def silent(*_: object) -> bytes:
        raise unreachable()

    node.call = silent  # type: ignore[method-assign]
    cluster.rpc.nodes[node.id] = node
    with pytest.raises(UnavailableError):
        await cluster.create(1, name="db")


async def test_a_named_create_is_asked_for_again_with_its_key(cluster: Cluster) -> None:
    cluster.only(0)
    cluster.nodes[0].loses = [lost()]
    with pytest.raises(UnavailableError):
        await cluster.create(key="k", name="db")

    again = await cluster.create(1, key="k", name="db")

    assert cluster.all() == [again]


# ---- listings and the rest -----------------------------------------------------------------------


async def test_listings_are_of_all_nodes_and_name_those_that_are_silent(cluster: Cluster) -> None:
    for _ in range(20):
        await cluster.create()
    cluster.nodes[2].call = _silent  # type: ignore[method-assign]

    page = await cluster.one.listing(ListQuery(), caller=CALLER, timeout_s=60)

    expected = [sandbox for node in (0, 1, 3) for sandbox in cluster.nodes[node].sandboxes]
    assert {sandbox.id for sandbox in page.sandboxes} == {sandbox.id for sandbox in expected}
    assert page.missing == [NODES[2]]


async def test_a_node_that_tells_of_what_is_not_its_own_is_not_believed(cluster: Cluster) -> None:
    await cluster.create()
    own = cluster.all()[0]
    liar = next(node for node in cluster.nodes if node.id != own.node)

    for page in (SandboxPage([own]), SandboxPage([], "noise"), SandboxPage([], encode_cursor(Place(0.0, own.id)))):

        async def lie(*_: object, page: SandboxPage = page) -> bytes:
            return pack(page)

        liar.call = lie  # type: ignore[method-assign]
        query = ListQuery(cursor=encode_cursor(Place(0.0, own.id)) if page.next else None)
        found = await cluster.one.listing(query, caller=CALLER, timeout_s=60)
        assert found.missing == [liar.id]

    async def fail(*_: object) -> bytes:
        raise PlatformError("whatever it says")

    liar.call = fail  # type: ignore[method-assign]
    assert (await cluster.one.listing(ListQuery(), caller=CALLER, timeout_s=60)).missing == [liar.id]

    async def give(*_: object) -> bytes:
        return pack(own)

    cluster.only(NODES.index(liar.id))
    liar.call = give  # type: ignore[method-assign]
    with pytest.raises(ProtocolError):
        await cluster.create()


async def test_a_name_stays_taken_while_another_try_of_its_create_may_succeed(cluster: Cluster) -> None:
    cluster.only(0)
    node = cluster.nodes[0]
    node.gate = asyncio.Event()
    first = asyncio.create_task(cluster.create(0, key="k", name="db"))
    await until(lambda: node.calls == 1)
    gate, node.gate, node.fails = node.gate, None, [CapacityError("full")]
    with pytest.raises(CapacityError):
        await cluster.create(1, key="k", name="db")
    gate.set()
    made = await first

    with pytest.raises(ConflictError):
        await cluster.create(2, name="db")
    assert cluster.all() == [made]


async def _silent(*_: object) -> bytes:
    raise unreachable()


async def test_what_is_of_one_node_wants_it_named(cluster: Cluster) -> None:
    with pytest.raises(InvalidArgumentError, match="Dsec-Node"):
        cluster.one.node_for(Method.ENVIRONMENT_LIST, None)

    assert cluster.one.node_for(Method.ENVIRONMENT_LIST, NODES[1]) == NODES[1]
    assert cluster.one.node_for(Method.CALL, None) in NODES


@given(data=st.data())
def test_pages_over_many_nodes_hold_everything_once_in_order(data: st.DataObject) -> None:
    times = st.integers(0, 6).map(float)
    held = data.draw(st.lists(st.lists(times, max_size=12), min_size=1, max_size=4))
    nodes = [sorted(Place(at, new_sandbox_id(NODES[n])) for at in ats) for n, ats in enumerate(held)]
    limit = data.draw(st.integers(1, 7))
    seen: list[Place] = []
    cursor = Place(-1.0, "")
    for _ in range(200):
        pages = []
        for places in nodes:
            scanned = data.draw(st.integers(1, 5))  # a node may stop early, with fewer than there are
            after = [place for place in places if place > cursor]
            given_back = after[: min(limit, scanned)]
            more = len(given_back) < len(after)
            pages.append(
                SandboxPage([_sandbox(place) for place in given_back], encode_cursor(given_back[-1]) if more else None)
            )
        merged = merge_pages(pages, limit)
        assert len(merged.sandboxes) <= limit
        seen += [Place(one.created_at, one.id) for one in merged.sandboxes]
        if merged.next is None:
            break
        at, _, id = merged.next.partition(":")
        assert Place(float(at), id) > cursor
        cursor = Place(float(at), id)

    assert seen == sorted(place for places in nodes for place in places)


def _sandbox(place: Place) -> Sandbox:
    return Sandbox(
        id=place.id, state="running", node="n", substrate="fake", environment="base", project="/p",
        created_at=place.created_at, cpu=1.0, memory_bytes=1, pids_max=1, network="none",
    )  # fmt: skip
