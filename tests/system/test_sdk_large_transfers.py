"""Two gigabytes into a container and out of it, while the node is killed."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, container_store, private_place

pytestmark = [pytest.mark.root, pytest.mark.slow]
SIZE = 2 << 30
_MEMORY_BYTES_MAX = 256 << 20  # of a client, grown over what it had


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, native_binaries: dict[str, Path]) -> Path:
    return container_store(tmp_path_factory.getbasetemp())


@pytest.fixture
def place(store: Path) -> Iterator[Place]:
    with private_place(store) as place:
        yield place


@pytest.mark.timeout(1_200)
async def test_two_gigabytes_go_up_and_down_through_kills_of_the_node(place: Place, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    await asyncio.to_thread(_fill, source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    place.start_process()
    async with dsec.AsyncClient(place.url) as client:
        await place.ready(client)
        async with await client.create(ENVIRONMENT, memory="1GiB") as sb:
            sending = asyncio.create_task(sb.upload(source, "/var/tmp/big", resume=True))
            await eventually(lambda: _part_is_above(sb, SIZE // 4), deadline_s=300)
            await _restart(place, client)
            await asyncio.wait_for(sending, 600)

            receiving = asyncio.create_task(sb.download("/var/tmp/big", back, resume=True))
            await eventually(lambda: _local_part(back) > SIZE // 4, deadline_s=300)
            await _restart(place, client)
            done = await asyncio.wait_for(receiving, 600)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10

    assert done.bytes == SIZE
    assert await asyncio.to_thread(_same, source, back)
    assert sorted(tmp_path.iterdir()) == [back, source]
    assert grown < _MEMORY_BYTES_MAX


async def _restart(place: Place, client: dsec.AsyncClient) -> None:
    await asyncio.to_thread(place.kill_node)
    place.start_process()
    await place.ready(client)


async def _part_is_above(sb: dsec.AsyncSandbox, least: int) -> bool:
    return sum(entry.size for entry in await sb.files.list("/var/tmp")) > least


def _local_part(target: Path) -> int:
    return sum(path.stat().st_size for path in target.parent.glob(".*.dsec-part"))


def _fill(path: Path) -> None:
    with path.open("wb") as file:
        for _ in range(SIZE >> 26):
            file.write(os.urandom(1 << 26))


def _same(one: Path, other: Path) -> bool:
    with one.open("rb") as first, other.open("rb") as second:
        while piece := first.read(1 << 24):
            if second.read(1 << 24) != piece:
                return False
        return not second.read(1)
