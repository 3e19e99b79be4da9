"""Microvms that are on the disk alone: over the end of their node, a reboot, and on another node."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from dsec.core import errors
from dsec.core.limits import MACHINE_OVERLAYS_KEPT, MACHINE_OVERLAYS_MAX
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from tests.system.container_place import Place, private_place, served
from tests.system.test_microvms import COUNT, create, instance_of

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

SYNC = "python3 -c 'import os; os.sync()'"


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


async def test_what_a_microvm_has_written_is_a_file_for_other_programs(small_store: Path) -> None:
    with private_place(small_store) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.MICROVM].probe()
            if not probe.usable:
                pytest.skip(f"microvm: {probe.reason}")
            async with await create(client) as sb:
                await sb.exec(f"echo first > /note; {SYNC}", check=True)
                first = await sb.snapshot()
                async with await client.create(snapshot=first.id, timeout_s=240) as above:
                    await above.exec(f"echo second > /note; {SYNC}", check=True)
                    second = await above.snapshot()
            for snapshot, format, expected in ((first, "raw", "first\n"), (second, "qcow2", "second\n")):
                file = place.directory / format
                made = await client.machines.export_snapshot(snapshot.id, file, format=format)
                assert made.used_bytes < made.disk_bytes
                if format != "raw":
                    command = ["qemu-img", "convert", "-f", format, "-O", "raw", file, place.directory / "whole"]
                    await asyncio.to_thread(subprocess.run, command, check=True, timeout=120)
                    file = place.directory / "whole"
                read = ["debugfs", "-R", "cat /upper/note", file]
                found = await asyncio.to_thread(subprocess.run, read, check=True, capture_output=True, timeout=60)
                assert found.stdout.decode() == expected
                await snapshot.remove()


async def test_a_machine_goes_on_from_snapshot_to_snapshot_without_end(small_store: Path) -> None:
    """Twice as often as there can be overlays below a disk."""
    with private_place(small_store) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.MICROVM].probe()
            if not probe.usable:
                pytest.skip(f"microvm: {probe.reason}")
            sb = await create(client)
            depths = []
            for number in range(2 * MACHINE_OVERLAYS_MAX + 6):
                await sb.exec(
                    f"echo {number} > /n{number % 7}; rm -f /gone{number - 5}; touch /gone{number}", check=True
                )
                snapshot = await sb.snapshot(f"s{number}")
                saved = _saved_of(place, snapshot.id)
                depths.append(json.loads((saved / "manifest.json").read_text())["overlays"])
                child = await client.create(snapshot=snapshot.id, timeout_s=120)
                await sb.destroy()
                if number == 50:
                    await child.pause(deep=True)
                    await child.resume()
                sb = child
                if number:
                    await (await client.snapshots.get(f"s{number - 1}")).remove()
                await eventually(lambda kept=saved: _machines_of(place) == {kept.name})
            found = (await sb.exec("cat /n0 /n1 /n2 /n3 /n4 /n5 /n6; ls / | grep -c gone")).stdout.split()
            await sb.destroy()
            await (await client.snapshots.get(f"s{number}")).remove()
            await eventually(lambda: _machines_of(place) == set())

    assert max(depths) == MACHINE_OVERLAYS_MAX
    became_one = [number for number in range(1, len(depths)) if depths[number] < depths[number - 1]]
    first = MACHINE_OVERLAYS_MAX
    assert became_one == list(range(first, len(depths), MACHINE_OVERLAYS_MAX - MACHINE_OVERLAYS_KEPT)), depths
    assert sorted(map(int, found[:7])) == list(range(number - 6, number + 1))
    assert found[7] == "5"


async def test_a_machine_that_nobody_uses_goes_to_the_disk_and_is_back_when_it_is_used(small_store: Path) -> None:
    ladder = {"pause_s": 1.0, "page_out_s": 2.0, "sleep_s": 3.0}
    with private_place(small_store, settings={"node": {"idle": ladder}}) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.MICROVM].probe()
            if not probe.usable:
                pytest.skip(f"microvm: {probe.reason}")
            sb = await create(client)
            await sb.exec("echo in memory > /dev/shm/kept", check=True)

            for use in ("exec", "file", "exec"):
                await eventually(partial(_is_asleep, client, sb.id))
                await eventually(lambda: instance_of(service, sb).pid == 0)
                if use == "exec":
                    assert (await sb.exec("cat /dev/shm/kept")).stdout == "in memory\n"
                else:
                    assert await sb.files.read("/dev/shm/kept") == "in memory\n"

            rungs = [event.detail async for event in client.events(after="oldest", follow=False, kinds=["rested"])]
            await sb.destroy()

    assert rungs.count("sleep") == 3
    assert rungs.count("pause") >= 3
    assert set(rungs) <= {"pause", "page_out", "sleep"}


async def _is_asleep(client: AsyncClient, sandbox: str) -> bool:
    return next(found.info.asleep for found in await client.list() if found.id == sandbox)


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


# So few that three snapshots are enough; and the node ends where it is told to.
SHORT = """
import os, signal
from dsec.core import faults, limits
limits.MACHINE_OVERLAYS_MAX, limits.MACHINE_OVERLAYS_KEPT = 2, 1
def ended(point):
    if point == {point!r}:
        os.kill(os.getpid(), signal.SIGKILL)
