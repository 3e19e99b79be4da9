"""Layers that microvms see as memory: what monitors are told, and the files that it maps."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dsec.backends.base import Layer
from dsec.backends.microvm import monitors
from dsec.backends.microvm.config import MicrovmConfig
from dsec.backends.vm import firecracker_driver, machine
from dsec.backends.vm.disks import digest_of, layer_binds
from dsec.backends.vm.firecracker import Firecracker
from dsec.backends.vm.firecracker_driver import FirecrackerDriver, drives_of
from dsec.backends.vm.kernel import GuestKernel
from dsec.backends.vm.machine import Drive, Persistent, Shape
from dsec.core.errors import InvalidArgumentError, UnsupportedError
from dsec.core.limits import GIB, MIB
from dsec.image.erofs import mkfs_program

SHAPE = Shape(processors=1, memory_bytes=256 * MIB, disk_bytes=GIB, pids=100, layers=(("a" * 64, True),))


def arguments(*persistent: Persistent) -> list[str]:
    return machine.machine_arguments(
        SHAPE,
        accelerator="tcg",
        drives=[Drive("disk", "/disk", writable=True)],
        memory="memory-backend-ram,id=ram0,size=256M",
        firmware="/firmware",
        persistent=persistent,
    )


def test_files_are_mapped_for_reading_only_and_fit_the_addresses_beside_the_memory() -> None:
    given = arguments(Persistent("/layers/0.meta", 2 * MIB), Persistent("/layers/0.blob", 3 * GIB))

    objects = [word for word in given if "id=pm" in word and word.startswith("memory-backend-file")]
    assert all(word.endswith("share=on,readonly=on") for word in objects)
    assert [word.split(",")[3] for word in objects] == ["mem-path=/layers/0.meta", "mem-path=/layers/0.blob"]
    (size,) = [word for word in given if word.startswith("size=256M")]
    assert size == "size=256M,slots=2,maxmem=6G"
    assert not [word for word in given if word.startswith("microvm") or "-device," in word]
    assert given.count("virtio-pmem-pci,memdev=pm0,id=nv0") == 1


def test_without_any_it_is_the_small_machine() -> None:
    given = arguments()

    assert "microvm,rtc=on,memory-backend=ram0" in given
    assert "size=256M" in given
    assert not [word for word in given if "pmem" in word]


def test_layers_are_copied_once_to_sizes_that_can_be_mapped(tmp_path: Path, rng: Random) -> None:
    meta, blob = tmp_path / "meta", tmp_path / "blob"
    meta.write_bytes(rng.randbytes(3 * MIB))
    blob.write_bytes(rng.randbytes(1000))
    layer = Layer("d" * 64, "erofs", str(meta), str(blob))
    images = tmp_path / "images"

    binds = layer_binds((layer,), images, persistent=True)
    again = layer_binds((layer,), images, persistent=True)

    assert binds == again
    assert [bind.target for bind in binds] == ["/layers/0.meta", "/layers/0.blob"]
    files = [Path(bind.source) for bind in binds]
    assert [file.stat().st_size for file in files] == [4 * MIB, 2 * MIB]
    assert files[1].read_bytes().rstrip(b"\0") == blob.read_bytes().rstrip(b"\0")
    assert {digest_of(file) for file in files} == {layer.digest}
    assert sorted(path.name for path in images.iterdir()) == [f"{layer.digest}.blob.pmem", f"{layer.digest}.meta.pmem"]
    assert [bind.source for bind in layer_binds((layer,), images)] == [str(meta), str(blob)]


@pytest.mark.skipif(mkfs_program() is None, reason="needs mkfs.erofs (apt-get install erofs-utils)")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_layer_that_is_a_directory_becomes_the_same_image_wherever_it_is_made(
    tmp_path: Path, persistent: bool
) -> None:
    root = tmp_path / "layer"
    root.mkdir()
    (root / "file").write_text("content")
    os.utime(root / "file", (1, 1))
    os.utime(root, (2, 2))
    layer = Layer("d" * 64, "directory", str(root))

    made = [layer_binds((layer,), tmp_path / name, persistent=persistent)[0] for name in ("one", "other")]
    assert layer_binds((layer,), tmp_path / "one", persistent=persistent)[0] == made[0]

    contents = [Path(bind.source).read_bytes() for bind in made]
    assert contents[0] == contents[1]
    assert contents[0][1024:1028] == b"\xe2\xe1\xf5\xe0", "the magic number of EROFS"


def test_a_device_of_another_kind_is_refused(tmp_path: Path) -> None:
    config = MicrovmConfig(run_dir=Path("/run/x"), state_dir=tmp_path, layer_device="pmem", monitor="firecracker")

    with pytest.raises(InvalidArgumentError, match="layer_device must be one of"):
        replace(config, layer_device="disk")


@pytest.mark.parametrize(
    ("version", "layer_device", "why"),
    [((1, 12), "blk", None), ((1, 13), "pmem", "no pmem, which 1.14 has"), ((1, 14), "pmem", None)],
)
async def test_layers_are_memory_under_a_firecracker_that_can_and_under_qemu_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], layer_device: str, why: str | None
) -> None:
    async def works(*_: object, **__: object) -> None:
        return None

    firecracker = Firecracker(Path("/firecracker"), version, f"Firecracker v{version[0]}.{version[1]}.0")
    monkeypatch.setattr(monitors, "find_firecracker", lambda program: firecracker)
    monkeypatch.setattr(monitors, "why_no_firecracker", works)
    config = MicrovmConfig(run_dir=Path("/run/x"), state_dir=tmp_path, layer_device=layer_device)
    kernel = GuestKernel("k", Path("/vmlinux"), ())

    found = await monitors._why_not_firecracker(config, kernel)

    assert found is None if why is None else why in (found or "")
    if why is not None:
        with pytest.raises(UnsupportedError, match=why):
            await monitors._why_not_firecracker(replace(config, monitor="firecracker"), kernel)


class Told:
    """A Firecracker that takes everything."""

    def __init__(self) -> None:
        self.puts: list[tuple[str, dict[str, Any]]] = []

    async def put(self, path: str, body: dict[str, Any], *, timeout_s: float = 0.0) -> None:
        self.puts.append((path, body))


@pytest.mark.parametrize("persistent", [True, False])
async def test_firecracker_is_told_of_layers_as_memory_for_reading_only_and_its_guest_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool
) -> None:
    plans: list[str] = []

    def keep(image: Path, plan: str, target: Path) -> None:
        plans.append(plan)
        target.touch()

    monkeypatch.setattr(firecracker_driver, "with_plan", keep)
    monkeypatch.setattr(firecracker_driver, "make_disk", lambda path, size: path.touch())
    firecracker = Firecracker(Path("/firecracker"), (1, 14), "Firecracker v1.14.0")
    driver = FirecrackerDriver(firecracker, Path("/vmlinux"), Path("/initramfs"), persistent=persistent)
    told = Told()

    driver._lay_out(tmp_path, SHAPE, os.geteuid())
    await driver._boot(told, SHAPE, drives_of(SHAPE))  # type: ignore[arg-type]

    files = {path: body for path, body in told.puts if path.startswith(("/pmem/", "/drives/"))}
    disk = files.pop("/drives/disk")
    assert disk["is_read_only"] is False
    if persistent:
        assert files == {
            f"/pmem/{name}": {"id": name, "path_on_host": path, "root_device": False, "read_only": True}
            for name, path in (("l0", "/layers/0.meta"), ("l0b", "/layers/0.blob"))
        }
        assert "layer /dev/pmem0 /dev/pmem1" in plans[0]
        assert "disk /dev/vda" in plans[0]
    else:
        assert [body["is_read_only"] for body in files.values()] == [True, True]
        assert "layer /dev/vda /dev/vdb" in plans[0]
        assert "disk /dev/vdc" in plans[0]
    assert driver.identity != replace(driver, persistent=not persistent).identity
