"""Limits and figures of real containers, in whichever hierarchy this host has the controllers: v1, hybrid or v2."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.backends.container.record import ContainerRecord, parse_record
from dsec.core.errors import UnsupportedError
from dsec.density.cgroups import detect, read_keyed, read_number
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve.service import LocalService
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

Service = tuple[LocalService, AsyncClient]

HOST = detect()
MEMORY, CPU, PIDS = 64 << 20, 0.25, 40
# The agent's own, which come on top.
AGENT_PIDS = 8

needs_cgroup2 = pytest.mark.skipif(HOST.v2 is None, reason="this host has no cgroup2 hierarchy")


def needs(controller: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(HOST.limits(controller) is None, reason=f"this host has no {controller} controller")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(small_store: Path) -> AsyncIterator[Service]:
    with private_place(small_store) as place:
        async with served(place) as (service, client):
            yield service, client


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(service: Service) -> AsyncIterator[AsyncSandbox]:
    async with await service[1].create(ENVIRONMENT, memory=MEMORY, cpu=CPU, pids=PIDS) as sandbox:
        yield sandbox


def record_of(service: Service, sandbox: AsyncSandbox) -> ContainerRecord:
    found = service[0].node.registry.find(sandbox.id)
    assert found is not None
    assert found.instance is not None
    return parse_record(found.instance.record)


def directory_of(record: ContainerRecord, controller: str) -> Path:
    """Where the controller counts and limits the sandbox."""
    if HOST.limits(controller) == "v1":
        return Path(record.cgroup1[controller])
    assert record.cgroup2 is not None
    return Path(record.cgroup2)


def unified(record: ContainerRecord) -> Path:
    assert record.cgroup2 is not None
    return Path(record.cgroup2)


async def test_limits_are_where_the_kernel_keeps_them(service: Service, sandbox: AsyncSandbox) -> None:
    record = record_of(service, sandbox)
    expected = {
        ("memory", "v1"): {
            "memory.limit_in_bytes": str(MEMORY),
            **({"memory.memsw.limit_in_bytes": str(MEMORY)} if HOST.v1_swap else {}),
        },
        ("memory", "v2"): {"memory.max": str(MEMORY)},
        ("cpu", "v1"): {"cpu.cfs_quota_us": "25000", "cpu.cfs_period_us": "100000"},
        ("cpu", "v2"): {"cpu.max": "25000 100000"},
        ("pids", "v1"): {"pids.max": str(PIDS + AGENT_PIDS)},
        ("pids", "v2"): {"pids.max": str(PIDS + AGENT_PIDS)},
    }
    wanted = {key: files for key, files in expected.items() if HOST.limits(key[0]) == key[1]}

    found = {
        key: {name: (directory_of(record, key[0]) / name).read_text().strip() for name in files}
        for key, files in wanted.items()
    }

    assert found == wanted


@needs("memory")
async def test_a_command_that_wants_too_much_memory_ends_with_the_cause(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("exec tail /dev/zero", timeout_s=120)

    assert (result.signal, result.cause) == (9, "oom")
    assert (await sandbox.metrics()).oom_kills == 1
    assert (await sandbox.exec("echo on")).stdout == "on\n"


@needs("cpu")
async def test_a_command_gets_no_more_processor_time_than_it_may(service: Service, sandbox: AsyncSandbox) -> None:
    statistics = directory_of(record_of(service, sandbox), "cpu") / "cpu.stat"
    before = (await sandbox.metrics()).cpu_s or 0.0
    started = asyncio.get_running_loop().time()

    process = await sandbox.start("while :; do :; done & while :; do :; done")
    # Where others leave it less than it may, it is not held back for a while.
    await eventually(lambda: read_keyed(statistics)["nr_throttled"] > 0, deadline_s=120)
    await process.kill()
    await process.wait(60)

    spent = ((await sandbox.metrics()).cpu_s or 0.0) - before
    assert spent > 0
    assert spent <= CPU * (asyncio.get_running_loop().time() - started) + 0.1


@needs("pids")
async def test_processes_meet_their_limit_and_can_be_killed_together(service: Service, sandbox: AsyncSandbox) -> None:
    crowd = await sandbox.start("i=0; while [ $i -lt 100 ]; do setsid sleep 600 & i=$((i+1)); done; sleep 600")
    pids = directory_of(record_of(service, sandbox), "pids") / "pids.current"

    await eventually(lambda: (read_number(pids) or 0) >= PIDS, deadline_s=60)
    assert (await sandbox.metrics()).pids_limit == PIDS
    assert (read_number(pids) or 0) <= PIDS + AGENT_PIDS
    await crowd.kill()
    await crowd.wait(60)

    await eventually(lambda: (read_number(pids) or 0) <= AGENT_PIDS, deadline_s=60)
    assert (await sandbox.exec("echo on")).stdout == "on\n"


@needs_cgroup2
async def test_figures_are_known(service: Service, sandbox: AsyncSandbox) -> None:
    await sandbox.exec("head -c 20000000 /dev/zero | tail -c 20000000 | wc -c", check=True)

    figures = await sandbox.metrics()

    assert (figures.cpu_s or 0) > 0
    assert figures.cpu_pressure_s is not None
    assert figures.memory_pressure_s is not None
    if HOST.limits("memory"):
        assert 0 < (figures.memory_bytes or 0) <= (figures.memory_peak_bytes or 0) <= MEMORY
        assert (figures.memory_peak_bytes or 0) > 20_000_000
        assert (figures.memory_limit_bytes, figures.oom_kills) == (MEMORY, 0)
    if HOST.limits("pids"):
        assert 1 <= (figures.pids or 0) <= AGENT_PIDS


@needs_cgroup2
async def test_agent_and_commands_are_apart_and_freeze(service: Service, sandbox: AsyncSandbox) -> None:
    record = record_of(service, sandbox)
    process = await sandbox.start("sleep 600")
    groups = [unified(record) / "agent", unified(record) / "work"]
    assert (groups[0] / "cgroup.procs").read_text().split() == [str(record.pid)]
    assert len([path for path in groups[1].iterdir() if path.is_dir()]) == 1
    assert (unified(record) / "cgroup.procs").read_text() == ""

    await sandbox.pause()
    frozen = [read_keyed(group / "cgroup.events") for group in groups]
    paused = await sandbox.metrics()
    await sandbox.resume()

    assert [(events["frozen"], events["populated"]) for events in frozen] == [(1, 1), (1, 1)]
    assert (paused.cpu_s or 0) > 0
    await process.kill()
    assert (await process.wait(60)).signal == 9
    await eventually(lambda: not [path for path in groups[1].iterdir() if path.is_dir()], deadline_s=60)


@needs_cgroup2
async def test_the_sandbox_owns_what_moves_processes_and_no_limit(service: Service, sandbox: AsyncSandbox) -> None:
    record = record_of(service, sandbox)
    await sandbox.exec("true", check=True)
    top = unified(record)
    movable = {"cgroup.procs", "cgroup.threads", "cgroup.subtree_control"}

    owned = {path.name for path in top.iterdir() if path.is_file() and path.stat().st_uid == record.id_base}

    assert owned == movable
    below = {path.name for path in (top / "work").iterdir() if path.is_file() and path.stat().st_uid == record.id_base}
    assert below == movable
    assert all(path.stat().st_uid == 0 for path in (top / "agent").iterdir())


async def test_a_destroyed_sandbox_has_no_cgroup_in_any_hierarchy(service: Service) -> None:
    sandbox = await service[1].create(ENVIRONMENT, memory=MEMORY, cpu=CPU, pids=PIDS)
    await sandbox.start("setsid sleep 600 & sleep 600")
    record = record_of(service, sandbox)
    places = [Path(path) for path in (record.cgroup2, *record.cgroup1.values()) if path]
    assert places
    assert all(path.is_dir() for path in places)

    await sandbox.destroy()

    await eventually(lambda: not [path for path in places if path.exists()])


async def test_a_node_that_ends_leaves_no_cgroup_that_it_has_made_and_those_of_others(small_store: Path) -> None:
    mounts = [path for path in (HOST.v2, *HOST.v1.values()) if path is not None]
    with private_place(small_store) as place:
        place.name = f"{place.name}/below"
        outer = Path(place.name).parent
        (mounts[0] / outer).mkdir()  # by the operator
        async with served(place) as (_, client):
            async with await client.create(ENVIRONMENT) as sandbox:
                await sandbox.exec("true")
            assert all((mount / place.name).is_dir() for mount in mounts)

        await eventually(lambda: not [mount for mount in mounts if (mount / place.name).exists()])
        assert [mount for mount in mounts if (mount / outer).exists()] == mounts[:1]
        (mounts[0] / outer).rmdir()


async def test_a_disk_limit_that_cannot_be_enforced_is_refused(small_store: Path) -> None:
    with private_place(small_store, settings={"container": {"disk": "directory"}}) as place:
        async with served(place) as (_, client):
            with pytest.raises(UnsupportedError, match="disk limit"):
                await client.create(ENVIRONMENT, disk="20MiB")
            async with await client.create(ENVIRONMENT) as sandbox:
                assert (await sandbox.refresh()).disk_bytes is None


async def test_files_in_memory_end_at_the_disk_limit(small_store: Path) -> None:
    with private_place(small_store, settings={"container": {"disk": "tmpfs"}}) as place:
        async with served(place) as (_, client):
            async with await client.create(ENVIRONMENT, disk="20MiB", memory="256MiB") as sandbox:
                full = await sandbox.exec("head -c 60000000 /dev/zero > /big")

                assert full.exit_code != 0
                assert "No space left" in full.stderr
