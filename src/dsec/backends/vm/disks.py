"""What a machine reads and writes: layers as images for block devices, and the disk of a template."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from dsec.backends.base import Layer
from dsec.core.errors import HostError, StorageError, UnsupportedError
from dsec.core.limits import MIB
from dsec.image.erofs import features, mkfs_program
from dsec.wire.jail import JailBind

# Serial numbers, devices and interrupts of a small machine: two for a layer, and six that it has anyway.
LAYERS_MAX: Final = 12
_PMEM_BYTES: Final = 2 * MIB  # what a processor maps at once
_LOADER: Final = "/proc/"  # files that it serves are where only it is
_MAKE_S: Final = 1_800
_NO_UUID: Final = "00000000-0000-0000-0000-000000000000"  # which mkfs.erofs before 1.6 knows by no name
_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def check_layers(layers: tuple[Layer, ...], *, network: bool = False) -> None:
    """A network card is one device more."""
    most = LAYERS_MAX - 1 if network else LAYERS_MAX
    if len(layers) > most:
        raise UnsupportedError(
            f"a microvm has at most {most} layers, and the environment has {len(layers)}",
            hint="collapse it: `dsec layer collapse NAME`",
        )


def layer_binds(layers: tuple[Layer, ...], images: Path, *, persistent: bool = False) -> list[JailBind]:
    """Each layer at `/layers/N.meta` and `.blob` of the jail. A layer that is a directory becomes an image first, once.

    `persistent`: files that are to be seen as memory, which has sizes of 2 MiB: copies of that size, once; of a layer
    in a store that loads all of it.

    Blocking. Raises StorageError.
    """
    binds: list[JailBind] = []
    for number, layer in enumerate(layers):
        meta = layer.meta if layer.kind == "erofs" else str(_image_of(layer, images, flat=persistent))
        files = {"meta": meta}
        if has_blob(layer):
            assert layer.blob is not None
            files["blob"] = layer.blob
        for part, path in files.items():
            path = str(_padded(Path(path), images / f"{layer.digest}.{part}.pmem")) if persistent else path
            binds.append(bind_of(path, f"/layers/{number}.{part}"))
    return binds


def bind_of(path: str, target: str) -> JailBind:
    """Of what monitors read, which is root's to write."""
    if is_device(path):
        return JailBind(path, target, device=True, owned=True)
    # By fanotify the loader is given a descriptor of what a reader reads, which it can write by: there is none of a
    # mount for reading only, and the read fails.
    return JailBind(readable(path), target, writable=path.startswith(_LOADER))


def is_device(path: str) -> bool:
    """What the loader serves as a block device."""
    return stat.S_ISBLK(Path(path).stat().st_mode)


def digest_of(image: Path) -> str:
    """Of the layer that a file in the directory of images was made of."""
    return image.name.partition(".")[0]


def _padded(source: Path, target: Path) -> Path:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix="new-", dir=target.parent) as work:
            early = Path(work) / "image"
            copy_disk(source, early)
            os.truncate(early, -(-early.stat().st_size // _PMEM_BYTES) * _PMEM_BYTES)
            early.rename(target)
    return target


def readable(path: str) -> str:
    """By monitors, which are nobody's users: what others could not read they cannot reach, in a directory of root's."""
    mode = Path(path).stat().st_mode
    if not mode & 0o004:
        Path(path).chmod(stat.S_IMODE(mode) | 0o444)
    return path


def has_blob(layer: Layer) -> bool:
    """A device of no bytes is none."""
    return layer.kind == "erofs" and layer.blob is not None and Path(layer.blob).stat().st_size > 0


def make_disk(path: Path, size_bytes: int) -> None:
    """A file with an empty ext4. Blocking. Raises HostError."""
    with path.open("xb") as file:
        file.truncate(size_bytes)
    # No journal: what a machine has written that has died is not used again.
    options = ["-q", "-F", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0", "-E", "lazy_itable_init=1"]
    _run("mke2fs", *options, str(path), missing="apt-get install e2fsprogs")


def copy_disk(source: Path, target: Path) -> None:
    """What is empty stays so; where the file system can share blocks it does. Blocking. Raises HostError."""
    _run("cp", "--reflink=auto", "--sparse=auto", str(source), str(target), missing="apt-get install coreutils")
    target.chmod(0o600)


def drop_holes(path: Path) -> None:
    """Pages of nothing but zeros take no room afterwards. Blocking. Raises HostError, StorageError."""
    early = path.with_suffix(".sparse")
    _run("cp", "--sparse=always", str(path), str(early), missing="apt-get install coreutils")
    early.rename(path)


def _image_of(layer: Layer, images: Path, *, flat: bool = False) -> Path:
    """`flat`: no data between the metadata, which could not be mapped."""
    target = images / (f"{layer.digest}.flat.erofs" if flat else f"{layer.digest}.erofs")
    if target.exists():
        return target
    program = mkfs_program()
    if program is None:
        raise StorageError(
            "the layers of this node are directories, and there is no mkfs.erofs to make images of them",
            hint="apt-get install erofs-utils",
        )
    images.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="new-", dir=images) as work:
        early = Path(work) / "image"
        # The image's time is fixed, each file keeps its own.
        times = ["-T0", "--mkfs-time"] if "--mkfs-time" in features(program) else ["--preserve-mtime"]
        times += ["-Enoinline_data"] if flat else []
        _run(program, *times, "-U", _NO_UUID, str(early), layer.meta, missing="")
        early.rename(target)
    return target


def _run(*command: str, missing: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_MAKE_S, stdin=subprocess.DEVNULL, env=_ENVIRONMENT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"{command[0]}: {error}", hint=missing or None) from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise StorageError(f"{command[0]} failed with {done.returncode}: {said}")
