"""What an ended sandbox has written goes in the background, whoever is killed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.backends.container.trash import TRASH
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = pytest.mark.root

MANY = "mkdir /d && cd /d && for i in $(seq 3000); do echo $i > $i; done; mkdir -p a/b/c; ln -s / a/link"


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


def left(place: Place) -> list[Path]:
    sandboxes = place.state / "sandboxes"
    return [path for path in sandboxes.iterdir() if path.name != TRASH] + [*(sandboxes / TRASH).glob("*")]


async def test_a_sandbox_with_many_files_is_gone_at_once_and_its_files_soon(place: Place) -> None:
    async with served(place) as (_, client):
        await (await client.create(ENVIRONMENT)).destroy()
        async with place.no_leaks():
            sandbox = await client.create(ENVIRONMENT)
            await sandbox.exec(MANY, check=True)

            await sandbox.destroy()

            assert not (place.state / "sandboxes" / sandbox.id).exists()
            await eventually(lambda: not left(place))


async def test_files_that_a_killed_launcher_has_not_removed_are_removed_by_the_next(place: Place) -> None:
    async with served(place) as (_, client):
        for _ in range(3):
            sandbox = await client.create(ENVIRONMENT)
            await sandbox.exec(MANY, check=True)
            await sandbox.destroy()
        place.kill_launcher()
        await eventually(lambda: place.launcher_pid() is None)
        # As if it had been killed before its worker came to anything.
        rest = place.state / "sandboxes" / TRASH / "sbx_rest.0"
        (rest / "upper").mkdir(parents=True)
        (rest / "upper" / "file").write_text("x")

        await (await client.create(ENVIRONMENT)).destroy()

        await eventually(lambda: not left(place))


async def test_directories_that_no_journal_names_are_removed_at_the_start(place: Place) -> None:
    async with served(place) as (_, client):
        known = await client.create(ENVIRONMENT)
        await known.exec("echo kept > /file", check=True)
    lost = place.state / "sandboxes" / "sbx_lost_0000000000000000"
    (lost / "upper").mkdir(parents=True)
    (lost / "upper" / "file").write_text("x")

    async with served(place) as (_, client):
        await eventually(lambda: [path.name for path in left(place)] == [known.id])
        again = await client.get(known.id)
        assert (await again.exec("cat /file")).stdout == "kept\n"
        await again.destroy()
