"""Many machines: at once, and one after the other for long. Nothing is lost, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from dsec.backends.fullvm.backend import FullvmBackend
from dsec.backends.fullvm.config import FullvmConfig
from dsec.core.ids import new_node_id
from dsec.core.spec import Substrate
from dsec.testing.hosts import Intents, instance_spec
from dsec.testing.launchers import remove_cgroups
from dsec.testing.leaks import Watched, no_leaks_async
from dsec.testing.machines import add_boot_sector
from tests.system.container_place import ENVIRONMENT, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]

AT_ONCE = 40
ROUNDS = 500
TOGETHER = 4


async def test_forty_clones_at_once_are_forty_machines(small_store: Path) -> None:
    with private_place(small_store) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.MICROVM].probe()
            if not probe.usable:
                pytest.skip(f"microvm: {probe.reason}")

            async def one(number: int) -> str:
                sb = await client.create(ENVIRONMENT, backend="microvm", memory="128MiB", cpu=0.5, timeout_s=900)
                try:
                    said = await sb.exec(f"echo {number}; cat /etc/machine-id", check=True, timeout_s=300)
                    return said.stdout
                finally:
                    await sb.destroy()

            await one(0)
            async with place.no_leaks():
                said = await asyncio.gather(*(one(number) for number in range(AT_ONCE)))

    assert [int(text.split()[0]) for text in said] == list(range(AT_ONCE))
    assert len({text.split()[1] for text in said}) == AT_ONCE


async def test_after_hundreds_of_clones_the_host_is_as_it_was(short_tmp: Path) -> None:
    node = new_node_id()
    config = FullvmConfig(
        run_dir=short_tmp / "r", state_dir=short_tmp / "s", id_dir=short_tmp / "i", cgroup_parent=f"dsec-many-{node}"
    )
    backend = FullvmBackend(config, node=node)
    try:
        probe = await backend.probe()
        if not probe.usable:
            pytest.skip(f"fullvm: {probe.reason}")
        add_boot_sector(backend.images, "test", wait_s=0.0)
        watched = Watched(
            markers=(str(short_tmp).encode(),),
            cgroups=(config.cgroup_parent,),
            directories=(config.machines_dir, config.sandboxes_dir, config.templates_dir),
            lock_directories=(config.id_dir,),
        )

        async def one() -> None:
            instance = await backend.create(instance_spec(Substrate.FULLVM), intend=Intents(), deadline_s=120)
            await instance.destroy()

        await one()
        before = descriptors()
        async with no_leaks_async(watched):
            for _ in range(ROUNDS // TOGETHER):
                await asyncio.gather(*(one() for _ in range(TOGETHER)))
        gc.collect()
        assert descriptors() <= before + 2
        assert backend.instances == {}
    finally:
        await backend.close()
        remove_cgroups(config.cgroup_parent)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
