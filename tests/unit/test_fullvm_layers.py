"""Disks of machines as layers: to stores and from them, above each other, and made one again; no machine runs here."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from random import Random

import msgspec
import pytest

from dsec.backends.fullvm import chain, published
from dsec.backends.fullvm.chain import PROGRAM, collapse, commit
from dsec.backends.fullvm.images import MachineImage, MachineImages, Manifest, copy_disk
from dsec.backends.fullvm.published import StoredMachine, pull_image, push_image
from dsec.backends.vm.qcow2 import write_overlay
from dsec.core import limits
from dsec.core.errors import (
    ConflictError,
    ForbiddenError,
    LimitError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from dsec.core.machines import Agent, Firmware
from dsec.storage.disks import DiskLayers, copy_file
from dsec.storage.layers import META_NAME, LayerKind, LayerLocation, LayerRecord, LayerStore
from dsec.storage.loader import Loader
from dsec.storage.remote import RemoteLayers
from dsec.storage.store import format
from dsec.storage.store.places import open_place
from dsec.storage.store.trusted import trusted_stores
from dsec.testing.faults import Faults
from dsec.wire.codec import from_json, to_json

SIZE = 1 << 20
needs_qemu_img = pytest.mark.skipif(
    shutil.which(PROGRAM) is None or os.geteuid() != 0, reason="qemu-utils is not installed, or we are not root"
)


class Whole(RemoteLayers):
    """Has all of a layer at once, as the loader would have it in the end: read from the store and checked."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Loader(directory, directory, cache_bytes=0))
        self._directory = directory

    def serve(self, layer: LayerLocation) -> str:
        assert layer.remote is not None
        assert layer.index is not None
        data = open_place(layer.remote.store).get(format.object_path("data", layer.digest))
        target = self._directory / layer.digest
        content = b""
        for offset, stored, raw, digest in format._RECORD.iter_unpack(layer.index.read_bytes()):
            packed = data[offset : offset + stored]
            chunk = bytes(raw) if not stored else packed if stored == raw else format.zstandard.decompress(packed)
            assert format.blake3.blake3(chunk).digest() == digest
            content += chunk
        target.write_bytes(content)
        return str(target)


class Node:
    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "served").mkdir()
        (directory / "root").mkdir()
        self.images = MachineImages(directory / "images")
        self.layers = LayerStore(directory / "state")
        self.disks = DiskLayers(self.layers, Whole(directory / "served"))
        self.root = directory / "root"

    def add(self, name: str, content: bytes, *, kernel: bytes | None = None) -> MachineImage:
        def fill(work: Path) -> Manifest:
            (work / "source").write_bytes(content)
            size, sha256 = copy_disk(work / "source", work / "disk", format="raw")
            (work / "source").unlink()
            if kernel is not None:
                (work / "kernel").write_bytes(kernel)
                (work / "initrd").write_bytes(kernel[::-1])
            return Manifest(
                format="raw",
                firmware=Firmware.BIOS if kernel is None else Firmware.KERNEL,
                agent=Agent.NONE,
                disk_bytes=size,
                sha256=sha256,
                created_at=time.time(),
            )

        return self.images.add(name, fill)

    def commit(self, name: str, image: MachineImage, *contents: tuple[int, bytes]) -> MachineImage:
        with self.layers.staging() as work:
            return commit(self.images, self.disks, name, image, overlays(work, *contents), root=self.root)

    def files(self, image: MachineImage) -> list[Path]:
        lowest = [image.disk] if image.disk.exists() else []
        return [*lowest, *(self.disks.file(digest) for digest in image.manifest.layers)]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


@pytest.fixture
def other(tmp_path: Path) -> Node:
    return Node(tmp_path / "other")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def content(rng: Random) -> bytes:
    return rng.randbytes(SIZE)


def overlays(work: Path, *contents: tuple[int, bytes]) -> list[Path]:
    """Disks of machines, each with a cluster of its own."""
    made = []
    for number, (cluster, content) in enumerate(contents):
        file = work / str(number)
        write_overlay(file, backing="/base/disk", backing_format="raw", size_bytes=SIZE)
        write_cluster(file, cluster, content)
        made.append(file)
    return made


