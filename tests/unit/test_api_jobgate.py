"""Creates in a job at a replica that has not heard yet what another one has done with the job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from dsec.api.jobgate import made_in_job
from dsec.cluster.embedded.database import Database
from dsec.cluster.embedded.registry import EmbeddedRegistry
from dsec.cluster.jobs.table import Jobs
from dsec.cluster.registry import Registry
from dsec.core.clock import SystemClock
from dsec.core.errors import ConflictError
from dsec.testing.nodes import FAKE_SPEC, caller_of
from dsec.wire.jobs import JobRequest, JobRow, JobState
from dsec.wire.records import CreateRequest, Sandbox

CALLER = caller_of("/team")
WANTED = CreateRequest(spec=msgspec.structs.replace(FAKE_SPEC, job="train"))


class OldView(Jobs):
    """Knows what it was told, and hears of nothing."""

    def __init__(self, registry: Registry, knows: JobRow) -> None:
        super().__init__(registry, SystemClock())
        self.knows = knows

    def known(self, project: str, name: str) -> JobRow | None:
        return self.knows


@dataclass
class Rpc:
    """Of nodes that are asked for nothing but ends."""

    ended: int = 0

    async def call(self, *_: Any, **__: Any) -> bytes:
        self.ended += 1
        return b""


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    database = await Database.open(tmp_path / "cluster.db")
    yield EmbeddedRegistry(database, SystemClock())
    await database.close()


async def stopped(jobs: Jobs) -> JobRow:
    row = await jobs.move("/team", "train", JobState.STOPPED)
    await jobs.settle(row)
    return await jobs.get("/team", "train")


async def test_the_next_job_of_a_name_takes_sandboxes_where_the_one_before_is_still_known(registry: Registry) -> None:
    elsewhere, rpc, wanted = Jobs(registry, SystemClock()), Rpc(), list[CreateRequest]()
    running = await elsewhere.create(JobRequest(name="train"), project="/team", principal="p")
    over = await stopped(elsewhere)
    next_one = await elsewhere.create(JobRequest(name="train"), project="/team", principal="p")

    async def make(request: CreateRequest) -> Sandbox:
        wanted.append(request)
        return cast(Sandbox, object())

    for before in (running, over):
        await made_in_job(OldView(registry, before), cast(Any, rpc), WANTED, CALLER, make)

    assert [request.spec.job_id for request in wanted] == [next_one.id] * 2
    assert rpc.ended == 0


async def test_a_job_that_was_stopped_elsewhere_takes_none(registry: Registry) -> None:
    elsewhere = Jobs(registry, SystemClock())
    running = await elsewhere.create(JobRequest(name="train"), project="/team", principal="p")
    await stopped(elsewhere)

    async def make(request: CreateRequest) -> Sandbox:
        await asyncio.sleep(0)
        raise AssertionError("it was made")

    with pytest.raises(ConflictError, match="stopped"):
        await made_in_job(OldView(registry, running), cast(Any, Rpc()), WANTED, CALLER, make)
