"""A sandbox that takes what was made ahead is as any other, and what nobody takes outlives nobody."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path

import pytest

from dsec.core.errors import LaunchError
from dsec.sdk.client import AsyncClient
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place, served
from tests.system.test_container_warm import ASKED, cgroups, limits_of, looked

pytestmark = pytest.mark.root
PREPARED = {"container": {"prepared": 2}}
HANDED_ON = (
    "Umask",
    "SigB",
    "SigI",
    "SigC",
    "Shd",
    "Cap",
    "NoNew",
    "Seccomp",
    "Specul",
    "Cpus_allowed",
    "Mems_allowed",
    "TracerPid",
    "Core",
)


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store, settings=PREPARED) as place:
        yield place


@pytest.fixture
async def client(place: Place) -> AsyncIterator[AsyncClient]:
    place.start_launcher("--test-hooks")
    async with served(place) as (_, client):
        yield client


async def _filled(place: Place, client: AsyncClient) -> set[str]:
    """Two that wait, under the names that they have now."""
    if not cgroups(place):
        await (await client.create(ENVIRONMENT)).destroy()
    await eventually(lambda: len(cgroups(place)) == 2)
    return cgroups(place)


def _waiting(place: Place, name: str) -> list[int]:
    return place.pids(f"{name}/agent")


def _is_agent(pid: int) -> bool:
    return "dsec-agent" in str(Path(f"/proc/{pid}/exe").readlink())


def _from_outside(place: Place, cgroup: str) -> list[str]:
    """What its agent has that a process hands on to what it becomes, without what differs from one to the next."""
    (pid,) = (pid for pid in _waiting(place, cgroup) if _is_agent(pid))
    process, ours = Path(f"/proc/{pid}"), Path("/proc/self/ns")
    said = [line for line in (process / "status").read_text().splitlines() if line.startswith(HANDED_ON)]
    said += (process / "limits").read_text().splitlines()
    for name in ("oom_score_adj", "coredump_filter", "timerslack_ns", "personality", "environ", "cmdline", "loginuid"):
        if (process / name).exists():
            said.append(f"{name} {(process / name).read_text().strip()}")
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    said.append(f"leads {[int(field) == pid for field in fields[2:4]]} scheduled {fields[15:17]} {fields[37:39]}")
    said.append(f"processors {os.sched_getaffinity(pid)}")
    said += sorted(re.sub(r"\d{2,}|sbx_\w+", "N", str(file.readlink())) for file in (process / "fd").iterdir())
    return said + sorted(
        name.name for name in ours.iterdir() if name.readlink() == (process / "ns" / name.name).readlink()
    )


async def test_a_sandbox_that_takes_one_cannot_be_told_from_one_that_was_made(
    place: Place, client: AsyncClient
) -> None:
    cold = await client.create(ENVIRONMENT, **ASKED)  # type: ignore[arg-type]
    assert cold.id in cgroups(place)
    cold_seen, cold_limits = await looked(cold), limits_of(place, cold.id)
    await eventually(lambda: not any("pipe:" in line for line in _from_outside(place, cold.id)))  # of its last command
    cold_agent = _from_outside(place, cold.id)
    await cold.destroy()
    # They are made for what was asked for last, and that was otherwise.
    async with await client.create(ENVIRONMENT, memory="512MiB", cpu=2, pids=500, env={"OTHER": "one"}):
        pass
    await eventually(lambda: len(cgroups(place)) == 2)
    ahead = cgroups(place)

    taken = await client.create(ENVIRONMENT, **ASKED)  # type: ignore[arg-type]
    assert taken.id not in cgroups(place)
    seen = await looked(taken)
    (cgroup,) = {name for name in ahead for pid in _waiting(place, name) if _is_agent(pid)}

    differ = "\n".join(unified_diff(cold_seen.splitlines(), seen.splitlines(), lineterm="", n=0))
    assert not differ, differ
    with suppress(AssertionError):  # what the last command has had may just be closed
        await eventually(lambda: _from_outside(place, cgroup) == cold_agent, deadline_s=30.0)
    agent = "\n".join(unified_diff(cold_agent, _from_outside(place, cgroup), lineterm="", n=0))
    assert not agent, agent
    assert limits_of(place, cgroup) == cold_limits
    assert "OTHER" not in seen
    await taken.destroy()


async def test_it_leaves_nothing_and_others_take_its_place(place: Place, client: AsyncClient) -> None:
    ahead = await _filled(place, client)

    sandbox = await client.create(ENVIRONMENT)
    await sandbox.exec("sleep 600 & echo x > /file")
    await sandbox.destroy()

    await eventually(lambda: len(cgroups(place)) == 2)
    (gone,) = ahead - cgroups(place)
    await eventually(lambda: not (place.state / "sandboxes" / gone).exists())
    assert not (place.run / "sb" / f"{gone}.sock").exists()


@pytest.mark.parametrize("step", ["check", "overlay", "mounts", "agent", "die:overlay", "die:root"])
async def test_a_launch_that_fails_on_one_leaves_nothing_of_it(place: Place, client: AsyncClient, step: str) -> None:
    ahead = await _filled(place, client)
    (place.run / "fail_step").write_text(step)
    try:
        with pytest.raises(LaunchError) as caught:
            await client.create(ENVIRONMENT)
    finally:
        (place.run / "fail_step").unlink()

    assert caught.value.outcome == "gone"
    await eventually(lambda: len(cgroups(place)) == 2)
    (gone,) = ahead - cgroups(place)
    await eventually(lambda: not (place.state / "sandboxes" / gone).exists())
    assert (await client.list()) == []
    async with await client.create(ENVIRONMENT) as sandbox:
        assert (await sandbox.exec("echo works")).stdout == "works\n"


async def test_one_whose_process_was_killed_is_not_missed(place: Place, client: AsyncClient) -> None:
    for name in await _filled(place, client):
        for pid in _waiting(place, name):
            os.kill(pid, signal.SIGKILL)

    async with await client.create(ENVIRONMENT) as sandbox:
        assert (await sandbox.exec("echo works")).stdout == "works\n"


async def test_one_that_somebody_has_damaged_is_not_missed_and_the_log_says_what(
    place: Place, client: AsyncClient, logs: io.StringIO
) -> None:
    for name in await _filled(place, client):
        (place.run / "sb" / f"{name}.sock").unlink()
        shutil.rmtree(place.state / "sandboxes" / name)

    async with await client.create(ENVIRONMENT) as sandbox:
        assert (await sandbox.exec("echo works")).stdout == "works\n"

    assert "what was made ahead was of no use" in logs.getvalue()


async def test_none_outlives_its_node(place: Place) -> None:
    async with served(place) as (_, client):
        await _filled(place, client)

    assert cgroups(place) == set()
    assert list((place.state / "sandboxes").glob("sbx_*")) == []
    assert list((place.run / "sb").iterdir()) == []


async def test_none_is_left_when_node_or_launcher_is_killed_and_sandboxes_on_them_live_on(place: Place) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        await _filled(place, client)
        sandbox = await client.create(ENVIRONMENT)
        await sandbox.exec("echo kept > /kept", check=True)
        (own,) = {name for name in cgroups(place) for pid in _waiting(place, name) if _is_agent(pid)}
        await eventually(lambda: len(cgroups(place)) == 3)
        before = cgroups(place)
        for ends in (place.kill_node, place.kill_launcher):
            ends()
            await eventually(lambda before=before: not (cgroups(place) & before) - {own})
            if ends == place.kill_node:
                place.start_process()
                await place.ready(client)

            assert (await sandbox.exec("cat /kept")).stdout == "kept\n"
            async with await client.create(ENVIRONMENT) as other:
                assert (await other.exec("echo works")).stdout == "works\n"
            await eventually(lambda: len(cgroups(place)) == 3)
            before = cgroups(place)
        await sandbox.destroy()


async def test_what_is_left_when_all_that_knew_of_it_were_killed_goes_with_the_next_start(place: Place) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        ahead = await _filled(place, client)
        left = place.cgroup_files(next(iter(ahead)))
        socket = place.run / "sb" / f"{next(iter(ahead))}.sock"
        place.kill_node()
        await eventually(lambda: not cgroups(place))
        for path in left:  # as if its worker had been killed too
            (path / "agent").mkdir(parents=True)
        await eventually(lambda: not socket.exists())
        socket.touch()
        place.start_process()
        await place.ready(client)

        async with await client.create(ENVIRONMENT):
            assert not any(path.exists() for path in (*left, socket))


async def test_of_two_nodes_of_a_host_each_has_its_own(place: Place, small_store: Path) -> None:
    with private_place(small_store, settings=PREPARED, id_dir=place.ids) as other:
        for one in (place, other):
            one.start_process()
        async with AsyncClient(place.url) as client, AsyncClient(other.url) as others:
            await place.ready(client)
            await other.ready(others)
            await _filled(place, client)
            kept = await _filled(other, others)

            place.kill_node()

            await eventually(lambda: not cgroups(place))
            assert cgroups(other) == kept
            async with await others.create(ENVIRONMENT) as sandbox:
                assert (await sandbox.exec("echo works")).stdout == "works\n"
            place.start_process()
            await place.ready(client)
            await _filled(place, client)
            for one in (place, other):
                one.processes[-1].terminate()
                assert one.processes[-1].wait(60) == 0
                assert not cgroups(one)
                assert not list((one.run / "sb").iterdir())


async def test_many_at_once_find_some_made_ahead_and_all_work(small_store: Path) -> None:
    with private_place(small_store, settings={"container": {"prepared": 16}}) as place:
        async with served(place) as (_, client):
            await (await client.create(ENVIRONMENT)).destroy()
            await eventually(lambda: len(cgroups(place)) == 16)
            ahead = cgroups(place)

            made = await asyncio.gather(*(client.create(ENVIRONMENT) for _ in range(64)))

            said = await asyncio.gather(*(sandbox.exec("echo works") for sandbox in made))
            assert [one.stdout for one in said] == ["works\n"] * 64
            assert len({pid for name in ahead for pid in _waiting(place, name) if _is_agent(pid)}) == 16
            await asyncio.gather(*(sandbox.destroy() for sandbox in made))
        assert not cgroups(place)