merges = []
def hook(name):
    if name == "vm.merge":
        merges.append(name)
    if merges:
        ended(name)
faults.install_hook(hook)
"""


@pytest.mark.parametrize("point", ["vm.merge", "vm.merge.tables", "vm.saved.finish"])
async def test_kill_9_of_the_node_while_snapshots_become_one_loses_nothing_and_leaves_nothing(
    small_store: Path, point: str
) -> None:
    with private_place(small_store) as place:
        place.start_process(before=SHORT.format(point=point))
        async with AsyncClient(place.url) as client:
            await place.ready(client)
            try:
                sandbox = await create(client)
            except errors.UnsupportedError as error:
                pytest.skip(f"microvm: {error.message}")
            for number in range(2):
                await sandbox.exec(f"echo {number} > /n{number}", check=True)
                snapshot = await sandbox.snapshot(f"s{number}")
                above = await client.create(snapshot=snapshot.id, timeout_s=240)
                await sandbox.destroy()
                sandbox = above
            await sandbox.exec("echo 2 > /n2; echo in memory > /dev/shm/kept", check=True)
            asked = asyncio.create_task(sandbox.snapshot("s2"))
            await asyncio.to_thread(place.processes[-1].wait, 120)
            assert place.processes[-1].returncode == -signal.SIGKILL
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            place.start_process(before=SHORT.format(point="none"))
            await place.ready(client)

            sandbox = await client.connect(sandbox.id)
            assert (await sandbox.exec("cat /n0 /n1 /n2 /dev/shm/kept")).stdout == "0\n1\n2\nin memory\n"
            assert [found.info.name for found in await client.snapshots.list()] == ["s0", "s1"]
            await eventually(partial(_nothing_is_left, place))
            for start in ("s1", (await sandbox.snapshot("s2")).id):
                made = await client.create(snapshot=start, timeout_s=240)
                assert (await made.exec("cat /n0 /n1")).stdout == "0\n1\n"
                await made.destroy()
            saved = json.loads((_saved_of(place, start) / "manifest.json").read_text())
            assert (saved["overlays"], bool(saved["merged"])) == (2, True)
            await sandbox.destroy()
            for snapshot in await client.snapshots.list():
                await snapshot.remove()
            await eventually(partial(_nothing_is_left, place))


async def _asked(sandbox: AsyncSandbox, what: str) -> None:
    if what == "snapshot":
        await sandbox.snapshot()
    elif what == "fork":
        await sandbox.fork(2)
    else:
        await sandbox.pause(deep=True)


def _saved_of(place: Place, snapshot: str) -> Path:
    records = [json.loads(path.read_text()) for path in (place.state / "snapshots").glob("*.json")]
    (machine,) = [record["machine"] for record in records if record["info"]["id"] == snapshot]
    return place.state / "vm" / "saved" / machine


def _machines_of(place: Place) -> set[str]:
    return {path.name for path in (place.state / "vm" / "saved").iterdir()}


def _nothing_is_left(place: Place) -> bool:
    """But the machines of snapshots that have a record."""
    records = [json.loads(path.read_text()) for path in (place.state / "snapshots").glob("*.json")]
    directory = place.state / "vm" / "saved"
    found = {path.name for path in directory.iterdir()} if directory.exists() else set()
    return found == {record["machine"] for record in records}
