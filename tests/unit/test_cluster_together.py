"""Creates alike that go in groups: each once for its key, told once, whatever becomes of its group."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dsec.cluster.queue import Patience
from dsec.cluster.registry import Bucket
from dsec.core.errors import (
    CapacityError,
    DsecError,
    LaunchError,
    Outcome,
    ProtocolError,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.ids import new_sandbox_id
from dsec.core.limits import CREATES_TOGETHER_MAX
from dsec.wire.codec import pack, unpack
from dsec.wire.many import CreatedMany
from dsec.wire.node import Caller, Method
from dsec.wire.records import NodeLoad, Sandbox
from tests.contract.served import until
from tests.unit.fleet_double import CALLER, NODES, Cluster, cluster, lost, request, unreachable

__all__ = ["cluster"]

Come = Sandbox | DsecError
BIG = NodeLoad(sandboxes_max=100_000)


def keys(count: int, begin: int = 0) -> list[str]:
    return [f"b/{number}" for number in range(begin, begin + count)]


async def create(
    cluster: Cluster,
    wanted: Sequence[str],
    replica: int = 0,
    *,
    queue_s: float = 0.0,
    found: dict[int, Come] | None = None,
) -> list[Come]:
    """What came of each, in the order of the keys."""
    found = {} if found is None else found

    async def told(come: Sequence[tuple[int, Come]]) -> None:
        for place, one in come:
            assert place not in found, "told twice"
            found[place] = one

    await cluster.replicas[replica].together.create(
        request(),
        caller=CALLER,
        keys=wanted,
        timeout_s=60.0,
        patience=lambda: Patience(queue_s) if queue_s else None,
        told=told,
    )
    assert sorted(found) == list(range(len(wanted)))
    return [found[place] for place in range(len(wanted))]


def ids(come: Sequence[Come]) -> list[str]:
    assert all(isinstance(one, Sandbox) for one in come), come
    return [one.id for one in come if isinstance(one, Sandbox)]


def roomy(cluster: Cluster) -> None:
    for node in NODES:
        cluster.beat(node, load=BIG)


async def test_they_are_few_calls_over_all_nodes_and_found_by_their_keys(cluster: Cluster) -> None:
    roomy(cluster)

    made = ids(await create(cluster, keys(100)))

    assert len(set(made)) == len(cluster.all()) == 100
    assert sum(node.calls for node in cluster.nodes) <= 100 // CREATES_TOGETHER_MAX + 1
    assert all(len(node.sandboxes) >= CREATES_TOGETHER_MAX for node in cluster.nodes)
    assert (await cluster.create(1, key="b/7")).id == made[7]
    assert ids(await create(cluster, keys(100), replica=2)) == made
    assert len(cluster.all()) == 100


async def test_small_nodes_are_given_one_at_a_time(cluster: Cluster) -> None:
    ids(await create(cluster, keys(40)))

    assert sum(node.calls for node in cluster.nodes) == 40
    assert max(len(node.sandboxes) for node in cluster.nodes) <= 15


async def test_a_key_of_before_has_its_sandbox_and_the_others_new_ones(cluster: Cluster) -> None:
    roomy(cluster)
    before = await cluster.create(1, key="b/3")

    made = ids(await create(cluster, keys(10)))

    assert made[3] == before.id
    assert len(set(made)) == len(cluster.all()) == 10


async def test_replicas_that_are_asked_for_the_same_at_once_make_it_once(cluster: Cluster) -> None:
    roomy(cluster)

    come = await asyncio.gather(*(create(cluster, keys(30), replica) for replica in range(3)))

    assert len(cluster.all()) == 30
    assert len({tuple(ids(one)) for one in come}) == 1


async def test_what_a_node_refuses_goes_elsewhere_and_the_rest_of_its_group_stays(cluster: Cluster) -> None:
    roomy(cluster)
    for node in cluster.nodes[:2]:
        node.faults = [None, CapacityError("full"), None, CapacityError("full")]

    made = await create(cluster, keys(64))

    assert len(set(ids(made))) == len(cluster.all()) == 64
    cluster.only(3)
    assert ids(await create(cluster, keys(64), replica=1)) == ids(made)


async def test_a_failed_launch_is_told_of_that_one(cluster: Cluster) -> None:
    roomy(cluster)
    cluster.only(0)
    cluster.beat(NODES[0], load=BIG)
    cluster.nodes[0].faults = [None, LaunchError("it does not start", step="hello", outcome=Outcome.GONE)]

    made = await create(cluster, keys(8))

    assert [type(one) for one in made] == [Sandbox, LaunchError, *[Sandbox] * 6]
    assert len(cluster.all()) == 7


async def test_a_node_that_cannot_be_reached_loses_its_groups_to_others(cluster: Cluster) -> None:
    roomy(cluster)
    for node in cluster.nodes[:3]:
        node.fails = [unreachable()]

    assert len(set(ids(await create(cluster, keys(64))))) == len(cluster.all()) == 64


async def test_a_lost_answer_is_told_as_unknown_and_found_by_the_same_keys(cluster: Cluster) -> None:
    roomy(cluster)
    for node in cluster.nodes:
        node.loses = [lost()]

    come = await create(cluster, keys(64))

    unknown = [one for one in come if isinstance(one, DsecError)]
    assert unknown
    assert {one.outcome for one in unknown} == {Outcome.UNKNOWN}
    assert len(set(ids(await create(cluster, keys(64), replica=1)))) == len(cluster.all()) == 64


async def test_what_is_under_way_is_asked_for_by_its_key(cluster: Cluster) -> None:
    roomy(cluster)
    for node in cluster.nodes:
        node.faults = ["under way", None, "under way"]

    assert len(set(ids(await create(cluster, keys(32))))) == len(cluster.all()) == 32


async def test_a_node_of_before_is_asked_for_each(cluster: Cluster) -> None:
    roomy(cluster)
    old = cluster.nodes[0]
    new_call = old.call

    async def call(method: Method, body: bytes, caller: Caller, key: str | None) -> bytes:
        if method == Method.CREATE_MANY:
            raise UnsupportedError("this node does not know create_many")
        return await new_call(method, body, caller, key)

    old.call = call  # type: ignore[method-assign]
    cluster.only(0)
    cluster.beat(NODES[0], load=BIG)

    assert len(set(ids(await create(cluster, keys(20))))) == len(old.sandboxes) == 20


async def test_a_node_that_tells_what_cannot_be_is_not_believed(cluster: Cluster) -> None:
    roomy(cluster)
    cluster.only(0)
    cluster.beat(NODES[0], load=BIG)
    node = cluster.nodes[0]
    new_call = node.call
    lies = ["too few", "of another node"]

    async def lie(method: Method, body: bytes, caller: Caller, key: str | None) -> bytes:
        if method != Method.CREATE_MANY or not lies:
            return await new_call(method, body, caller, key)
        answer = unpack(await new_call(method, body, caller, key), CreatedMany)
        if lies.pop(0) == "too few":
            return pack(CreatedMany(answer.items[1:]))
        made = answer.items[0].sandbox
        assert made is not None
        stolen = type(answer.items[0])(sandbox=type(made)(**{**_fields(made), "id": new_sandbox_id(NODES[1])}))
        return pack(CreatedMany((stolen, *answer.items[1:])))

    node.call = lie  # type: ignore[method-assign]
    few = await create(cluster, keys(4))
    assert [type(one) for one in few] == [ProtocolError] * 4
    other = await create(cluster, keys(4, 4))
    assert [type(one) for one in other] == [ProtocolError, *[Sandbox] * 3]


def _fields(made: Sandbox) -> dict[str, object]:
    return {name: getattr(made, name) for name in made.__struct_fields__}


async def test_when_the_engine_takes_no_groups_each_goes_by_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> list[int]:
        raise UnavailableError("a leader is chosen")

    monkeypatch.setattr(cluster.state.registry, "create_all", refuse)

    assert len(set(ids(await create(cluster, keys(20))))) == len(cluster.all()) == 20
    assert len(await cluster.state.registry.entries(Bucket.OPS)) == 20


async def test_what_finds_no_room_is_refused_or_waits_for_it(cluster: Cluster) -> None:
    for node in NODES:
        cluster.beat(node, load=NodeLoad(sandboxes=98, sandboxes_max=100))

    gate = asyncio.Event()
    for node in cluster.nodes:
        node.gate = gate  # what they have is told when they answer, and then there would be room again
    found: dict[int, Come] = {}
    creating = asyncio.create_task(create(cluster, keys(20), found=found))
    await until(lambda: len(found) == 12)
    gate.set()
    assert Counter(type(one) for one in await creating) == {Sandbox: 8, CapacityError: 12}

    for node in NODES:
        cluster.beat(node, load=NodeLoad(sandboxes=100, sandboxes_max=100))
    waiting = asyncio.create_task(create(cluster, keys(3, 100), 2, queue_s=3_600))  # it hears of room
    await until(lambda: len(cluster.replicas[2].queue) == 3)
    for node in NODES:
        cluster.beat(node, load=NodeLoad(sandboxes=90, sandboxes_max=100))
    assert len(set(ids(await waiting))) == 3


async def test_without_any_node_each_is_told_why(cluster: Cluster) -> None:
    cluster.only()

    assert {type(one) for one in await create(cluster, keys(9))} == {CapacityError}
    assert await cluster.state.registry.entries(Bucket.OPS) == []


async def test_whatever_nodes_do_no_key_has_two_sandboxes_and_none_that_was_told_is_lost(
    cluster: Cluster, rng: random.Random
) -> None:
    roomy(cluster)
    for round in range(15):
        for node in cluster.nodes:
            node.faults = [
                rng.choice([None, None, None, CapacityError("full"), "under way"]) for _ in range(rng.randrange(12))
            ]
            node.fails = [unreachable()] * rng.randrange(2)
            node.loses = [lost()] * rng.randrange(2)
        wanted = [*keys(24, 24 * round), *keys(rng.randrange(6))]  # and some of the first round again
        wanted = list(dict.fromkeys(wanted))
        first = await create(cluster, wanted, rng.randrange(3))
        for node in cluster.nodes:
            node.faults, node.fails, node.loses = [], [], []
        again = ids(await create(cluster, wanted, rng.randrange(3)))
        assert all(one.id == id for one, id in zip(first, again, strict=True) if isinstance(one, Sandbox))

    of_key = Counter(key for node in cluster.nodes for key in node.keys)
    assert max(of_key.values()) == 1
    assert len(of_key) == len(cluster.all()) == 24 * 15