def write_cluster(file: Path, cluster: int, content: bytes) -> None:
    """As QEMU allocates one (docs/interop/qcow2.txt): a second-level table, and the data behind it."""
    end = file.stat().st_size
    with file.open("r+b") as out:
        out.seek(3 * 65_536)
        out.write((end | 1 << 63).to_bytes(8, "big"))
        out.seek(end + cluster * 8)
        out.write((end + 65_536 | 1 << 63).to_bytes(8, "big"))
        out.seek(end + 65_536)
        out.write(content.ljust(65_536, b"\0"))
        out.seek(2 * 65_536 + end // 65_536 * 2)
        out.write(b"\0\1\0\1")


def read_chain(files: list[Path], work: Path) -> bytes:
    """What a machine reads, by qemu-img."""
    spec = {"driver": "raw", "file": {"driver": "file", "filename": str(files[0])}}
    for file in files[1:]:
        spec = {"driver": "qcow2", "file": {"driver": "file", "filename": str(file)}, "backing": spec}  # type: ignore[dict-item]
    out = work / "read"
    command = [PROGRAM, "convert", "-O", "raw", "json:" + msgspec.json.encode(spec).decode(), str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out.read_bytes()


# ---- stores ---------------------------------------------------------------------------------------


def test_an_image_is_pushed_once_and_pulled_as_it_was(node: Node, other: Node, store: str, content: bytes) -> None:
    node.add("machine", content, kernel=b"a kernel")
    digest = push_image(node.images.get("machine"), node.disks, store)

    made = pull_image(other.images, "mine", other.disks, store, stored="machine", digest=digest[:12])

    assert (made.manifest.format, made.manifest.disk_bytes, made.manifest.firmware) == ("raw", SIZE, Firmware.KERNEL)
    assert (made.kernel.read_bytes(), made.initrd.read_bytes()) == (b"a kernel", b"lenrek a")
    assert not made.disk.exists()
    (layer,) = made.manifest.layers
    assert other.layers.get(layer).kind is LayerKind.DISK
    assert other.layers.get(layer).remote is not None
    assert other.disks.file(layer).read_bytes() == content
    assert other.images.layers() == {layer}
    assert push_image(node.images.get("machine"), node.disks, store) == digest


def test_of_an_image_above_another_only_what_lies_above_goes_to_the_store(
    node: Node, other: Node, store: str, content: bytes
) -> None:
    base = node.add("base", content)
    push_image(base, node.disks, store)
    data = Path(store.removeprefix("file://"), "data")
    before = {path for path in data.rglob("*") if path.is_file()}

    above = node.commit("above", base, (3, b"new"))
    push_image(above, node.disks, store)

    (added,) = {path for path in data.rglob("*") if path.is_file()} - before
    assert added.stat().st_size < 10_000
    made = pull_image(other.images, "above", other.disks, store, stored="above")
    assert made.manifest.layers[1:] == above.manifest.layers
    assert len(made.manifest.layers) == 2


def test_a_pulled_image_can_be_pushed_on_only_where_its_content_is(
    node: Node, other: Node, store: str, content: bytes, tmp_path: Path
) -> None:
    push_image(node.add("machine", content), node.disks, store)
    made = pull_image(other.images, "machine", other.disks, store, stored="machine")

    above = other.commit("above", made, (0, b"x"))
    push_image(above, other.disks, store)
    with pytest.raises(UnsupportedError, match="push it from the node"):
        push_image(above, other.disks, f"file://{tmp_path}/elsewhere") or pytest.fail("pushed")


def test_nobody_is_given_another_image_than_asked_for(node: Node, other: Node, store: str, content: bytes) -> None:
    digest = push_image(node.add("machine", content), node.disks, store)

    with pytest.raises(StorageError, match="and not ffffffff"):
        pull_image(other.images, "machine", other.disks, store, stored="machine", digest="f" * 64)
    with pytest.raises(NotFoundError, match="no machine 'other'"):
        pull_image(other.images, "machine", other.disks, store, stored="other")
    assert other.images.list() == []
    pull_image(other.images, "machine", other.disks, store, stored="machine", digest=digest)
    with pytest.raises(ConflictError):
        pull_image(other.images, "machine", other.disks, store, stored="machine")


def test_a_store_that_is_not_trusted_is_not_asked(node: Node, store: str, content: bytes) -> None:
    node.disks.remote.trusted = trusted_stores(["https://other/layers"])

    with pytest.raises(ForbiddenError):
        push_image(node.add("machine", content), node.disks, store)
    with pytest.raises(ForbiddenError):
        pull_image(node.images, "two", node.disks, store, stored="machine")


def test_a_disk_that_no_store_takes_is_refused_before_it_is_read(
    node: Node, store: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "IMAGE_BYTES_MAX", SIZE - 1)

    with pytest.raises(LimitError, match="at most"):
        push_image(node.add("machine", content), node.disks, store)


def rewritten(store: str, **changes: object) -> None:
    """What somebody does to a record who can write to the store."""
    path = Path(store.removeprefix("file://"), published.record_path("machine"))
    record = msgspec.structs.replace(from_json(path.read_bytes(), StoredMachine), **changes)
    path.write_bytes(to_json(record))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"version": 99},
        {"kernel": format.ObjectRef(sha256="0" * 64, size=1, stored=1)},
    ],
)
def test_a_record_that_makes_no_sense_is_refused(
    node: Node, other: Node, store: str, content: bytes, changes: dict[str, object]
) -> None:
    push_image(node.add("machine", content), node.disks, store)
    rewritten(store, **changes)

    with pytest.raises(StorageError):
        pull_image(other.images, "machine", other.disks, store, stored="machine")
    assert other.images.list() == []


