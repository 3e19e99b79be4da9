"""Many containers, one after the other and at once, paused, idle, at their end; two nodes on one host."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.core.errors import DsecError, GoneError
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.process import AsyncProcess
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve.service import LocalService
from dsec.testing.nodes import NodeClient
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import Method
from tests.patience import with_a_limit
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

SPEC = SandboxSpec(environment=Environment(ENVIRONMENT), substrate=Substrate.CONTAINER, memory_bytes=64 << 20)


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@pytest.fixture
async def running(place: Place) -> AsyncIterator[tuple[LocalService, AsyncClient]]:
    """With everything that a first sandbox leaves for the next ones."""
    async with served(place) as (service, client):
        await (await client.create(ENVIRONMENT)).destroy()
        yield service, client


Running = tuple[LocalService, AsyncClient]


async def ended(sandbox: AsyncSandbox) -> bool:
    await sandbox.refresh()
    return sandbox.ended


# ---- many ----------------------------------------------------------------------------------------


async def test_64_creates_at_once_all_come_and_all_go(place: Place, running: Running) -> None:
    _, client = running
    async with place.no_leaks():
        made = await client.create_many(64, ENVIRONMENT, memory="64MiB", cpu=0.5)
        sandboxes = [sandbox for sandbox in made if isinstance(sandbox, AsyncSandbox)]
        assert len(sandboxes) == 64, [error for error in made if isinstance(error, DsecError)][:3]
        results = await asyncio.gather(*(sandbox.exec("id -u; cat /etc/hostname") for sandbox in sandboxes))
        assert {result.stdout.split()[0] for result in results} == {"0"}
        assert len({result.stdout.split()[1] for result in results}) == 64
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))


async def test_a_hundred_lives_leave_nothing(place: Place, running: Running) -> None:
    node = NodeClient(running[0].node)
    async with place.no_leaks(descriptors=True):
        for _ in range(25):
            batch = [node.call(Method.CREATE, records.CreateRequest(spec=SPEC), records.Sandbox) for _ in range(4)]
            for sandbox in await asyncio.gather(*batch):
                await node.call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)


@pytest.mark.slow
async def test_two_thousand_lives_cost_the_last_what_they_cost_the_first(place: Place, running: Running) -> None:
    node = NodeClient(running[0].node)
    took: list[float] = []
    async with place.no_leaks(descriptors=True):
        for _ in range(500):
            started = time.monotonic()
            batch = [node.call(Method.CREATE, records.CreateRequest(spec=SPEC), records.Sandbox) for _ in range(4)]
            for sandbox in await asyncio.gather(*batch):
                await node.call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)
            took.append(time.monotonic() - started)

    first, last = sorted(took[:100])[50], sorted(took[-100:])[50]
    assert last < 2 * first, f"the median went from {first:.4f} to {last:.4f} s"


async def test_destroying_twice_and_at_once_is_fine(place: Place, running: Running) -> None:
    _, client = running
    async with place.no_leaks():
        sandbox = await client.create(ENVIRONMENT)
        process = await sandbox.start("sleep 600")
        waiting = asyncio.create_task(process.wait())
        await asyncio.gather(*(sandbox.destroy() for _ in range(8)))
        await sandbox.destroy()
        with contextlib.suppress(GoneError):
            assert (await waiting).status == "unknown"
        with pytest.raises(GoneError):
            await sandbox.exec("true")


async def test_destroy_ends_what_resists(place: Place, running: Running) -> None:
    _, client = running
    stubborn = """
import os, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
for _ in range(5):
    if os.fork() == 0: os.setsid()
