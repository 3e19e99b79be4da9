"""Over HTTP: what comes back from the disk, while its node is short of memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsec.core.limits import MIB
from dsec.node.config import IdleConfig
from dsec.observe import metrics
from tests.contract.served import Served, serve_fake, until
from tests.drowsy import DrowsyBackend

SPEC = {"environment": {"base": "base"}, "substrate": "fake"}
LEAST = 10 * MIB


@dataclass
class Memory:
    free: int


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory(LEAST + 64 * MIB)
    for module in ("memoryqueue", "node"):
        monkeypatch.setattr(f"dsec.node.{module}.memory_available_bytes", lambda: memory.free)
    return memory


@asynccontextmanager
async def serving(directory: Path, *, wait_s: float) -> AsyncIterator[Served]:
    backend = DrowsyBackend()
    backend.memory_bytes = 8 * MIB
    idle = IdleConfig(resume_wait_s=wait_s)
    async with serve_fake(directory, backend, idle=idle, memory_available_bytes_min=LEAST) as served:
        yield served


async def asleep(api: Served) -> str:
    async with api.local.post("/v1/sandboxes", json={"spec": SPEC}) as answer:
        assert answer.status == 201
        id: str = (await answer.json())["id"]
    async with api.local.post(f"/v1/sandboxes/{id}/pause?deep=true") as answer:
        assert (await answer.json())["asleep"]
    return id


async def resume(api: Served, id: str) -> tuple[int, dict[str, object]]:
    async with api.local.post(f"/v1/sandboxes/{id}/resume") as answer:
        return answer.status, await answer.json()


async def test_one_for_which_there_is_none_in_time_is_refused_by_name_and_sleeps_on(
    memory: Memory, short_tmp: Path
) -> None:
    async with serving(short_tmp, wait_s=0.5) as api:
        id = await asleep(api)
        memory.free = LEAST + 7 * MIB

        status, refused = await resume(api, id)

        assert (status, refused["code"], refused["sandbox"]) == (429, "resume_no_memory", id)
        assert refused["retry_after_s"]
        async with api.local.get(f"/v1/sandboxes/{id}") as answer:
            found = await answer.json()
        assert (found["state"], found["asleep"]) == ("paused", True)
        memory.free = LEAST + 8 * MIB
        status, found = await resume(api, id)
        assert (status, found["state"]) == (200, "running")


async def test_those_that_wait_come_back_when_there_is_some_and_no_create_takes_it_before(
    memory: Memory, short_tmp: Path
) -> None:
    async with serving(short_tmp, wait_s=600.0) as api:
        ids = [await asleep(api), await asleep(api)]
        memory.free = LEAST + 7 * MIB
        asked = [asyncio.create_task(resume(api, id)) for id in ids]
        await until(lambda: metrics.RESUMES_WAITING._value.get() == 2)

        async with api.local.post("/v1/sandboxes", json={"spec": SPEC}) as answer:
            assert (answer.status, (await answer.json())["code"]) == (429, "no_capacity")
        memory.free = LEAST + 16 * MIB

        for status, found in [await task for task in asked]:
            assert (status, found["state"]) == (200, "running")
        assert metrics.RESUMES_WAITING._value.get() == 0
