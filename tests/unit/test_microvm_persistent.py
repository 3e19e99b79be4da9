"""Layers that microvms see as memory: what QEMU is told, and the files that it maps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from dsec.backends.base import Layer
from dsec.backends.microvm.config import MicrovmConfig
from dsec.backends.vm import machine
from dsec.backends.vm.disks import digest_of, layer_binds
from dsec.backends.vm.machine import Drive, Persistent, Shape
from dsec.core.errors import InvalidArgumentError
from dsec.core.limits import GIB, MIB

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


def test_what_firecracker_does_not_do_is_not_asked_of_it(tmp_path: Path) -> None:
    config = MicrovmConfig(run_dir=Path("/run/x"), state_dir=tmp_path, layer_device="pmem")

    with pytest.raises(InvalidArgumentError, match="needs QEMU"):
        replace(config, monitor="firecracker")
    with pytest.raises(InvalidArgumentError, match="layer_device must be one of"):
        replace(config, layer_device="disk")
