"""Processor cgroups of ended sandboxes serve the next ones, with the limits that those ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.core.errors import LaunchError
from dsec.density.cgroups import detect
from dsec.sdk.client import AsyncClient
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root
KEEPING = {"container": {"keep_cgroups_from": 0}}


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    host = detect()
    if host.limits("cpu") != "v1" or host.v2 is None:
        pytest.skip("only version 1 can rename a cgroup, and only cgroup2 counts the time of what is in it")
    with private_place(small_store, settings=KEEPING) as place:
        yield place


@pytest.fixture
async def client(place: Place) -> AsyncIterator[AsyncClient]:
    place.start_launcher("--test-hooks")
    async with served(place) as (_, client):
        yield client


def _quotas(place: Place, name: str = "*") -> dict[str, tuple[int, str]]:
    """Name of each processor cgroup of the node → its inode and its quota."""
    files = place.cgroup_files(f"{name}/cpu.cfs_quota_us")
    return {file.parent.name: (file.parent.stat().st_ino, file.read_text().strip()) for file in files}


def _kept(place: Place) -> dict[str, tuple[int, str]]:
    return _quotas(place, "kept-*")


async def test_the_next_sandbox_of_the_same_limit_takes_it(place: Place, client: AsyncClient) -> None:
    first = await client.create(ENVIRONMENT, cpu=0.5)
    inode, quota = _quotas(place)[first.id]
    await first.destroy()

    assert list(_kept(place).values()) == [(inode, quota)] == [(inode, "50000")]
    async with await client.create(ENVIRONMENT, cpu=1.5) as other:
        assert _quotas(place)[other.id][0] != inode
        async with await client.create(ENVIRONMENT, cpu=0.5) as next:
            assert _quotas(place)[next.id] == (inode, "50000")
            assert (await next.exec("echo works")).stdout == "works\n"
            assert _kept(place) == {}


async def test_one_with_other_shares_is_not_kept(place: Place, client: AsyncClient) -> None:
    sandbox = await client.create(ENVIRONMENT)
    for file in place.cgroup_files(f"{sandbox.id}/cpu.shares"):
        file.write_text("2")
    await sandbox.destroy()

    assert _kept(place) == {}


async def test_a_launch_that_fails_leaves_none(place: Place, client: AsyncClient) -> None:
    for step in ("check", "cgroups", "overlay", "mounts", "die:overlay"):
        await (await client.create(ENVIRONMENT)).destroy()
        assert len(_kept(place)) == 1
        (place.run / "fail_step").write_text(step)
        with pytest.raises(LaunchError):
            await client.create(ENVIRONMENT)
        (place.run / "fail_step").unlink()

        assert _quotas(place) == {}, step


async def test_nothing_is_left_when_the_node_ends_or_is_killed(place: Place) -> None:
    async with served(place) as (_, client):
        await (await client.create(ENVIRONMENT)).destroy()
        assert len(_kept(place)) == 1
        node = (await client.health()).node
    assert _kept(place) == {}

    left = detect().v1["cpu"] / place.name / node / "kept-7"  # as a node that was killed leaves it
    left.mkdir(parents=True)
    async with served(place) as (_, client):
        async with await client.create(ENVIRONMENT):
            assert _kept(place) == {}
