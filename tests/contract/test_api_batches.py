"""Batches of creates at a replica of a cluster: in groups, and yet each item as if it had come alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dsec.api.admission import Admission
from dsec.cluster.jobs.table import Jobs
from dsec.core.errors import CapacityError, LaunchError
from dsec.core.limits import BATCH_GROUP
from dsec.wire.jobs import JobState
from tests.contract.node_double import NODE, NodeDouble
from tests.contract.served import Served, serve, until
from tests.unit.fleet_double import NODES, Cluster, cluster
from tests.unit.test_cluster_together import roomy

__all__ = ["cluster"]

SPEC = {"environment": {"base": "base"}, "substrate": "fake"}
BATCH = "/v1/sandboxes:batch"


@dataclass
class Replica:
    served: Served
    cluster: Cluster
    jobs: Jobs

    async def batch(self, count: int, key: str = "b", by: dict[str, str] | None = None, **more: Any) -> dict[int, Any]:
        """What came of each item."""
        body = {"spec": SPEC | more.pop("spec", {}), "count": count, **more}
        session = self.served.local if by is None else self.served.remote
        async with session.post(BATCH, json=body, headers={"Idempotency-Key": key, **(by or {})}) as answer:
            assert answer.status == 200, await answer.text()
            lines = [json.loads(line) for line in (await answer.read()).splitlines()]
        assert sorted(line["index"] for line in lines) == list(range(count))
        return {line.pop("index"): line for line in lines}


@pytest.fixture
async def replica(short_tmp: Path, cluster: Cluster) -> AsyncIterator[Replica]:
    roomy(cluster)
    async with serve(NodeDouble(), NODE, short_tmp) as served:
        services, fleet = served.server._config.app.services, cluster.one  # type: ignore[union-attr]
        admission = Admission(served.iam.directory, cluster.rpc, fleet)
        for name, part in (("rpc", cluster.rpc), ("fleet", fleet), ("admission", admission)):
            object.__setattr__(services, name, part)
        yield Replica(served, cluster, services.jobs)
        await served.quiet()
        await admission.close()


def ids(items: dict[int, Any]) -> list[str]:
    return [items[index]["sandbox"]["id"] for index in sorted(items)]


async def test_a_batch_is_made_once_in_few_calls_and_its_items_have_keys_of_their_own(replica: Replica) -> None:
    made = ids(await replica.batch(300))

    assert len(set(made)) == len(replica.cluster.all()) == 300
    assert sum(node.calls for node in replica.cluster.nodes) < 60
    assert ids(await replica.batch(300)) == made
    async with replica.served.local.post(
        "/v1/sandboxes", json={"spec": SPEC}, headers={"Idempotency-Key": "b/77"}
    ) as answer:
        assert (await answer.json())["id"] == made[77]
    assert len(replica.cluster.all()) == 300


async def test_items_fail_one_by_one_with_their_own_errors(replica: Replica) -> None:
    replica.cluster.only(0)
    roomy_one(replica)
    replica.cluster.nodes[0].faults = [None, LaunchError("it does not start", step="hello"), CapacityError("full")]

    items = await replica.batch(8)

    codes = Counter(item.get("error", {}).get("code") for item in items.values())
    assert codes == {None: 6, "launch_failed": 1, "no_capacity": 1}


def roomy_one(replica: Replica) -> None:
    roomy(replica.cluster)
    for number, node in enumerate(NODES):
        if number:
            replica.cluster.beat(node, admits=False)


async def test_a_batch_stops_at_the_cap_exactly_and_says_so_for_each(replica: Replica) -> None:
    user = await replica.served.token("/p", "use")
    async with replica.served.local.put("/v1/project/quota?path=/p", json={"sandboxes": 150}) as answer:
        assert answer.status == 200, await answer.text()

    items = await replica.batch(200, by=user)

    codes = Counter(item.get("error", {}).get("code") for item in items.values())
    assert codes == {None: 150, "quota_exceeded": 50}
    assert len(replica.cluster.all()) == 150
    again = await replica.batch(200, by=user)
    for index, item in items.items():
        assert ("sandbox" not in item) or again[index]["sandbox"]["id"] == item["sandbox"]["id"]
    assert len(replica.cluster.all()) == 150


async def test_groups_that_were_begun_are_finished_when_the_caller_goes_and_no_more_are_begun(
    replica: Replica,
) -> None:
    gate = asyncio.Event()
    for node in replica.cluster.nodes:
        node.gate = gate
    asking = asyncio.create_task(replica.batch(1_000))
    await until(lambda: sum(node.calls for node in replica.cluster.nodes) >= 2 * BATCH_GROUP // 8)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
        await asking
    await until(lambda: not replica.served.server.state.tasks)
    gate.set()
    await replica.served.quiet()

    assert len(replica.cluster.all()) == 2 * BATCH_GROUP
    assert len(set(ids(await replica.batch(2 * BATCH_GROUP)))) == len(replica.cluster.all()) == 2 * BATCH_GROUP


async def test_what_waits_for_room_gives_up_when_the_caller_goes(replica: Replica) -> None:
    replica.cluster.only()
    queue = replica.cluster.one.queue
    asking = asyncio.create_task(replica.batch(5, queue_s=3_600))
    await until(lambda: len(queue) == 5)

    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
        await asking
    await replica.served.quiet()
    assert len(queue) == 0


async def test_a_batch_of_a_job_that_is_not_there_says_so_of_each(replica: Replica) -> None:
    items = await replica.batch(4, spec={"job": "none"})

    assert {item["error"]["code"] for item in items.values()} == {"not_found"}
    assert replica.cluster.all() == []


async def test_what_a_job_that_was_stopped_meanwhile_has_got_is_given_up(replica: Replica) -> None:
    async with replica.served.local.post("/v1/jobs", json={"name": "j"}) as answer:
        assert answer.status == 201, await answer.text()
    gate = asyncio.Event()
    for node in replica.cluster.nodes:
        node.gate = gate
    asking = asyncio.create_task(replica.batch(16, spec={"job": "j"}))
    await until(lambda: sum(node.calls for node in replica.cluster.nodes) >= 2)
    await replica.jobs.move("/", "j", JobState.STOPPED)
    gate.set()

    items = await asking
    assert {item["error"]["outcome"] for item in items.values()} == {"gone"}
    gone = [id for node in replica.cluster.nodes for id in node.destroyed]
    assert sorted(gone) == sorted(sandbox.id for sandbox in replica.cluster.all())
