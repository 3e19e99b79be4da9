"""Creates that wait for room, through the whole of a node and of a cluster's replicas."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.cluster.fleet import OneNode
from dsec.cluster.queue import Patience
from dsec.cluster.rpc import EmbeddedRpc
from dsec.core import limits
from dsec.core.errors import CapacityError, EnvironmentNotFoundError
from dsec.node.service import Service
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, fake_node
from dsec.testing.waiting import eventually
from dsec.wire.records import CreateRequest, NodeLoad, Sandbox
from tests.node_calls import destroy
from tests.unit.fleet_double import CALLER, NODES, Cluster, cluster, request

__all__ = ["cluster"]  # the fixture


@contextlib.asynccontextmanager
async def alone(directory: Path, **settings: object) -> AsyncIterator[tuple[OneNode, NodeClient]]:
    async with fake_node(directory, sandboxes_max=2, **settings) as client:
        rpc = EmbeddedRpc(Service(client.node), client.node.id)
        fleet = OneNode(rpc, client.node.id)
        try:
            yield fleet, client
        finally:
            await fleet.close()
            await rpc.close()


async def make(fleet: OneNode, *, queue_s: float = 60.0, key: str | None = None, project: str = "/test") -> Sandbox:
    return await fleet.create(
        CreateRequest(spec=FAKE_SPEC), caller=caller_of(project), key=key, timeout_s=30.0, patience=Patience(queue_s)
    )


# ---- one node ------------------------------------------------------------------------------------


async def test_a_full_node_gives_the_places_of_those_that_end(tmp_path: Path) -> None:
    async with alone(tmp_path) as (fleet, client):
        made = [await make(fleet) for _ in range(2)]
        waiting = [asyncio.create_task(make(fleet, key=f"k{n}")) for n in range(4)]
        await eventually(lambda: len(fleet._queue) == 4)
        for _ in range(2):
            for sandbox in made:
                await destroy(client, sandbox.id)
            done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=60)
            while len(done) < 2:
                more, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED, timeout=60)
                done |= more
            made, waiting = [task.result() for task in done], list(left)
        assert waiting == []
        assert len(client.node.registry) == 2


async def test_what_expires_leaves_its_place_without_being_asked(tmp_path: Path) -> None:
    async with alone(tmp_path) as (fleet, _):
        await make(fleet)
        spec = msgspec.structs.replace(FAKE_SPEC, ttl_running_s=0.2)
        await fleet.create(CreateRequest(spec=spec), caller=caller_of(), key=None, timeout_s=30.0)

        assert (await asyncio.wait_for(make(fleet), 60)).state == "running"


async def test_without_patience_a_full_node_refuses_at_once_and_with_it_after_its_time(tmp_path: Path) -> None:
    async with alone(tmp_path) as (fleet, client):
        for _ in range(2):
            await make(fleet)
        with pytest.raises(CapacityError) as told:
            await fleet.create(CreateRequest(spec=FAKE_SPEC), caller=caller_of(), key="k", timeout_s=30.0)
        assert "queued_s" not in told.value.detail
        with pytest.raises(CapacityError, match="in vain"):
            await make(fleet, queue_s=0.05, key="k")
        assert len(client.node.registry) == 2


async def test_what_would_never_fit_is_refused_at_once(tmp_path: Path, cluster: Cluster) -> None:
    huge = CreateRequest(spec=msgspec.structs.replace(FAKE_SPEC, memory_bytes=limits.MEMORY_BYTES_MAX))
    async with alone(tmp_path, memory_overcommit=1.0) as (fleet, _):
        with pytest.raises(CapacityError, match="more than") as told:
            await fleet.create(huge, caller=caller_of(), key=None, timeout_s=30.0, patience=Patience(3_600))
        assert told.value.retry_after_s is None
    for node in NODES:
        cluster.beat(node, load=NodeLoad(sandboxes_max=100, memory_promised_bytes_max=1 << 30))
    with pytest.raises(CapacityError, match="more than") as told:
        await cluster.one.create(huge, caller=CALLER, key="k", timeout_s=30.0, patience=Patience(3_600))
    assert told.value.retry_after_s is None


async def test_a_caller_who_goes_leaves_nothing_in_the_queue_and_nothing_made(tmp_path: Path) -> None:
    async with alone(tmp_path) as (fleet, client):
        made = [await make(fleet) for _ in range(2)]
        task = asyncio.create_task(make(fleet))
        await eventually(lambda: len(fleet._queue) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(fleet._queue) == 0
        for sandbox in made:
            await destroy(client, sandbox.id)
        assert len(client.node.registry) == 0


# ---- many ----------------------------------------------------------------------------------------


def patiently(
    cluster: Cluster, replica: int = 0, *, key: str | None = "k", queue_s: float = 60.0
) -> asyncio.Task[Sandbox]:
    work = cluster.replicas[replica].create(request(), caller=CALLER, key=key, timeout_s=60, patience=Patience(queue_s))
    return asyncio.create_task(work)


def fill(cluster: Cluster, *, room: int = 0) -> None:
    for node in NODES:
        cluster.beat(node, load=NodeLoad(sandboxes=100 - room, sandboxes_max=100))


async def test_a_heartbeat_with_room_ends_the_wait(cluster: Cluster) -> None:
    fill(cluster)
    waiting = [patiently(cluster, key=None if n == 3 else f"k{n}") for n in range(4)]
    queue = cluster.one.queue
    await eventually(lambda: len(queue) == 4)
    cluster.view.on_news = queue.wake
    cluster.beat(NODES[2], load=NodeLoad(sandboxes=98, sandboxes_max=100))

    await eventually(lambda: len(cluster.all()) == 2)
    assert len(queue) == 2  # what it has placed itself is counted
    fill(cluster, room=4)
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert len(cluster.all()) == 4


async def test_a_key_that_waits_at_several_replicas_gives_one_sandbox(cluster: Cluster) -> None:
    fill(cluster)
    waiting = [patiently(cluster, replica) for replica in range(3)]
    await eventually(lambda: all(replica.queue for replica in cluster.replicas))
    fill(cluster, room=10)
    for replica in cluster.replicas:
        replica.queue.wake()

    made = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert {sandbox.id for sandbox in made} == {cluster.all()[0].id}
    assert len(cluster.all()) == 1


async def test_one_that_all_nodes_refuse_waits_and_is_placed_on_another(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.fails = [CapacityError("memory is short")]
    task = patiently(cluster)
    await eventually(lambda: len(cluster.one.queue) == 1)
    assert [node.calls for node in cluster.nodes] == [1, 1, 1, 1]

    cluster.view.on_news = cluster.one.queue.wake
    fill(cluster, room=10)
    await asyncio.sleep(0.1)
    assert cluster.all() == []  # each has just refused
    await cluster.clock.advance(1.5)
    fill(cluster, room=10)
    made = await asyncio.wait_for(task, 60)
    assert cluster.all() == [made]


async def test_what_was_refused_in_the_end_may_be_asked_for_elsewhere_at_once(cluster: Cluster) -> None:
    cluster.only(0)
    cluster.nodes[0].fails = [CapacityError("full here"), CapacityError("full here")]
    with pytest.raises(CapacityError):
        await cluster.create(key="k")
    cluster.only(0, 1)

    assert (await cluster.create(1, key="k")).node == NODES[1]


async def test_a_node_without_the_environment_is_not_waited_for(cluster: Cluster) -> None:
    missing = EnvironmentNotFoundError("not here")
    for node in cluster.nodes:
        node.fails = [missing]
    with pytest.raises(EnvironmentNotFoundError):
        await asyncio.wait_for(patiently(cluster), 60)


async def test_how_long_it_waits_is_no_part_of_what_is_asked_for(cluster: Cluster) -> None:
    asked = CreateRequest(spec=request().spec, queue_s=5.0)
    made = await cluster.create(key="k")

    again = await cluster.one.create(asked, caller=CALLER, key="k", timeout_s=60, patience=Patience(5.0))
    assert again == made


async def test_overload_is_refused_at_once_and_every_wait_ends(cluster: Cluster, rng: random.Random) -> None:
    fill(cluster)
    cluster.one.queue._most = cluster.one.queue._per_project = 20
    waiting = [patiently(cluster, key=f"k{n}", queue_s=rng.uniform(0.05, 0.3)) for n in range(60)]

    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    texts = [str(answer) for answer in answers]
    assert all(isinstance(answer, CapacityError) and answer.retry_after_s for answer in answers)
    assert sum("wait already" in text for text in texts) == 40
    assert sum("in vain" in text for text in texts) == 20
    assert len(cluster.one.queue) == 0
