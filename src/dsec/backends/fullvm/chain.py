"""A machine's disk becomes an image: what it has written, as layers above those it began as; chains stay short.

Blocking.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.fullvm.images import MachineImage, MachineImages, chain_sha256, checked_size
from dsec.backends.vm.monitor import Confines, jail_plan
from dsec.backends.vm.qcow2 import check_overlay
from dsec.binaries import find_binary
from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, StorageError, UnsupportedError
from dsec.core.faults import fault_point
from dsec.core.limits import MIB
from dsec.storage.disks import DiskLayers, copy_file
from dsec.storage.space import require_free
from dsec.storage.store.format import DiskMeta
from dsec.wire.codec import pack
from dsec.wire.jail import JailBind

PROGRAM: Final = "qemu-img"
_MERGE_S: Final = 3_600
NOBODY: Final = 65_534
_TABLES_BYTES: Final = 64 * MIB
WORK: Final = "/vm"  # of a jail: the directory that its program may write
_BESIDE: Final = ("disk", "kernel", "initrd")
_QCOW2: Final = "qcow2"


def commit(
    images: MachineImages, disks: DiskLayers, name: str, image: MachineImage, written: Sequence[Path], *, root: Path
) -> MachineImage:
    """The disk of a machine of `image`, whose files above it are `written` (lowest first, copies below a staging
    directory, which are taken), as the image `name`. Nothing is packed anew.

    `root`: an empty directory for jails. Raises ConflictError for a name that is taken, StorageError, CapacityError,
    and UnsupportedError where a chain that is too long cannot be made shorter.
    """
    work = images.begin(name)
    try:
        with ExitStack() as held:
            layers = list(image.manifest.layers)
            if len(layers) + len(written) > limits.MACHINE_LAYERS_MAX:
                written = [merge([*_increments(image, disks), *written], disks, held, root=root)]
                layers = _lowest(image)
            size = image.manifest.disk_bytes
            for file in written:
                found = _size(file)
                size = max(size, found)
                layers += held.enter_context(disks.add(file, DiskMeta(format=_QCOW2, size=found))).digests
            return _finish(images, disks, work, name, image, layers, size)
    finally:
        images.give_up(work)


def collapse(images: MachineImages, disks: DiskLayers, name: str, *, root: Path) -> MachineImage:
    """The layers of an image above its lowest become one; machines see the same. Machines of it run on."""
    image = images.get(name)
    increments = _increments(image, disks)
    if len(increments) < 2:
        return image
    work = images.begin_again(name)
    try:
        with ExitStack() as held:
            merged = merge(increments, disks, held, root=root)
            lease = held.enter_context(disks.add(merged, DiskMeta(format=_QCOW2, size=_size(merged))))
            layers = [*_lowest(image), *lease.digests]
            return _finish(images, disks, work, name, image, layers, image.manifest.disk_bytes, again=True)
    finally:
        images.give_up(work)


def merge(files: Sequence[Path], disks: DiskLayers, held: ExitStack, *, root: Path) -> Path:
    """One file of all that these qcow2 (lowest first) say, above what the lowest stands on; gone when `held` is.

    `qemu-img` reads what guests and monitors have written: it does so as nobody, in a jail with these files only.
    """
    if shutil.which(PROGRAM) is None:
        raise UnsupportedError(
            f"the disk has {limits.MACHINE_LAYERS_MAX} layers, and there is no {PROGRAM} to make them fewer",
            hint="apt-get install qemu-utils",
        )
    work = held.enter_context(disks.layers.staging()) / "merge"
    work.mkdir(mode=0o700)
    total = sum(file.stat().st_size for file in files)
    require_free(disks.layers.state, total)
    for number, file in enumerate(files):
        copy_file(file, work / str(number))
        _size(work / str(number))  # none has its data in files of the host
        os.chown(work / str(number), NOBODY, NOBODY)
    os.chown(work, NOBODY, NOBODY)
    # No more than all of them together: clusters of a file that lies can be the same ones over and over.
    most = total + total // 64 + _TABLES_BYTES
    img(work, root, most, "rebase", "-u", "-f", _QCOW2, "-b", "", f"{WORK}/0")
    for number in range(1, len(files)):
        img(work, root, most, "rebase", "-u", "-f", _QCOW2, "-F", _QCOW2, "-b", str(number - 1), f"{WORK}/{number}")
    fault_point("fullvm.merge")
    if len(files) > 1:
        img(work, root, most, "commit", "-d", "-f", _QCOW2, "-b", "0", f"{WORK}/{len(files) - 1}")
    return work / "0"


def img(work: Path, root: Path, bytes_max: int, command: str, *words: str, binds: Sequence[JailBind] = ()) -> None:
    """As nobody, in a jail with what is in `work`, and `binds` to read. Raises StorageError."""
    program = shutil.which(PROGRAM)
    assert program is not None
    confines = Confines(uid=NOBODY, cgroups=(), root=root, sockets=work, binds=tuple(binds))
    plan = jail_plan(confines, [program, command, *words])
    plan = msgspec.structs.replace(plan, limits={**plan.limits, "fsize": bytes_max})
    try:
        done = subprocess.run([find_binary("dsec-jail")], input=pack(plan), capture_output=True, timeout=_MERGE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"{PROGRAM} {command}: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise StorageError(f"a disk could not be read or written ({PROGRAM} {command}): {said}")


def _lowest(image: MachineImage) -> list[str]:
    return [] if image.disk.exists() else list(image.manifest.layers[:1])


def _increments(image: MachineImage, disks: DiskLayers) -> list[Path]:
    above = image.manifest.layers if image.disk.exists() else image.manifest.layers[1:]
    return [disks.file(digest) for digest in above]


def _size(file: Path) -> int:
    try:
        return check_overlay(file)
    except InvalidArgumentError as error:
        raise StorageError(f"what the machine has written cannot be read: {error.message}") from error


def _finish(
    images: MachineImages,
    disks: DiskLayers,
    work: Path,
    name: str,
    image: MachineImage,
    layers: Sequence[str],
    size: int,
    *,
    again: bool = False,
) -> MachineImage:
    base = None
    for file in _BESIDE:
        try:
            os.link(image.directory / file, work / file)
        except FileNotFoundError:
            continue
    if (work / "disk").exists():
        base = image.manifest.base_sha256 or image.manifest.sha256
    manifest = msgspec.structs.replace(
        image.manifest,
        layers=tuple(layers),
        base_sha256=base,
        sha256=chain_sha256(base, layers),
        disk_bytes=checked_size(size),
        created_at=time.time(),
    )
    with disks.layers.publishing():
        return images.finish(work, name, manifest, again=again)