print("ready", flush=True)
while True: time.sleep(1)
"""
    async with place.no_leaks():
        sandbox = await client.create(ENVIRONMENT)
        process = await sandbox.start(["python3", "-c", stubborn])
        await eventually(lambda: _printed(process))
        async with asyncio.timeout(60):
            await sandbox.destroy()


async def _printed(process: AsyncProcess) -> bool:
    return (await process.info()).out_bytes > 0


async def _printed_or_ended(process: AsyncProcess) -> bool:
    info = await process.info()
    return info.out_bytes > 0 or info.state != "running"


# ---- time ----------------------------------------------------------------------------------------


async def test_a_sandbox_ends_when_its_time_is_over(place: Place, running: Running) -> None:
    _, client = running
    async with place.no_leaks():
        sandbox = await client.create(ENVIRONMENT, ttl_running_s=1.5)
        with contextlib.suppress(GoneError):  # as fast as that may be
            await sandbox.start("sleep 600")  # being busy does not help

        await eventually(lambda: ended(sandbox), deadline_s=60)

        assert (sandbox.info.state, sandbox.info.cause) == ("gone", "ttl_running")
        with pytest.raises(GoneError):
            await sandbox.exec("true")


async def test_an_idle_sandbox_ends_and_a_busy_one_does_not(place: Place, running: Running) -> None:
    _, client = running
    async with place.no_leaks():
        idle = await client.create(ENVIRONMENT, ttl_idle_s=1.0)
        busy = await client.create(ENVIRONMENT)
        process = await busy.start("sleep 3; echo done")
        await busy.set_ttl(ttl_idle_s=1.0)

        await eventually(lambda: ended(idle), deadline_s=60)
        assert (idle.info.state, idle.info.cause) == ("gone", "ttl_idle")
        assert (await process.wait(60)).stdout == "done\n"

        await eventually(lambda: ended(busy), deadline_s=60)
        assert busy.info.cause == "ttl_idle"


async def test_time_stands_still_for_what_is_paused(running: Running) -> None:
    _, client = running
    async with await client.create(ENVIRONMENT) as sandbox:

        async def paused_in(limit_s: float) -> tuple[AsyncProcess, float, bool]:
            """A command that is paused long before its time is over, if the machine is as fast as that."""
            limit_s, began = 3 * limit_s, time.monotonic()
            process = await sandbox.start("i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done", timeout_s=limit_s)
            await eventually(lambda: _printed_or_ended(process))
            await sandbox.pause()
            if not (early := time.monotonic() - began < limit_s / 2):
                await sandbox.resume()
            return process, limit_s, early

        process, limit_s, early = await with_a_limit(paused_in, lambda found: found[2])
        assert early
        assert sandbox.info.state == "paused"
        seen = (await process.info()).out_bytes
        used = (await sandbox.metrics()).cpu_s
        await asyncio.sleep(limit_s)
        info = await process.info()
        assert (info.state, info.out_bytes) == ("running", seen)
        assert (await sandbox.metrics()).cpu_s == used
        assert sandbox.info.state == "paused"
        await sandbox.resume()

        result = await process.wait(60)
        assert result.timed_out
        assert len(result.stdout_bytes) > seen, "it had time left"
        assert (await sandbox.refresh()).state == "running"


async def test_use_resumes_what_is_paused(running: Running) -> None:
    _, client = running
    async with await client.create(ENVIRONMENT) as sandbox:
        await sandbox.files.write("/tmp/kept", b"kept")
        for use in (
            lambda: sandbox.exec("true"),
            lambda: sandbox.files.read("/tmp/kept"),
            lambda: sandbox.session("s").exec("true"),
        ):
            await sandbox.pause()
            await use()
            assert (await sandbox.refresh()).state == "running"


async def test_a_paused_sandbox_can_be_destroyed(place: Place, running: Running) -> None:
    _, client = running
    async with place.no_leaks():
        sandbox = await client.create(ENVIRONMENT)
        await sandbox.start("sleep 600")
        await sandbox.pause()
        async with asyncio.timeout(60):
            await sandbox.destroy()


async def test_a_paused_sandbox_is_found_paused_by_the_next_node(place: Place) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        sandbox = await client.create(ENVIRONMENT)
        process = await sandbox.start("echo before; sleep 1; echo after")
        await eventually(lambda: _printed(process))
        await sandbox.pause()
        place.kill_node()
        place.start_process()
        await place.ready(client)

        assert (await sandbox.refresh()).state == "paused"
        await sandbox.resume()
        assert (await (await sandbox.attach(process.id)).wait(60)).stdout == "before\nafter\n"


# ---- two nodes -----------------------------------------------------------------------------------


async def test_two_nodes_on_one_host_never_share_an_id(small_store: Path, place: Place) -> None:
    with private_place(small_store, id_dir=place.directory / "i") as second:
        async with served(place) as (first_service, _), served(second) as (second_service, _):
            nodes = [NodeClient(first_service.node), NodeClient(second_service.node)]
            for round in range(3):
                made = await asyncio.gather(
                    *(
                        node.call(Method.CREATE, records.CreateRequest(spec=SPEC), records.Sandbox)
                        for _ in range(8)
                        for node in nodes
                    )
                )
                bases = _id_bases(place) + _id_bases(second)
                assert len(bases) == 16 + 4 * round
                assert len(set(bases)) == len(bases)
                # Some stay, so that what is given back is taken by either.
                keep = 4
                for node in nodes:
                    own = [sandbox.id for sandbox in made if sandbox.node == node.node.id]
                    for id in own[keep // 2 :]:
                        await node.call(Method.DESTROY, records.SandboxRef(id), records.Sandbox)


def _id_bases(place: Place) -> list[int]:
    """First host ids of the live sandboxes, as the kernel has them."""
    found = []
    for procs in place.cgroup_files("sbx_*/agent/cgroup.procs"):
        for pid in procs.read_text().split():
            found.append(int(Path(f"/proc/{pid}/uid_map").read_text().split()[1]))
    return found
