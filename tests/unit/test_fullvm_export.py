"""Disks of machines as files for other programs, and disks that become images beside a node that has no socket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from dsec.backends.fullvm.exporting import DiskFiles, export
from dsec.backends.fullvm.images import MachineImage, MachineImages
from dsec.core.errors import ConflictError, DsecError, InvalidArgumentError, UnsupportedError
from dsec.serve.__main__ import main
from dsec.testing.faults import each_nth_failure
from tests.unit.test_fullvm_layers import SIZE, Node, needs_qemu_img, read_chain

pytestmark = [needs_qemu_img]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


@pytest.fixture
def image(node: Node, rng: Random) -> MachineImage:
    """Of three files, of which most is empty."""
    base = node.add("base", rng.randbytes(70_000) + bytes(SIZE - 70_000))
    return node.commit("above", base, (1, rng.randbytes(100)), (9, rng.randbytes(65_536)))


def exported(node: Node, image: MachineImage, target: Path, format: str = "raw") -> int:
    disk = DiskFiles([str(file) for file in node.files(image)], image.manifest.format, image.manifest.disk_bytes)
    with node.layers.staging() as staging:
        (staging / "export").mkdir(mode=0o700)
        return export(disk, target, format=format, work=staging / "export", root=node.root)


def left(node: Node, place: Path) -> list[str]:
    return sorted(path.name for path in (*place.iterdir(), *(node.layers.state / "staging").iterdir()))


def test_a_file_reads_as_the_disk_and_what_is_empty_takes_no_room(
    node: Node, image: MachineImage, tmp_path: Path
) -> None:
    place = tmp_path / "out"
    place.mkdir()
    whole = read_chain(node.files(image), tmp_path)

    used = exported(node, image, place / "disk.img")
    exported(node, image, place / "disk.qcow2", "qcow2")

    assert (place / "disk.img").read_bytes() == whole
    assert used == (place / "disk.img").stat().st_blocks * 512 < SIZE // 2
    assert (place / "disk.img").stat().st_mode & 0o777 == 0o600
    back = ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", place / "disk.qcow2", tmp_path / "back"]
    subprocess.run(back, check=True, timeout=60)
    assert (tmp_path / "back").read_bytes() == whole
    info = subprocess.run(["qemu-img", "info", place / "disk.qcow2"], check=True, timeout=60, capture_output=True)
    assert b"backing" not in info.stdout
    assert left(node, place) == ["disk.img", "disk.qcow2"]


def test_what_is_there_is_never_written_over(node: Node, image: MachineImage, tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "file").write_text("mine")
    (place / "link").symlink_to("nowhere")

    for name in ("file", "link"):
        with pytest.raises(ConflictError):
            exported(node, image, place / name)
    with pytest.raises(InvalidArgumentError):
        exported(node, image, place / "none" / "file")
    with pytest.raises(InvalidArgumentError):
        exported(node, image, place / "other", "vmdk")

    assert (place / "file").read_text() == "mine"
    assert left(node, place) == ["file", "link"]


def test_one_that_appears_meanwhile_is_left_alone(
    node: Node, image: MachineImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "out"
    place.mkdir()

    def appears(name: str) -> None:
        if name == "fullvm.export.put":
            (place / "disk").write_text("mine")

    monkeypatch.setattr("dsec.backends.fullvm.exporting.fault_point", appears)
    with pytest.raises(ConflictError):
        exported(node, image, place / "disk")

    assert (place / "disk").read_text() == "mine"
    assert left(node, place) == ["disk"]


@pytest.mark.parametrize("nameless", [True, False])
def test_one_that_fails_at_any_step_leaves_nothing(
    node: Node, image: MachineImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    """Also on a file system that has no files without a name."""
    place = tmp_path / "out"
    place.mkdir()
    if not nameless:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    hits = set()
    for faults in each_nth_failure(""):
        with faults:
            try:
                exported(node, image, place / "disk")
            except (DsecError, OSError):
                hits.add(faults.hit)
                assert left(node, place) == []
    assert {"fullvm.export", "fullvm.export.put", "vm.copy"} <= hits
    assert left(node, place) == ["disk"]


def test_without_qemu_img_it_says_what_is_missing(
    node: Node, image: MachineImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UnsupportedError, match="qemu-img"):
        exported(node, image, tmp_path / "disk")


def imported(tmp_path: Path) -> tuple[list[str], dict[str, str], MachineImages]:
    (tmp_path / "disk.img").write_bytes(bytes(1 << 20))
    (tmp_path / "dsec.toml").write_text("[node]\ndisk_free_bytes_min = 0\n")
    words = ["import", "one", str(tmp_path / "disk.img"), "--format", "raw", "--boot-wait", "2"]
    env = {"DSEC_CONFIG": str(tmp_path / "dsec.toml")}
    return [*words, "--state-dir", str(tmp_path / "state")], env, MachineImages(tmp_path / "state/fullvm/images")


def test_a_disk_is_imported_beside_a_node_that_has_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, env, images = imported(tmp_path)
    monkeypatch.setenv(*next(iter(env.items())))

    assert [main(words), main(words)] == [0, 125]

    said = capsys.readouterr()
    assert said.out == "one\n"
    assert "already" in said.err
    (image,) = images.list()
    assert (image.name, image.manifest.disk_bytes, image.manifest.boot_wait_s) == ("one", 1 << 20, 2.0)


@pytest.mark.slow
def test_the_command_line_does_it_too(tmp_path: Path) -> None:
    words, env, images = imported(tmp_path)

    command = [sys.executable, "-m", "dsec", "vm", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=120)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["boot_wait_s"] == 2.0
    assert [image.name for image in images.list()] == ["one"]
