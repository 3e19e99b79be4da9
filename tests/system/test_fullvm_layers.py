"""Disks of full machines in stores, read by QEMU as they come through the loader; and machines that become images."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.backends.fullvm.backend import FullvmBackend
from dsec.binaries import find_binary
from dsec.core import errors
from dsec.core.errors import HostError
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve.service import LocalService
from dsec.storage.loader import why_no_block_devices
from dsec.testing.machines import add_machine, boot_sector, cells_of
from dsec.testing.waiting import eventually
from tests.system.container_images import make_root
from tests.system.container_place import Place, private_place, served
from tests.system.loader_site import guards
from tests.system.store_servers import BUCKET_KEY, BUCKET_SECRET, bucket_server

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
in_module = pytest.mark.asyncio(loop_scope="module")

Machines = tuple[Place, LocalService, AsyncClient]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fuse", "fanotify", "ublk"])
async def machines(request: pytest.FixtureRequest) -> AsyncIterator[Machines]:
    ublk = request.param == "ublk"
    if ublk and (why := why_no_block_devices(find_binary("dsec-loader"))):
        pytest.skip(why)
    storage = {"loader_front": "auto" if ublk else request.param, "block_devices": ublk}
    with private_place(None, settings={"storage": storage}) as place:
        if request.param == "fanotify" and not guards(place.state):
            pytest.skip("this kernel, or this file system, has no fanotify before reads")
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.FULLVM].probe()
            if not probe.usable:
                pytest.skip(f"fullvm: {probe.reason}")
            yield place, service, client


async def create(client: AsyncClient, image: str, *, memory: str = "32MiB") -> AsyncSandbox:
    return await client.create(image, backend="fullvm", memory=memory, timeout_s=240)


@in_module
async def test_a_machine_boots_from_a_disk_that_lies_in_a_store(machines: Machines) -> None:
    place, service, client = machines
    disk = place.directory / "echo.img"
    disk.write_bytes(boot_sector() + bytes(4 << 20))
    store = f"file://{place.directory}/store"
    await client.machines.import_disk("echo", disk, format="raw", boot_wait_s=1.5)
    pushed = await client.machines.push("echo", store)
    await client.machines.remove("echo")

    made = await client.machines.pull("far", store, image="echo", digest=pushed.digest)
    async with await create(client, "far") as sandbox:

        async def prompts() -> bool:
            cells = cells_of(await sandbox.screen.screenshot())
            return any(cells[0]) and not any(map(any, cells[1:]))

        await eventually(
            prompts, deadline_s=300
        )  # and says nothing else, as the firmware would; in a guest it takes long
        assert service.node.find(sandbox.id, project=None).row.layers == made.layers
        stats = service.node.environments._remote.stats_of(made.layers[0])  # type: ignore[attr-defined]
        assert stats.fetches > 0
        devices = [*Path(service.config.run_dir, "loader.blocks").glob("*")]
        assert len(devices) == (1 if service.config.storage.block_devices else 0)
        with pytest.raises(errors.ConflictError):
            await client.layers.remove(made.layers[0])
        traced = await client.machines.trace("far")
        assert traced.layers[0].chunks > 0
        assert list((place.directory / "store/traces").iterdir())
    assert made.used_bytes < 100_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto's and boto3's own code
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_machine_boots_from_a_disk_that_lies_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    with bucket_server() as (host, port), private_place(None) as place:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", BUCKET_KEY),
            ("AWS_SECRET_ACCESS_KEY", BUCKET_SECRET),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        boto3.Session().client("s3").create_bucket(Bucket="layers")
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.FULLVM].probe()
            if not probe.usable:
                pytest.skip(f"fullvm: {probe.reason}")
            disk = place.directory / "echo.img"
            disk.write_bytes(boot_sector() + bytes(4 << 20))
            await client.machines.import_disk("echo", disk, format="raw", boot_wait_s=1.5)
            pushed = await client.machines.push("echo", "s3://layers/prod")
            await client.machines.remove("echo")

            made = await client.machines.pull("far", "s3://layers/prod", image="echo", digest=pushed.digest)
            async with await create(client, "far") as sandbox:

                async def prompts() -> bool:
                    cells = cells_of(await sandbox.screen.screenshot())
                    return any(cells[0]) and not any(map(any, cells[1:]))

                await eventually(prompts)
                stats = service.node.environments._remote.stats_of(made.layers[0])  # type: ignore[attr-defined]
                assert stats.fetches > 0


@pytest.mark.slow
@in_module
async def test_what_a_machine_has_written_is_in_the_machines_made_of_it_and_a_store_that_is_gone_is_told(
    machines: Machines, tmp_path: Path, rng: Any
) -> None:
    place, service, client = machines
    backend = service.node.backends[Substrate.FULLVM]
    assert isinstance(backend, FullvmBackend)
    root = make_root(tmp_path / "root", python=False)
    sync = shutil.which("sync")
    assert sync is not None
    shutil.copy2(sync, root / "bin/sync")
    (root / "far").write_bytes(rng.randbytes(8 << 20))
    try:
        await asyncio.to_thread(add_machine, backend.images, "small", root, Path(service.config.microvm.cache_dir))
    except HostError as error:
        pytest.skip(error.message)
    store = f"file://{place.directory}/store"
    await client.machines.push("small", store)
    await client.machines.remove("small")
    await client.machines.pull("small", store)

    async with await create(client, "small", memory="192MiB") as first:
        await first.exec("echo written > /root/note; sync", check=True)
        made = await client.machines.commit("ready", first.id)
        assert (await first.exec("cat /root/note")).stdout == "written\n", "it goes on"
        kept = await first.snapshot("kept")
    assert len(made.layers) == 3
    assert made.layers[0] == (await client.machines.list())[-1].layers[0]

    async with await create(client, "ready", memory="192MiB") as second:
        assert (await second.exec("cat /root/note")).stdout == "written\n"
        shutil.move(place.directory / "store", place.directory / "gone")
        result = await second.exec("cat /far > /dev/null", timeout_s=300)
        assert (result.exit_code != 0, result.cause) == (True, "layer_unavailable")
        assert (await second.exec("cat /root/note")).stdout == "written\n", "it goes on without"
        shutil.move(place.directory / "gone", place.directory / "store")
        again = await second.exec("cat /far > /dev/null", timeout_s=300)
        assert again.exit_code == 0, again.stderr

    short = await client.machines.collapse("ready")
    assert len(short.layers) == 2
    async with await create(client, "ready", memory="192MiB") as third:
        assert (await third.exec("cat /root/note")).stdout == "written\n"

    for name, export in (("image", client.machines.export), ("snapshot", client.machines.export_snapshot)):
        file = place.directory / f"{name}.img"
        found = await export("ready" if name == "image" else "kept", file, format="raw")
        assert found.disk_bytes == file.stat().st_size
        assert b"written\n" in file.read_bytes(), name
    await kept.remove()
