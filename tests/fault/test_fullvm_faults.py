"""Full machines: whatever fails on the way to one, and to its template, leaves nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsec.backends.fullvm.backend import FullvmBackend
from dsec.backends.fullvm.config import FullvmConfig
from dsec.backends.fullvm.instance import FullvmInstance
from dsec.core.errors import LaunchError
from dsec.core.ids import new_node_id
from dsec.core.spec import Substrate
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
    return await backend.create(instance_spec(Substrate.FULLVM), intend=Intents(), deadline_s=60)


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
        spare = await made.create(replace(instance_spec(Substrate.FULLVM), spare=True), intend=Intents(), deadline_s=60)
        pid = spare.pid
        claimed = await made.claim(spare, wanted)
        assert (claimed.id, claimed.pid) == (wanted.id, pid)
        assert made.instances == {wanted.id: claimed}
        await claimed.destroy()

        other = await made.create(replace(instance_spec(Substrate.FULLVM), spare=True), intend=Intents(), deadline_s=60)
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
