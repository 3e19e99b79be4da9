"""Full machines: whatever fails on the way to one, and to its template, leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsec.backends.fullvm.backend import FullvmBackend
from dsec.backends.fullvm.config import FullvmConfig
from dsec.backends.fullvm.instance import FullvmInstance
from dsec.backends.vm.capture import MachineCapture
from dsec.backends.vm.copying import digest_of
from dsec.core.errors import DsecError, LaunchError, StorageError
from dsec.core.ids import new_node_id, new_sandbox_id
from dsec.core.spec import Substrate
from dsec.core.states import EndCause
from dsec.testing.faults import Faults
from dsec.testing.hosts import Intents, instance_spec
from dsec.testing.launchers import remove_cgroups
from dsec.testing.leaks import Watched, no_leaks_async
from dsec.testing.machines import add_boot_sector

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture
async def backend(short_tmp: Path) -> AsyncIterator[tuple[FullvmBackend, Watched]]:
    node = new_node_id()
    config = FullvmConfig(
        run_dir=short_tmp / "r", state_dir=short_tmp / "s", id_dir=short_tmp / "i", cgroup_parent=f"dsec-fault-{node}"
    )
    backend = FullvmBackend(config, node=node)
    try:
        probe = await backend.probe()
        if not probe.usable:
            pytest.skip(f"fullvm: {probe.reason}")
        add_boot_sector(backend.images, "test", wait_s=0.0)
        yield (
            backend,
            Watched(
                markers=(str(short_tmp).encode(),),
                cgroups=(config.cgroup_parent,),
                directories=(config.machines_dir, config.sandboxes_dir, config.templates_dir),
                lock_directories=(config.id_dir,),
            ),
        )
    finally:
        await backend.close()
        remove_cgroups(config.cgroup_parent)


_STARTED = ("vm.lay_out", "vm.cgroup", "vm.start", "vm.qmp.qmp_capabilities", "vm.qmp.migrate-set-capabilities")
_CLONED = (*_STARTED, "vm.qmp.migrate-incoming", "vm.qmp.query-migrate", "vm.qmp.cont")
_SAVED = (*_STARTED, "vm.template.save", "vm.qmp.stop", "vm.qmp.migrate", "vm.qmp.query-migrate", "vm.template.finish")


async def create(backend: FullvmBackend) -> FullvmInstance:
    return await backend.create(instance_spec(Substrate.FULLVM), intend=Intents(), deadline_s=300)


async def test_a_create_that_fails_at_any_step_leaves_nothing(backend: tuple[FullvmBackend, Watched]) -> None:
    made, watched = backend

    for point in _CLONED:
        # The template is there, or is again: a clone that does not start takes it along.
        await (await create(made)).destroy()
        async with no_leaks_async(watched):
            with Faults(1, prefix=point) as faults, pytest.raises(LaunchError):
                await create(made)
            assert faults.hit is not None, point


async def test_a_spare_becomes_the_machine_that_is_asked_for_unless_its_image_is_another_one_now(
    backend: tuple[FullvmBackend, Watched],
) -> None:
    made, watched = backend
    wanted = instance_spec(Substrate.FULLVM)
    await (await create(made)).destroy()

    async with no_leaks_async(watched):
        spare = await made.create(
            replace(instance_spec(Substrate.FULLVM), spare=True), intend=Intents(), deadline_s=300
        )
        pid = spare.pid
        claimed = await made.claim(spare, wanted)
        assert (claimed.id, claimed.pid) == (wanted.id, pid)
        assert made.instances == {wanted.id: claimed}
        await claimed.destroy()

        other = await made.create(
            replace(instance_spec(Substrate.FULLVM), spare=True), intend=Intents(), deadline_s=300
        )
        made.images.remove("test")
        add_boot_sector(made.images, "test", wait_s=0.001)
        with pytest.raises(LaunchError, match="made anew"):
            await made.claim(other, wanted)
        await other.destroy()
        made.images.remove("test")
        add_boot_sector(made.images, "test", wait_s=0.0)


async def test_a_template_that_fails_at_any_step_leaves_nothing(backend: tuple[FullvmBackend, Watched]) -> None:
    made, watched = backend
    await (await create(made)).destroy()

    for point in _SAVED:
        for key in made._templates.keys():  # noqa: SIM118 - of no dict
            made._templates.drop(key)
        async with no_leaks_async(watched):
            with Faults(1, prefix=point) as faults, pytest.raises(LaunchError):
                await create(made)
            assert faults.hit is not None, point

    await (await create(made)).destroy()


# ---- snapshots, and machines that go on from them ------------------------------------------------------

_TAKEN = ("vm.copy", "vm.memory", "vm.qmp.query-status", "vm.qmp.xen-save-devices-state", "vm.saved.finish")
_WOKEN = ("vm.lay_out_again", "vm.start", "vm.qmp.qmp_capabilities", "vm.qmp.migrate-incoming", "vm.qmp.query-migrate")


@pytest.fixture
async def running(
    backend: tuple[FullvmBackend, Watched],
) -> AsyncIterator[tuple[FullvmBackend, Watched, FullvmInstance]]:
    made, watched = backend
    instance = await create(made)
    made.saved.directory.mkdir(parents=True)
    try:
        yield made, replace(watched, directories=(*watched.directories, made.saved.directory)), instance
    finally:
        for left in list(made.instances.values()):
            await left.destroy()


async def save(instance: FullvmInstance) -> MachineCapture:
    """Running again, whatever happened; what was kept is held until it is closed."""
    capture = await instance.snapshot()
    assert isinstance(capture, MachineCapture)
    try:
        await capture.look()
        await instance.pause(deadline_s=300)
        try:
            await capture.take(within_s=60)
        finally:
            await instance.resume()
        await capture.keep()
    except BaseException:
        await capture.close()
        raise
    return capture


async def status(instance: FullvmInstance) -> object:
    return (await (await instance.control()).execute("query-status"))["running"]


def only_one(made: FullvmBackend) -> str:
    (saved,) = made.saved.directory.iterdir()
    return saved.name


async def test_a_snapshot_that_fails_at_any_step_leaves_nothing_and_the_machine_runs_on(
    running: tuple[FullvmBackend, Watched, FullvmInstance],
) -> None:
    _, watched, instance = running

    for point in _TAKEN:
        async with no_leaks_async(watched):
            with Faults(1, prefix=point) as faults, pytest.raises(StorageError):
                await save(instance)
            assert faults.hit is not None, point
        assert await status(instance) is True


async def test_a_disk_that_is_full_ends_no_machine_and_leaves_no_part_of_a_snapshot(
    running: tuple[FullvmBackend, Watched, FullvmInstance],
) -> None:
    made, watched, instance = running
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(made.saved.directory)]
    await asyncio.to_thread(subprocess.run, mount, check=True, timeout=30)
    try:
        async with no_leaks_async(watched):
            with pytest.raises(StorageError, match="No space left"):
                await save(instance)
            await instance.pause(deadline_s=300)
            with pytest.raises(StorageError, match="No space left"):
                await instance.save()
            assert not instance.asleep
            await instance.resume()
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", str(made.saved.directory)], check=True, timeout=30)

    assert await status(instance) is True
    await (await save(instance)).close()


async def test_a_monitor_that_is_killed_while_it_is_written_down_leaves_nothing(
    running: tuple[FullvmBackend, Watched, FullvmInstance],
) -> None:
    made, _, instance = running
    capture = await instance.snapshot()
    await capture.look()
    await instance.pause(deadline_s=300)

    os.kill(instance.pid, signal.SIGKILL)
    with pytest.raises(DsecError):
        await capture.take(within_s=60)
    await capture.close()

    assert (await instance.wait()).cause is EndCause.SANDBOX_FAULT
    assert list(made.saved.directory.iterdir()) == []


async def test_what_goes_on_from_a_snapshot_never_changes_it_and_leaves_nothing_when_it_fails(
    running: tuple[FullvmBackend, Watched, FullvmInstance],
) -> None:
    made, watched, instance = running
    await (await save(instance)).close()
    saved = made.saved.directory / only_one(made)
    before = {path.name: digest_of(path) for path in saved.iterdir()}
    spec = replace(instance_spec(Substrate.FULLVM), machine=saved.name)

    for point in (*_STARTED[:4], "vm.qmp.migrate-incoming", "vm.qmp.query-migrate", "vm.qmp.cont"):
        async with no_leaks_async(watched):
            with Faults(1, prefix=point) as faults, pytest.raises(LaunchError):
                await made.create(replace(spec, id=new_sandbox_id(new_node_id())), intend=Intents(), deadline_s=300)
            assert faults.hit is not None, point
    child = await made.create(replace(spec, id=new_sandbox_id(new_node_id())), intend=Intents(), deadline_s=300)

    assert (await status(child), await status(instance)) == (True, True)
    await made.keep_machines((), [child.record, instance.record])  # the child's disk stands on it
    assert {path.name: digest_of(path) for path in saved.iterdir()} == before
    await child.destroy()
    await made.keep_machines((), [instance.record])
    assert not saved.exists()


async def test_a_deep_pause_that_fails_at_any_step_is_a_pause_and_a_wakening_that_fails_wakes_later(
    running: tuple[FullvmBackend, Watched, FullvmInstance],
) -> None:
    made, watched, instance = running

    for point in _TAKEN:
        await instance.pause(deadline_s=300)
        async with no_leaks_async(watched):
            with Faults(1, prefix=point) as faults, pytest.raises(StorageError):
                await instance.save()
            assert (faults.hit is not None, instance.asleep) == (True, False), point
        await instance.resume()
        assert await status(instance) is True

    await instance.pause(deadline_s=300)
    await instance.save()
    await instance.sleep()
    for point in _WOKEN:
        async with no_leaks_async(watched):
            with Faults(1, prefix=point) as faults, pytest.raises(LaunchError):
                await instance.wake(())
            assert (faults.hit is not None, instance.asleep, instance.pid) == (True, True, 0), point
    async with no_leaks_async(watched):
        await instance.wake(())
        await instance.sleep_on()  # the journal could not be written
        assert (instance.asleep, instance.pid) == (True, 0)
        await made._place.clear(instance.facts)
    again = await made.adopt(instance.id, instance.record)  # as the next process of the node does
    await again.wake(())
    await again.resume()

    assert (await status(again), again.asleep) == (True, False)
    assert list(made.saved.directory.iterdir()) == []
