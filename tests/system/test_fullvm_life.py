"""Full machines with the life of a node: clones made before anybody asks, and an end that waits for no boot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.backends.fullvm.backend import FullvmBackend
from dsec.core.errors import DsecError, UnsupportedError
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.serve.service import LocalService
from dsec.testing.machines import boot_sector
from dsec.testing.waiting import eventually
from tests.system.container_place import Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

_WARM = {"node": {"warm": {"spares_max": 2, "low": 1, "high": 2}}}
_LATE_S = 900.0


async def add_image(place: Place, client: AsyncClient, *, wait_s: float) -> None:
    disk = place.directory / "echo.img"
    disk.write_bytes(boot_sector() + bytes(1 << 20))
    await client.machines.import_disk("echo", disk, format="raw", boot_wait_s=wait_s)


def pids(service: LocalService) -> dict[str, int]:
    backend = service.node.backends[Substrate.FULLVM]
    assert isinstance(backend, FullvmBackend)
    return {id: instance.pid for id, instance in backend.instances.items()}


async def test_a_machine_that_was_made_before_is_the_one_that_is_asked_for() -> None:
    with private_place(None, settings=_WARM) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.FULLVM].probe()
            if not probe.usable:
                pytest.skip(f"fullvm: {probe.reason}")
            await add_image(place, client, wait_s=1.5)
            for _ in range(2):  # who is asked for once may never be again
                await (await client.create("echo", backend="fullvm", memory="32MiB", timeout_s=240)).destroy()
            await eventually(lambda: len(service.node.warm) > 0)
            spares = pids(service)

            async with await client.create("echo", backend="fullvm", memory="32MiB", timeout_s=240) as sandbox:
                assert pids(service)[sandbox.id] in spares.values()
                assert sandbox.id not in spares
                await sandbox.screen.type("a")


async def test_an_end_of_everything_waits_for_no_boot() -> None:
    with private_place(None) as place:
        place.start_process()
        async with AsyncClient(place.url) as client:
            await place.ready(client)
            await add_image(place, client, wait_s=_LATE_S)
            making = asyncio.create_task(
                client.create("echo", backend="fullvm", memory="32MiB", timeout_s=_LATE_S + 300)
            )
            await eventually(lambda: making.done() or any(place.cgroup_files("tpl_*/cgroup.procs")))
            if making.done() and isinstance(making.exception(), UnsupportedError):
                pytest.skip(f"fullvm: {making.exception()}")

            down = place.start_process("down", "--destroy")
            await asyncio.to_thread(down.wait, 120)

            assert down.returncode == 0
            with pytest.raises(DsecError):
                await making
        assert not any(place.cgroup_files("tpl_*"))
        assert not [path for path in Path(place.run, "full").iterdir() if path.name != "root"]
