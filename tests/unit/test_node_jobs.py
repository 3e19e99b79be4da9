"""The sandboxes of a job on one node: whose they are, and which orders count."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import ConflictError, NotFoundError
from dsec.node.origins import Origin
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, fake_node
from dsec.wire.jobs import JobCounts, JobOrder, JobOrderKind, JobPart, JobQuery
from dsec.wire.node import Method, Right
from dsec.wire.records import CreateRequest, ListQuery, Sandbox, SandboxPage

SPEC = msgspec.structs.replace(FAKE_SPEC, job="train")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client.of(caller_of("/team"))


def order(kind: JobOrderKind = JobOrderKind.STOP, *, number: int = 1, id: str = "job_1") -> JobOrder:
    return JobOrder(id=id, job="train", project="/team", order=number, kind=kind)


async def make(node: NodeClient) -> str:
    return (await node.call(Method.CREATE, CreateRequest(spec=SPEC), Sandbox)).id


async def test_another_project_neither_counts_nor_acts(node: NodeClient) -> None:
    id = await make(node)
    other = node.of(caller_of("/other"))

    for method, request in ((Method.JOB_COUNT, JobQuery("/team", "train", "job_1")), (Method.JOB_ACT, order())):
        with pytest.raises(NotFoundError):
            await other.call(method, request, JobCounts)
    own = JobOrder(id="job_1", job="train", project="/other", order=1, kind=JobOrderKind.STOP)
    assert (await other.call(Method.JOB_ACT, own, JobPart)).items == []
    assert (await node.call(Method.JOB_COUNT, JobQuery("/team", "train", "job_1"), JobCounts)).by_state == {
        "running": 1
    }
    assert [one.id for one in (await node.call(Method.LIST, ListQuery(job="train"), SandboxPage)).sandboxes] == [id]


async def test_who_may_only_read_gives_no_orders(node: NodeClient) -> None:
    reader = node.of(caller_of("/team", rights=frozenset({Right.READ})))

    assert (await reader.call(Method.JOB_COUNT, JobQuery("/team", "train", "job_1"), JobCounts)).by_state == {}
    with pytest.raises(Exception, match="right"):
        await reader.call(Method.JOB_ACT, order(), JobPart)


async def test_the_last_order_counts(node: NodeClient) -> None:
    await make(node)
    await node.call(Method.JOB_ACT, order(JobOrderKind.PAUSE, number=5), JobPart)

    with pytest.raises(ConflictError):
        await node.call(Method.JOB_ACT, order(JobOrderKind.RESUME, number=4), JobPart)
    part = await node.call(Method.JOB_ACT, order(JobOrderKind.STOP, number=6), JobPart)

    assert [item.state for item in part.items] == ["gone"]


async def test_a_job_of_the_same_name_is_another_one(node: NodeClient) -> None:
    async def make_of(id: str) -> str:
        spec = msgspec.structs.replace(SPEC, job_id=id)
        return (await node.call(Method.CREATE, CreateRequest(spec=spec), Sandbox)).id

    first, second = await make_of("job_1"), await make_of("job_2")

    part = await node.call(Method.JOB_ACT, order(JobOrderKind.STOP, id="job_1"), JobPart)
    assert [item.sandbox for item in part.items] == [first]
    counts = await node.call(Method.JOB_COUNT, JobQuery("/team", "train", "job_2"), JobCounts)
    assert counts.by_state == {"running": 1}
    with pytest.raises(ConflictError, match="takes no new"):
        await make_of("job_1")
    assert await make_of("job_2") != second


def test_what_is_made_from_a_snapshot_is_of_no_job_unless_asked() -> None:
    origin = Origin(spec=SPEC, layers=())

    assert origin.spec_for(FAKE_SPEC).job is None
    assert origin.spec_for(msgspec.structs.replace(FAKE_SPEC, job="other")).job == "other"
