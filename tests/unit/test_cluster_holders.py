"""What a create names and only some nodes have draws it there, and what is asked of such a thing finds its node."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dsec.cluster import many
from dsec.cluster.holders import the_holder
from dsec.core.errors import CapacityError, InvalidArgumentError, NotFoundError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.spec import VolumeMount
from dsec.wire.codec import pack, unpack
from dsec.wire.node import Caller, Method
from dsec.wire.records import CreateRequest
from dsec.wire.snapshots import SnapshotRef
from dsec.wire.volumes import VolumeRef
from tests.unit.fleet_double import CALLER, NODES, Cluster, FakeNode, cluster, request, unreachable

__all__ = ["cluster"]  # the fixture


class Holding(FakeNode):
    """Has snapshots and volumes by name; what it lacks it does not find, for a create either."""

    has: frozenset[str] = frozenset()
    asked: int = 0
    silent: bool = False

    async def call(self, method: Method, body: bytes, caller: Caller, key: str | None) -> bytes:
        if method in (Method.SNAPSHOT_GET, Method.VOLUME_GET):
            self.asked += 1
            if self.silent:
                raise unreachable()
            volume = method == Method.VOLUME_GET
            self.check({unpack(body, VolumeRef).name if volume else unpack(body, SnapshotRef).snapshot})
            return pack({})
        if method == Method.CREATE:
            create = unpack(body, CreateRequest)
            named = {volume.name for volume in create.spec.volumes}
            self.check(named | ({create.snapshot} if create.snapshot else set()))
        return await super().call(method, body, caller, key)

    def check(self, names: set[str]) -> None:
        if names - self.has:
            raise NotFoundError(f"no such thing: {min(names - self.has)}")


def holding(cluster: Cluster, **has: str) -> list[Holding]:
    """Names by the last letter of a node's id."""
    nodes = []
    for id in NODES:
        node = Holding(id)
        node.has = frozenset(has.get(id[-1], "").split())
        nodes.append(node)
    cluster.rpc.nodes = dict(zip(NODES, nodes, strict=True))
    return nodes


def of_snapshot(name: str = "snap") -> CreateRequest:
    return msgspec.structs.replace(request(), snapshot=name)


async def create(cluster: Cluster, asked: CreateRequest, key: str | None = None) -> Any:
    return await cluster.one.create(asked, caller=CALLER, key=key, timeout_s=60)


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_snapshot_draws_a_create_to_its_node_however_many_there_are(
    cluster: Cluster, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "_NODES_TRIED_MAX", 1)  # as if there were many more than are tried
    holding(cluster, d="snap")
    found = await asyncio.gather(
        *(create(cluster, of_snapshot(), None if key is None else f"{key}{number}") for number in range(8))
    )
    assert {one.node for one in found} == {NODES[3]}


async def test_a_volume_does_too_and_all_that_is_named_has_to_be_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "_NODES_TRIED_MAX", 1)
    holding(cluster, a="one", b="one two", c="two")
    mounts = tuple(VolumeMount(name=name, path=f"/{name}") for name in ("one", "two"))
    for view in cluster.view:
        assert view.card is not None
        view.card = msgspec.structs.replace(view.card, features={"fake": ("volumes",)})
    spec = msgspec.structs.replace(request().spec, volumes=mounts)
    for _ in range(5):
        assert (await create(cluster, CreateRequest(spec=spec))).node == NODES[1]


async def test_where_it_is_and_why_not_there_is_said(cluster: Cluster) -> None:
    holding(cluster, d="snap")
    cluster.only(0, 1, 2)
    with pytest.raises(CapacityError, match=f"is on node {NODES[3]}: .*takes nothing new") as full:
        await create(cluster, of_snapshot())
    assert full.value.retry_after_s is not None


async def test_what_no_node_has_is_not_found_and_asked_for_once(cluster: Cluster) -> None:
    nodes = holding(cluster)
    with pytest.raises(NotFoundError, match="no such thing: snap"):
        await create(cluster, of_snapshot())
    assert [node.asked for node in nodes] == [1] * len(NODES)


async def test_a_thing_that_one_node_has_is_found_without_naming_it(cluster: Cluster) -> None:
    nodes = holding(cluster, b="snap", c="other", d="other")

    async def of(name: str) -> NodeId:
        return await the_holder(cluster.rpc, NODES, ((Method.SNAPSHOT_GET, SnapshotRef(name)),), CALLER)

    assert await of("snap") == NODES[1]
    assert await of("nowhere") == NODES[0]  # which says so
    with pytest.raises(InvalidArgumentError, match=f"{NODES[2]}, {NODES[3]}"):
        await of("other")
    nodes[0].silent = True
    assert await of("snap") == NODES[1]
    with pytest.raises(UnavailableError, match=f"{NODES[0]} does not say"):
        await of("nowhere")