@pytest.mark.parametrize("layers", [(), ("0" * 64,), ("0" * 64,) * (limits.MACHINE_LAYERS_MAX + 1)])
def test_a_record_with_layers_that_cannot_be_is_refused(
    node: Node, other: Node, store: str, content: bytes, layers: tuple[str, ...]
) -> None:
    push_image(node.add("machine", content), node.disks, store)
    path = Path(store.removeprefix("file://"), published.record_path("machine"))
    record = msgspec.json.decode(path.read_bytes())
    record["manifest"]["layers"] = layers
    path.write_bytes(msgspec.json.encode(record))

    with pytest.raises((StorageError, NotFoundError)):
        pull_image(other.images, "machine", other.disks, store, stored="machine")
    assert other.images.list() == []


@pytest.mark.parametrize("feature", ["data file", "backing file", "encrypted", "not one", "other size"])
def test_a_disk_that_would_have_a_monitor_open_other_files_is_refused(
    node: Node, other: Node, store: str, tmp_path: Path, feature: str
) -> None:
    """The store's record and layer fit each other: who can write there has made both."""
    disk = tmp_path / "evil.qcow2"
    write_overlay(
        disk, backing="/etc/shadow" if feature == "backing file" else "", backing_format="raw", size_bytes=SIZE
    )
    head = bytearray(disk.read_bytes())
    if feature != "backing file":
        head[8:20] = bytes(12)
    if feature == "data file":
        head[72:80] = (4).to_bytes(8, "big")
    if feature == "encrypted":
        head[32:36] = (2).to_bytes(4, "big")
    if feature == "not one":
        head[:4] = b"none"
    disk.write_bytes(head)
    node.add("machine", bytes(SIZE))
    push_image(node.images.get("machine"), node.disks, store)
    place = node.disks.store(store, write=True)
    size = SIZE * 2 if feature == "other size" else SIZE
    digest = node.disks.push_file(disk, format.DiskMeta(format="qcow2", size=size), place)
    manifest = msgspec.structs.replace(node.images.get("machine").manifest, layers=(digest,), format="qcow2")
    rewritten(store, manifest=manifest)

    with pytest.raises(StorageError, match=r"of no use|not the disk"):
        pull_image(other.images, "machine", other.disks, store, stored="machine")
    assert other.images.list() == []


def test_a_layer_of_an_environment_is_no_disk(node: Node) -> None:
    digest = "a" * 64
    with node.layers.staging() as work:
        (work / "layer").mkdir()
        (work / "layer" / META_NAME).write_bytes(b"erofs" * 100)
        record = LayerRecord(digest=digest, kind=LayerKind.EROFS, size_bytes=500, entries=1, created_at=0.0)
        node.layers.publish(work / "layer", record)

    with pytest.raises(StorageError, match="no disk"):
        node.disks.what(digest)


# ---- layers above each other ------------------------------------------------------------------------


def test_what_a_machine_has_written_is_all_that_is_kept_anew(node: Node, content: bytes) -> None:
    base = node.add("base", content)
    one = node.commit("one", base, (0, b"boot"), (1, b"first"))
    two = node.commit("two", one, (0, b"boot"), (1, b"second"))

    assert base.disk.samefile(one.disk)
    assert base.disk.samefile(two.disk)
    assert len(two.manifest.layers) == 4
    assert two.manifest.layers[:2] == one.manifest.layers
    assert two.manifest.layers[2] == one.manifest.layers[0], "the same content is kept once"
    assert len({image.manifest.sha256 for image in (base, one, two)}) == 3
    node.images.remove("base")
    assert one.disk.read_bytes() == content


@pytest.mark.parametrize("point", ["fullvm.image.finish"])
def test_a_commit_that_fails_leaves_nothing(node: Node, content: bytes, point: str) -> None:
    base = node.add("base", content)
    before = sorted(path.name for path in node.images._directory.iterdir())

    with Faults(1, prefix=point) as faults, pytest.raises(Exception):  # noqa: B017, PT011
        node.commit("one", base, (1, b"first"))

    assert faults.hit is not None
    assert sorted(path.name for path in node.images._directory.iterdir()) == before
    assert list((node.layers.state / "staging").iterdir()) == []
    node.commit("one", base, (1, b"first"))


