"""Many sandboxes at once: what each costs, that idle ones do nothing, that a restarted node has them all again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import dsec
from bench import accounting, density, soak
from bench.accounting import Fleet
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place

pytestmark = [pytest.mark.root, pytest.mark.timeout(1_800)]

WINDOW_S = 0.3


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@pytest_asyncio.fixture
async def client(place: Place) -> AsyncIterator[AsyncClient]:
    """Of a service in a process of its own."""
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        yield client


async def measure(place: Place, count: int, **options: Any) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        with dsec.Client(place.url) as client:
            return density.measure(client, ENVIRONMENT, count, **options)

    return await asyncio.to_thread(run)


async def make(client: AsyncClient, count: int) -> list[AsyncSandbox]:
    turn = asyncio.Semaphore(8)

    async def one() -> AsyncSandbox:
        async with turn:
            return await client.create(ENVIRONMENT, timeout_s=300)

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def fleet_of(client: AsyncClient, place: Place) -> Fleet:
    health = await client.health()
    launcher = place.launcher_pid()
    assert launcher is not None
    return density.fleet_at(health.node, service=health.pid, launcher=launcher)


async def test_what_a_fleet_costs_is_accounted_for(place: Place, client: AsyncClient) -> None:
    found = await measure(place, 15, idle_s=0.2, probes=3, few=3)

    assert found["answered"] == 15
    kib = found["memory_kib_each"]
    parts = {name: value for name, value in kib.items() if name not in ("sum", "machine")}
    assert sum(parts.values()) == pytest.approx(kib["sum"], abs=1.0)
    # What is read of each process is exact, whatever else the machine does.
    assert 20 < kib["agents"] < 1_000
    assert 8 <= kib["agents' page tables"] < 500
    assert kib["agents' kernel stacks"] == 16.0
    assert 0 < kib["files in memory"] < 500
    assert all(found["create_cpu_ms"]["beside_few"][name] > 0 for name in ("service", "sandboxes", "all"))
    assert 1 <= found["descriptors_each"]["service"] <= 4
    assert 0 <= found["descriptors_each"]["launcher"] <= 4


async def test_idle_agents_and_their_launcher_do_nothing(place: Place, client: AsyncClient) -> None:
    await make(client, 5)
    fleet = await fleet_of(client, place)
    watched = [fleet.launcher, *fleet.agents()]
    assert len(watched) == 6

    async def still() -> bool:
        before = accounting.turns(watched)
        await asyncio.sleep(WINDOW_S)
        return accounting.turns(watched) == before

    await eventually(still, deadline_s=60.0)


async def restarted(place: Place, client: AsyncClient, count: int) -> dict[str, float]:
    """kill -9 with `count` sandboxes, and start again: seconds until the service answers, lists all, and each has run a
    command."""
    made = await make(client, count)
    place.kill_node()
    began = time.monotonic()
    place.start_process()
    await place.ready(client)
    ready_s = time.monotonic() - began
    listed = [one.id for one in await client.list()]
    listed_s = time.monotonic() - began
    assert sorted(listed) == sorted(sandbox.id for sandbox in made)
    turn = asyncio.Semaphore(16)

    async def answer(sandbox: AsyncSandbox) -> None:
        async with turn:
            assert (await sandbox.exec(["echo", sandbox.id])).stdout == f"{sandbox.id}\n"

    await asyncio.gather(*map(answer, made))
    return {"ready_s": ready_s, "listed_s": listed_s, "answered_s": time.monotonic() - began}


async def test_a_killed_node_has_its_sandboxes_again(place: Place, client: AsyncClient) -> None:
    await restarted(place, client, 15)


@pytest.mark.slow
async def test_500_sandboxes_outlive_their_node(place: Place, client: AsyncClient) -> None:
    print(await restarted(place, client, 500))


@pytest.mark.slow
async def test_3200_sandboxes_live_and_answer(place: Place, client: AsyncClient) -> None:
    found = await measure(place, 3_200)
    density.show(found)

    assert found["answered"] == 3_200
    assert found["memory_kib_each_fresh"]["idle"] <= density.KIB_EACH_MAX
    assert found["create_cpu_ratio"] <= 1.5
    assert found["idle"]["all_milli_cpu"] <= 100


@pytest.mark.slow
async def test_10000_sandboxes_come_and_go_and_nothing_stays(place: Place, client: AsyncClient) -> None:
    await make(client, 1)
    await client.close()  # its connections would be closed for idleness in the middle, and count as descriptors
    async with place.no_leaks():
        found = await asyncio.to_thread(soak.creates, place.url, ENVIRONMENT, 10_000)
    soak.show(found)

    assert found["cpu_ratio"] <= 1.2
    assert abs(found["slab_change"]) <= 0.05
    assert found["service_change"] <= 0.25
    assert found["launcher_change"] <= 0.05
    assert found["descriptors_change"] == {"service": 0, "launcher": 0}


@pytest.mark.slow
async def test_10000_execs_in_one_sandbox_leave_nothing(place: Place, client: AsyncClient) -> None:
    found = await asyncio.to_thread(soak.execs, place.url, ENVIRONMENT, 10_000)
    soak.show(found)

    assert found["agent_change"] <= 0.05
    assert found["service_change"] <= 0.25
    assert found["descriptors_change"] == {"service": 0, "agent": 0}
