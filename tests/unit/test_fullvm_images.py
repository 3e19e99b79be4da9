"""Images of machines: copied once, whole or not at all, whatever their files hold."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import pytest

from dsec.backends.fullvm.images import MachineImage, MachineImages, Manifest, copy_disk
from dsec.backends.vm.qcow2 import read_size, write_overlay
from dsec.core import limits
from dsec.core.errors import ConflictError, EnvironmentNotFoundError, InvalidArgumentError, LimitError, StorageError
from dsec.core.limits import MIB
from dsec.core.machines import Agent, Firmware
from dsec.testing.faults import Faults


def add(images: MachineImages, name: str = "one", content: bytes = b"x" * 512) -> MachineImage:
    def fill(directory: Path) -> Manifest:
        (directory / "disk").write_bytes(content)
        return manifest(disk_bytes=len(content))

    return images.add(name, fill)


def manifest(**more: object) -> Manifest:
    fields: dict[str, object] = {
        "format": "raw",
        "firmware": Firmware.BIOS,
        "agent": Agent.NONE,
        "disk_bytes": 512,
        "sha256": "0" * 64,
        "created_at": 1.0,
    }
    return Manifest(**{**fields, **more})  # type: ignore[arg-type]


@pytest.fixture
def images(tmp_path: Path) -> MachineImages:
    return MachineImages(tmp_path / "images")


def qcow2(path: Path, **fields: int) -> Path:
    """A header as others write it, with these fields changed."""
    values = {
        "magic": 0x514649FB, "version": 3, "backing_at": 0, "backing_bytes": 0, "cluster_bits": 16, "size": 64 * MIB,
        "encrypted": 0, "features": 0, **fields,
    }  # fmt: skip
    names = ("magic", "version", "backing_at", "backing_bytes", "cluster_bits", "size", "encrypted")
    head = struct.pack(">IIQIIQI", *(values[name] for name in names)) + bytes(36)
    path.write_bytes(head + struct.pack(">Q", values["features"]) + bytes(512))
    return path


def test_an_image_is_found_by_its_name_until_it_is_removed(images: MachineImages) -> None:
    made = add(images)

    assert images.get("one") == made
    assert images.list() == [made]
    images.remove("one")
    with pytest.raises(EnvironmentNotFoundError):
        images.get("one")
    assert images.list() == []


def test_a_name_is_given_once(images: MachineImages) -> None:
    add(images, content=b"a" * 512)

    with pytest.raises(ConflictError):
        add(images, content=b"b" * 512)

    assert images.get("one").disk.read_bytes() == b"a" * 512
    assert len(list(images.get("one").directory.parent.iterdir())) == 1


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "new-x/../y"])
def test_a_name_leads_nowhere_else(images: MachineImages, name: str) -> None:
    for ask in (images.get, images.begin):
        with pytest.raises(InvalidArgumentError):
            ask(name)


def test_an_image_that_fails_at_the_last_step_leaves_nothing(images: MachineImages) -> None:
    with Faults(1, prefix="fullvm.image."), pytest.raises(OSError, match="injected"):
        add(images)

    assert images.list() == []
    add(images)


def test_an_image_may_be_called_as_one_that_is_new(tmp_path: Path) -> None:
    made = add(MachineImages(tmp_path), "new-one")
    os.utime(made.directory, (1.0, 1.0))
    images = MachineImages(tmp_path)

    images.sweep()

    assert images.list() == [made]


def test_what_was_never_finished_goes_at_the_next_start(tmp_path: Path) -> None:
    images = MachineImages(tmp_path / "images")
    left = images.begin("half")
    os.utime(left, (1.0, 1.0))
    later = MachineImages(tmp_path / "images")
    under_way = later.begin("whole")

    later.sweep()

    assert not left.exists()
    assert under_way.exists()


def test_a_damaged_manifest_is_told(images: MachineImages) -> None:
    made = add(images)
    path = made.directory / "manifest.json"
    path.chmod(0o644)
    path.write_text('{"format": "vmdk"}')

    with pytest.raises(StorageError):
        images.get("one")


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "vmdk"},
        {"boot_wait_s": -1.0},
        {"boot_wait_s": float("nan")},
        {"boot_wait_s": limits.MACHINE_BOOT_WAIT_S_MAX + 1},
        {"command_line": "x" * 3_000},
        {"command_line": "a\0b"},
    ],
)
def test_what_no_machine_can_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        manifest(**wrong)


def test_a_copy_is_the_same_and_holes_stay_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(64 * MIB)
        file.seek(32 * MIB)
        file.write(b"middle")

    size, sha256 = copy_disk(source, target, format="raw")

    content = source.read_bytes()
    assert target.read_bytes() == content
    assert (size, sha256) == (64 * MIB, hashlib.sha256(content).hexdigest())
    assert target.stat().st_blocks * 512 < 4 * MIB


def test_a_raw_disk_ends_with_a_whole_sector(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x" * 700)

    size, _ = copy_disk(tmp_path / "source", tmp_path / "target", format="raw")

    assert size == (tmp_path / "target").stat().st_size == 1024


def test_a_raw_disk_that_looks_like_another_format_stays_raw(tmp_path: Path) -> None:
    source = qcow2(tmp_path / "source", backing_at=200, backing_bytes=11)

    size, _ = copy_disk(source, tmp_path / "target", format="raw")

    assert size == (tmp_path / "target").stat().st_size


def test_a_qcow2_says_how_large_its_disk_is(tmp_path: Path) -> None:
    size, _ = copy_disk(qcow2(tmp_path / "source"), tmp_path / "target", format="qcow2")

    assert size == 64 * MIB


@pytest.mark.parametrize(
    "fields",
    [
        {"backing_at": 200, "backing_bytes": 11},
        {"backing_at": 1 << 60},
        {"features": 4},  # data elsewhere
        {"features": 2},  # corrupt
        {"features": 1 << 40},
        {"encrypted": 2},
        {"version": 4},
        {"magic": 1},
        {"size": limits.DISK_BYTES_MAX + 512},
        {"size": 0},
    ],
)
def test_a_qcow2_that_leads_elsewhere_or_is_strange_is_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        copy_disk(qcow2(tmp_path / "source", **fields), tmp_path / "target", format="qcow2")


def test_an_overlay_of_ours_stands_on_something(tmp_path: Path) -> None:
    write_overlay(tmp_path / "overlay", backing="/etc/passwd", backing_format="raw", size_bytes=MIB)

    with pytest.raises(InvalidArgumentError, match="stands on another file"):
        read_size(tmp_path / "overlay")


def test_only_regular_files_are_copied(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    for source in (tmp_path / "fifo", tmp_path, Path("/dev/zero"), tmp_path / "missing"):
        with pytest.raises(InvalidArgumentError):
            copy_disk(source, tmp_path / "target", format="raw")
        assert not (tmp_path / "target").exists()


def test_an_empty_file_is_no_disk(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"")

    with pytest.raises(LimitError):
        copy_disk(tmp_path / "source", tmp_path / "target", format="raw")
