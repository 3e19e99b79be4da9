"""Screens and machine images as a node's callers reach them; the machines are tests/system/test_fullvm.py's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fullvm.images import MachineImages
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    EnvironmentNotFoundError,
    ForbiddenError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from dsec.core.spec import Substrate
from dsec.storage.disks import DiskLayers
from dsec.storage.layers import LayerStore
from dsec.storage.loader import Loader
from dsec.storage.remote import RemoteLayers
from dsec.testing.nodes import FAKE_SPEC, FakeEnvironments, NodeClient, caller_of, fake_node
from dsec.wire import records
from dsec.wire.codec import unpack
from dsec.wire.disks import MachineCommit, MachinePull, MachinePush, SandboxCommit
from dsec.wire.environments import EnvironmentTrace, MachineBuild
from dsec.wire.frames import FrameType
from dsec.wire.machines import DiskExport, DiskFile, MachineImport, MachineInfo, MachinePage, MachineRef
from dsec.wire.node import Done, Method, Nothing, Right
from dsec.wire.screens import Picture, PressKey, ScreenInput, ScreenRequest, ScreenSize
from dsec.wire.snapshots import SnapshotInfo, SnapshotRequest, SnapshotTake


class WithImages(FakeBackend):
    def __init__(self, images: MachineImages) -> None:
        super().__init__()
        self.images = images


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeClient]:
    remote = RemoteLayers(Loader(tmp_path, tmp_path, cache_bytes=0))
    environments = FakeEnvironments(disks=DiskLayers(LayerStore(tmp_path / "layers"), remote))
    async with fake_node(tmp_path / "node", environments=environments) as client:
        inside = client.node
        inside.backends = {**inside.backends, Substrate.FULLVM: WithImages(MachineImages(tmp_path / "images"))}
        yield client.of(caller_of("/", rights=frozenset({Right.ADMIN})))


def local(client: NodeClient) -> NodeClient:
    return client.of(msgspec.structs.replace(client.caller, local=True))


async def names(client: NodeClient) -> list[str]:
    return [image.name for image in (await client.call(Method.MACHINE_LIST, Nothing(), MachinePage)).machines]


async def test_a_sandbox_without_a_screen_says_what_has_one(node: NodeClient) -> None:
    sandbox = await node.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)
    act = ScreenInput(sandbox.id, ScreenRequest([PressKey(key="enter")]))

    with pytest.raises(UnsupportedError, match="no screen") as refused:
        await node.call(Method.SCREEN_PICTURE, records.SandboxRef(sandbox.id), Picture)
    with pytest.raises(UnsupportedError, match="no screen"):
        await node.call(Method.SCREEN_ACT, act, ScreenSize)
    async with node.stream(Method.SCREEN_VIEW, records.SandboxRef(sandbox.id)) as stream:
        with pytest.raises(UnsupportedError, match="no screen"):
            await stream.recv()

    assert "fullvm" in (refused.value.hint or "")


async def test_only_who_is_on_the_node_names_its_files(node: NodeClient, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(512))
    request = MachineImport(name="one", path=str(tmp_path / "disk"), format="raw")

    with pytest.raises(ForbiddenError):
        await node.call(Method.MACHINE_IMPORT, request, MachineInfo)

    assert await names(node) == []
    made = await local(node).call(Method.MACHINE_IMPORT, request, MachineInfo)
    assert (made.name, made.format, made.firmware, made.agent, made.disk_bytes) == ("one", "raw", "bios", "none", 512)
    assert await names(node) == ["one"]


async def test_only_who_is_on_the_node_has_its_files_written(node: NodeClient, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(512))
    await local(node).call(
        Method.MACHINE_IMPORT, MachineImport(name="one", path=str(tmp_path / "disk"), format="raw"), MachineInfo
    )
    sandbox = await node.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)
    taken = SnapshotTake(sandbox.id, SnapshotRequest(name="kept"))
    await node.call(Method.SNAPSHOT_TAKE, taken, SnapshotInfo)
    image, snapshot = [
        DiskExport(**what, path=str(tmp_path / "out"), format="raw")
        for what in ({"image": "one"}, {"snapshot": "kept"})
    ]

    for request in (image, snapshot):
        with pytest.raises(ForbiddenError):
            await node.call(Method.MACHINE_EXPORT, request, DiskFile)
    with pytest.raises(UnsupportedError, match="no snapshot of a machine"):
        await local(node).call(Method.MACHINE_EXPORT, snapshot, DiskFile)
    with pytest.raises(NotFoundError):
        await local(node).call(Method.MACHINE_EXPORT, msgspec.structs.replace(snapshot, snapshot="none"), DiskFile)
    with pytest.raises(EnvironmentNotFoundError):
        await local(node).call(Method.MACHINE_EXPORT, msgspec.structs.replace(image, image="none"), DiskFile)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{}, {"image": "a", "snapshot": "b"}, {"image": "a", "path": "out"}])
def test_what_is_no_export_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError):
        DiskExport(**{"path": "/out", "format": "raw", **wrong})


async def test_a_disk_that_would_fill_the_node_s_is_refused(node: NodeClient, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    inside = node.node
    inside.config = replace(inside.config, disk_free_bytes_min=1 << 60)

    request = MachineImport(name="one", path=str(tmp_path / "disk"), format="raw")
    with pytest.raises(CapacityError):
        await local(node).call(Method.MACHINE_IMPORT, request, MachineInfo)

    assert await names(node) == []


async def test_an_image_is_removed_once(node: NodeClient, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(512))
    request = MachineImport(name="one", path=str(tmp_path / "disk"), format="raw")
    await local(node).call(Method.MACHINE_IMPORT, request, MachineInfo)

    await node.call(Method.MACHINE_REMOVE, MachineRef("one"), Done)

    with pytest.raises(EnvironmentNotFoundError):
        await node.call(Method.MACHINE_REMOVE, MachineRef("one"), Done)
    assert await names(node) == []


async def build(node: NodeClient, name: str) -> MachineInfo:
    async with node.stream(Method.MACHINE_BUILD, MachineBuild(name=name)) as stream:
        last = (await stream.all())[-1]
    assert last.type == FrameType.END
    return unpack(last.body, MachineInfo)


async def test_what_is_built_is_an_image(node: NodeClient) -> None:
    made = await build(node, "deb")

    assert (made.name, made.firmware, made.agent) == ("deb", "kernel", "dsec")
    assert await names(node) == ["deb"]


async def test_a_build_of_a_name_that_is_taken_begins_not_at_all(node: NodeClient, tmp_path: Path) -> None:
    await build(node, "deb")

    with pytest.raises(ConflictError):
        await build(node, "deb")

    assert [path.name for path in (tmp_path / "images").iterdir()] == ["deb"]


async def test_stores_in_directories_of_the_node_are_for_who_is_on_it(node: NodeClient, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(512))
    await local(node).call(
        Method.MACHINE_IMPORT, MachineImport(name="one", path=str(tmp_path / "disk"), format="raw"), MachineInfo
    )
    store = f"file://{tmp_path}/store"
    push = MachinePush(name="one", store=store)
    pull = MachinePull(name="two", store=store, image="other")

    for method, request in ((Method.MACHINE_PUSH, push), (Method.MACHINE_PULL, pull)):
        with pytest.raises(ForbiddenError):
            await node.call(method, request, MachineInfo)
    assert not (tmp_path / "store").exists()
    pushed = await local(node).call(Method.MACHINE_PUSH, push, MachineInfo)
    assert pushed.digest == (await local(node).call(Method.MACHINE_PUSH, push, MachineInfo)).digest
    assert pushed.digest is not None
    with pytest.raises(NotFoundError, match="no machine 'other'"):
        await local(node).call(Method.MACHINE_PULL, pull, MachineInfo)
    with pytest.raises(ConflictError, match="nothing of the disk"):
        await node.call(Method.MACHINE_TRACE, MachineRef("one"), EnvironmentTrace)


async def test_only_disks_of_machines_become_images_of_machines(node: NodeClient) -> None:
    sandbox = await node.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)

    with pytest.raises(UnsupportedError, match="become no images"):
        await node.call(Method.MACHINE_COMMIT, SandboxCommit(sandbox.id, MachineCommit(name="one")), MachineInfo)
    assert await names(node) == []


async def test_a_node_that_offers_no_machines_says_so(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        with pytest.raises(UnsupportedError, match="no full machines"):
            await client.call(Method.MACHINE_LIST, Nothing(), MachinePage)
