"""kill -9 of a node that collects, with real sandboxes on it: what lives goes on, and nothing is left in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.sdk.client import AsyncClient
from dsec.testing.waiting import eventually
from dsec.wire.environments import DirectorySource
from tests.system.container_place import ENVIRONMENT, Place, private_place

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

_REPLACED = 2


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store, settings={"node": {"collect": {"record_keep_s": 0.0}}}) as place:
        yield place


async def replace(client: AsyncClient, directory: Path, number: int) -> None:
    """The tag stands for another layer, so that the one before is nobody's."""
    (directory / "srv").mkdir(parents=True, exist_ok=True)
    (directory / "srv/version").write_text(str(number))
    await client.environments.build("tool", DirectorySource(str(directory)), replace=True)


async def killed_while_it_collects(place: Place, client: AsyncClient, directory: Path, after_s: float) -> None:
    sandbox = await client.create(ENVIRONMENT)
    await sandbox.exec("echo mine > /tmp/mine", check=True)
    snapshot = await sandbox.snapshot()
    for number in range(_REPLACED):
        await replace(client, directory, number)
    child = await client.create(snapshot=snapshot)

    collecting = asyncio.create_task(client.collect_garbage())
    await asyncio.sleep(after_s)
    place.kill_node()
    collecting.cancel()  # else it would ask for long whether there is another
    await asyncio.gather(collecting, return_exceptions=True)
    place.start_process()
    await place.ready(client)

    for one in (sandbox, child, other := await client.create(snapshot=snapshot)):
        assert (await one.exec("cat /tmp/mine")).stdout == "mine\n"
    tool = await client.environments.get("tool")
    assert {layer.digest for layer in await client.layers.list()} >= {*tool.layers, *snapshot.info.layers}
    for one in (sandbox, child, other):
        await one.destroy()
    await snapshot.remove()

    async def is_clean() -> bool:
        await client.collect_garbage()
        return not (await client.collect_garbage(dry_run=True)).items

    await eventually(is_clean)
    named = {*tool.layers, *(await client.environments.get(ENVIRONMENT)).layers}
    await eventually(lambda: {path.name for path in (place.state / "layers").iterdir()} == named)
    await eventually(lambda: not list((place.state / "staging").iterdir()))


async def test_what_lives_outlives_a_node_that_is_killed_while_it_collects(place: Place, tmp_path: Path) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        await killed_while_it_collects(place, client, tmp_path / "tool", 0.01)


@pytest.mark.slow
async def test_at_any_moment(place: Place, tmp_path: Path, rng: random.Random) -> None:
    place.start_process()
    async with AsyncClient(place.url) as client:
        await place.ready(client)
        for _ in range(15):
            await killed_while_it_collects(place, client, tmp_path / "tool", rng.uniform(0.0, 0.12))