@needs_qemu_img
def test_machines_see_the_same_of_a_chain_that_was_made_short(
    node: Node, content: bytes, tmp_path: Path, rng: Random
) -> None:
    image = node.add("base", content)
    for number in range(3):
        image = node.commit(f"n{number}", image, (0, rng.randbytes(100)), (number + 1, rng.randbytes(70)))
    before = read_chain(node.files(image), tmp_path)

    short = collapse(node.images, node.disks, image.name, root=node.root)

    assert len(short.manifest.layers) == 1
    assert read_chain(node.files(short), tmp_path) == before
    assert before != content
    assert node.images.get(image.name).manifest == short.manifest
    assert short.disk.samefile(node.images.get("base").disk)
    assert collapse(node.images, node.disks, image.name, root=node.root).manifest == short.manifest
    assert list((node.layers.state / "staging").iterdir()) == []


@needs_qemu_img
def test_a_chain_has_an_end(
    node: Node, other: Node, store: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one whose lowest layer is in a store, which stays there."""
    monkeypatch.setattr(limits, "MACHINE_LAYERS_MAX", 4)
    push_image(node.add("base", content), node.disks, store)
    image = pull_image(other.images, "base", other.disks, store, stored="base")
    lowest = image.manifest.layers[0]
    for number in range(4):
        image = other.commit(f"n{number}", image, (0, b"boot"), (number + 1, b"%d" % number))
        assert len(image.manifest.layers) <= 4
        assert image.manifest.layers[0] == lowest

    seen = read_chain(other.files(image), tmp_path)
    assert [seen[65_536 * (n + 1) :][:1] for n in range(4)] == [b"0", b"1", b"2", b"3"]
    assert seen[65_536 * 5 :] == content[65_536 * 5 :]


def test_without_qemu_img_a_chain_that_is_too_long_is_refused_and_its_hint_says_what_to_do(
    node: Node, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MACHINE_LAYERS_MAX", 1)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    one = node.commit("one", node.add("base", content), (1, b"x"))

    with pytest.raises(UnsupportedError, match="1 layers") as refused:
        node.commit("two", one, (2, b"y"))

    assert "qemu-utils" in (refused.value.hint or "")
    assert [image.name for image in node.images.list()] == ["base", "one"]


@needs_qemu_img
def test_a_layer_that_would_lead_out_of_the_jail_is_not_read(node: Node, content: bytes, tmp_path: Path) -> None:
    """A monitor that was broken through has written it."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 20_000)
    base = node.add("base", content)
    with node.layers.staging() as work:
        (evil,) = overlays(work, (1, b"x"))
        head = bytearray(evil.read_bytes())
        head[72:80] = (4).to_bytes(8, "big")  # its data is elsewhere
        evil.write_bytes(head)
        with pytest.raises(StorageError, match="another file"):
            commit(node.images, node.disks, "evil", base, [evil], root=node.root)
    assert [image.name for image in node.images.list()] == ["base"]


@needs_qemu_img
def test_a_layer_that_says_the_same_over_and_over_fills_no_disk(
    node: Node, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A monitor that was broken through has written it: all clusters of 64 MiB are one."""
    monkeypatch.setattr(chain, "_TABLES_BYTES", 4 << 20)
    monkeypatch.setattr(limits, "MACHINE_LAYERS_MAX", 1)
    base = node.add("base", content)
    with node.layers.staging() as work:
        low, evil = work / "low", work / "evil"
        for file in (low, evil):
            write_overlay(file, backing="", backing_format="raw", size_bytes=64 << 20)
            write_cluster(file, 0, b"x")
        end = evil.stat().st_size - 2 * 65_536
        with evil.open("r+b") as out:
            out.seek(end)
            out.write((end + 65_536 | 1 << 63).to_bytes(8, "big") * 1024)
        with pytest.raises(StorageError, match="could not be read or written"):
            commit(node.images, node.disks, "evil", base, [low, evil], root=node.root)
        assert sum(path.stat().st_blocks * 512 for path in work.rglob("*") if path.is_file()) < 8 << 20
    assert [image.name for image in node.images.list()] == ["base"]


def test_only_regular_files_are_copied_from_where_a_monitor_may_write(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "fifo")

    for name in ("link", "fifo", "nothing"):
        with pytest.raises(StorageError):
            copy_file(tmp_path / name, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    copy_file(secret, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"secret"
