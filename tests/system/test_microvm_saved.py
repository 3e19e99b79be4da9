"""Microvms that are on the disk alone: over the end of their node, a reboot, and on another node."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from dsec.core import errors
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from tests.system.container_place import Place, private_place, served
from tests.system.test_microvms import COUNT, create

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_kill_9_of_the_node_wakes_nobody_and_a_reboot_ends_nobody_who_sleeps(small_store: Path) -> None:
    with private_place(small_store) as place:
        place.start_process()
        async with AsyncClient(place.url) as client:
            await place.ready(client)
            try:
                sandbox = await create(client)
            except errors.UnsupportedError as error:
                pytest.skip(f"microvm: {error.message}")
            running = await sandbox.start(COUNT)
            await sandbox.pause(deep=True)
            place.kill_node()
            shutil.rmtree(place.run / "vm")  # as a reboot does
            place.start_process()
            await place.ready(client)

            again = await client.connect(sandbox.id)
            assert (again.info.state, again.info.asleep) == ("paused", True)
            await again.resume()
            result = await (await again.attach(running.id)).wait(120)

            assert result.exit_code == 7
            assert [int(line.split()[0]) for line in result.stdout.splitlines()] == list(range(1, 61))
            await again.destroy()


async def test_a_snapshot_that_is_copied_to_another_node_goes_on_there(small_store: Path) -> None:
    with private_place(small_store) as place, private_place(small_store) as other:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.MICROVM].probe()
            if not probe.usable:
                pytest.skip(f"microvm: {probe.reason}")
            async with await create(client) as sb:
                await sb.exec("echo in memory > /dev/shm/kept")
                snapshot = await sb.snapshot("moved")
        (record,) = (place.state / "snapshots").glob("*.json")
        saved = place.state / "vm" / "saved" / json.loads(record.read_text())["machine"]
        for source in (record, saved):
            target = other.state / source.relative_to(place.state)
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = ["cp", "-a", "--sparse=always", source, target]
            await asyncio.to_thread(subprocess.run, copy, check=True, timeout=120)

        async with served(other) as (_, client):
            async with await client.create(snapshot="moved", timeout_s=60) as sb:
                assert (await sb.exec("cat /dev/shm/kept")).stdout == "in memory\n"
            manifest = other.state / "vm" / "saved" / saved.name / "manifest.json"
            manifest.write_text(manifest.read_text().replace("QEMU emulator version", "QEMU of before, version"))
            async with other.no_leaks():
                with pytest.raises(errors.UnsupportedError, match="goes on only with monitor"):
                    await client.create(snapshot=snapshot.id, timeout_s=60)
                shutil.rmtree(manifest.parent)
                with pytest.raises(errors.LaunchError, match="is not on this node"):
                    await client.create(snapshot=snapshot.id, timeout_s=60)


async def test_kill_9_of_the_node_at_any_moment_leaves_the_machine_and_no_half_of_anything(small_store: Path) -> None:
    with private_place(small_store) as place:
        place.start_process()
        async with AsyncClient(place.url) as client:
            await place.ready(client)
            try:
                sandbox = await create(client)
            except errors.UnsupportedError as error:
                pytest.skip(f"microvm: {error.message}")
            await sandbox.exec("echo in memory > /dev/shm/kept")
            for wait_s in (0.02, 0.15, 0.4, 0.8, 1.5):
                for what in ("snapshot", "fork", "pause"):
                    asked = asyncio.create_task(_asked(sandbox, what))
                    await asyncio.sleep(wait_s)
                    place.kill_node()
                    asked.cancel()
                    await asyncio.gather(asked, return_exceptions=True)
                    place.start_process()
                    await place.ready(client)

                    sandbox = await client.connect(sandbox.id)
                    assert (await sandbox.exec("cat /dev/shm/kept")).stdout == "in memory\n", (wait_s, what)
                    forks = [found for found in await client.list() if found.id != sandbox.id]
                    assert len(forks) in (0, 2), (wait_s, what)
                    await asyncio.gather(*(fork.destroy() for fork in forks))
                    await eventually(partial(_nothing_is_left, place))
            for snapshot in await client.snapshots.list():
                await snapshot.remove()
            await sandbox.destroy()
            await eventually(partial(_nothing_is_left, place))


async def _asked(sandbox: AsyncSandbox, what: str) -> None:
    if what == "snapshot":
        await sandbox.snapshot()
    elif what == "fork":
        await sandbox.fork(2)
    else:
        await sandbox.pause(deep=True)


def _nothing_is_left(place: Place) -> bool:
    """But the machines of snapshots that have a record."""
    records = [json.loads(path.read_text()) for path in (place.state / "snapshots").glob("*.json")]
    directory = place.state / "vm" / "saved"
    found = {path.name for path in directory.iterdir()} if directory.exists() else set()
    return found == {record["machine"] for record in records}
