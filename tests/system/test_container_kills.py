"""kill -9 of the node, of its launcher, of both, of an agent: what runs goes on, and what was printed is not lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.backends.container.instance import ContainerInstance
from dsec.core.errors import GoneError, UnavailableError
from dsec.sdk.client import AsyncClient
from dsec.sdk.process import AsyncProcess
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.processes import all_processes
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

SANDBOXES = 12
# Lines that count, slow enough to be under way while the node is killed and restarted; both streams.
COUNT = (
    'i=0; while [ $i -lt {lines} ]; do i=$((i + 1)); echo "out $i"; echo "err $i" >&2; sleep .005; done; exit {code}'
)


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


def lines_of(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines()]


async def start_counting(client: AsyncClient, number: int, lines: int) -> tuple[AsyncSandbox, AsyncProcess]:
    sandbox = await client.create(ENVIRONMENT, memory="64MiB", cpu=1.0)
    return sandbox, await sandbox.start(COUNT.format(lines=lines, code=number % 7))


async def check_counted(client: AsyncClient, id: str, exec: str, number: int, lines: int) -> None:
    sandbox = await client.connect(id)
    result = await (await sandbox.attach(exec)).wait(120)
    assert result.status == "exited", result.summary()
    assert result.exit_code == number % 7
    assert not result.gaps
    assert lines_of(result.stdout) == list(range(1, lines + 1))
    assert lines_of(result.stderr) == list(range(1, lines + 1))
    await sandbox.destroy()


async def test_kill_9_of_the_node_loses_no_sandbox_no_byte_and_no_exit(place: Place) -> None:
    lines = 600
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        counting = await asyncio.gather(*(start_counting(client, n, lines) for n in range(SANDBOXES)))
        ids = [(sandbox.id, process.id) for sandbox, process in counting]
    async with AsyncClient(place.url) as client:
        for _ in range(2):
            await asyncio.sleep(0.5)  # output is under way
            place.kill_node()
            place.start_process()
            await place.ready(client)

        found = await client.list()
        assert {sandbox.id for sandbox in found} == {id for id, _ in ids}
        assert {sandbox.info.state for sandbox in found} == {"running"}
        checks = (check_counted(client, id, exec, n, lines) for n, (id, exec) in enumerate(ids))
        await asyncio.gather(*checks)
        assert await client.list() == []


async def test_what_ended_while_the_node_was_away_is_told_with_its_exit(place: Place) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        sandbox = await client.create(ENVIRONMENT)
        process = await sandbox.start("sleep 1; echo done; exit 5")
        place.kill_node()
        await eventually(lambda: not any(info.name == "sleep" for info in _below(place)))
        place.start_process()
        await place.ready(client)

        result = await (await sandbox.attach(process.id)).wait(60)

        assert (result.exit_code, result.stdout) == (5, "done\n")


async def test_kill_9_of_the_launcher_disturbs_nobody(place: Place) -> None:
    async with served(place) as (_, client):
        sandbox, process = await start_counting(client, 3, 300)
        first = place.launcher_pid()
        place.kill_launcher()
        # A launch that it has begun by then fails: whether it went on is not known.
        await eventually(lambda: place.launcher_pid() is None)

        async with await client.create(ENVIRONMENT) as another:
            assert (await another.exec("echo works")).stdout == "works\n"
        assert place.launcher_pid() not in (None, first)
        await check_counted(client, sandbox.id, process.id, 3, 300)


async def test_a_sandbox_of_a_killed_launcher_leaves_nothing_when_destroyed(place: Place) -> None:
    async with served(place) as (_, client):
        await (await client.create(ENVIRONMENT)).destroy()
        async with place.no_leaks():
            sandbox = await client.create(ENVIRONMENT)
            await sandbox.start("sleep 600 & sleep 600")
            place.kill_launcher()
            await sandbox.destroy()
            # The next launcher is a process that was not there before; it is no leak of the sandbox.
            second = place.launcher_pid()
            assert second is not None
            os.kill(second, signal.SIGKILL)
            await eventually(lambda: place.launcher_pid() is None)
            for name in ("launch.sock", "launch.pid"):
                assert (place.run / name).exists()


async def test_kill_9_of_node_and_launcher_loses_nothing(place: Place) -> None:
    lines = 500
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        counting = await asyncio.gather(*(start_counting(client, n, lines) for n in range(4)))
        await asyncio.sleep(0.3)
        place.kill_node()
        place.kill_launcher()
        place.start_process()
        await place.ready(client)

        async with await client.create(ENVIRONMENT) as another:
            assert (await another.exec("echo works")).stdout == "works\n"
        await asyncio.gather(
            *(check_counted(client, sb.id, process.id, n, lines) for n, (sb, process) in enumerate(counting))
        )


async def test_kill_9_of_an_agent_fails_its_sandbox_alone_and_says_so(place: Place) -> None:
    async with served(place) as (service, client):
        await (await client.create(ENVIRONMENT)).destroy()
        async with place.no_leaks():
            sandbox = await client.create(ENVIRONMENT)
            neighbour = await client.create(ENVIRONMENT)
            process = await sandbox.start("echo begun; sleep 600")
            waiting = asyncio.create_task(process.wait())
            await eventually(lambda: _has_begun(process))
            found = service.node.registry.find(sandbox.id)
            assert isinstance(found and found.instance, ContainerInstance)
            os.kill(found.instance.pid, signal.SIGKILL)

            async def failed() -> bool:
                return (await sandbox.refresh()).state == "failed"

            await eventually(failed)
            assert sandbox.info.cause == "sandbox_fault"
            result = await asyncio.wait_for(waiting, 60)
            assert (result.status, result.cause, result.exit_code) == ("unknown", "agent_lost", None)
            assert result.stdout == "begun\n"
            with pytest.raises(GoneError):
                await sandbox.exec("true")
            assert (await neighbour.exec("echo works")).stdout == "works\n"
            await neighbour.destroy()


async def test_an_agent_that_was_killed_while_the_node_was_away_is_found_out(place: Place) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        sandbox = await client.create(ENVIRONMENT)
        pid = _agent_of(place, sandbox.id)
        place.kill_node()
        with pytest.raises(UnavailableError):
            async with AsyncClient(place.url, request_timeout_s=2.0) as other:
                await other.health()
        os.kill(pid, signal.SIGKILL)
        place.start_process()
        await place.ready(client)

        info = await sandbox.refresh()
        assert (info.state, info.cause) == ("failed", "sandbox_fault")


async def _has_begun(process: AsyncProcess) -> bool:
    return (await process.info()).out_bytes > 0


def _agent_of(place: Place, id: str) -> int:
    """Host pid of the agent: the one process in the sandbox's agent cgroup."""
    for procs in place.cgroup_files(f"{id}/agent/cgroup.procs"):
        pids = procs.read_text().split()
        assert len(pids) == 1
        return int(pids[0])
    raise AssertionError("no agent")


def _below(place: Place) -> list[object]:
    pids: set[int] = set()
    for procs in place.cgroup_files("**/cgroup.procs"):
        with contextlib.suppress(OSError):
            pids.update(map(int, procs.read_text().split()))
    return [info for pid, info in all_processes().items() if pid in pids]
