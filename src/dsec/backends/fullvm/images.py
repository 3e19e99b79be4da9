"""Disks that machines begin as: imported or built once, and never changed.

<state>/fullvm/images/<name>/disk           as it came, raw or qcow2; not of one that was pulled from a store
                             kernel, initrd  of one without a boot loader
                             manifest.json   what it is, and which layers lie above the disk, or are it
A directory appears whole, by a rename. Machines hold the files that they use open, so it may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.vm.qcow2 import read_size
from dsec.core import limits
from dsec.core.errors import (
    ConflictError,
    DsecError,
    EnvironmentNotFoundError,
    InvalidArgumentError,
    LimitError,
    StorageError,
)
from dsec.core.faults import fault_point
from dsec.core.ids import parse_name
from dsec.core.machines import Agent, Bus, Firmware
from dsec.storage.syscalls import exchange
from dsec.wire.codec import from_json, to_json

FORMATS: Final = ("raw", "qcow2")
_MANIFEST: Final = "manifest.json"
_UNFINISHED: Final = ".new-"  # no name of an image
_PIECE_BYTES: Final = 1 << 20
_SECTOR: Final = 512


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    firmware: Firmware
    agent: Agent
    bus: Bus = Bus.VIRTIO
    boot_wait_s: float = 0.0  # after power on, or after its agent's first answer, before it is saved as a template
    command_line: str = ""  # of a kernel beside the disk
    env: dict[str, str] = {}  # of commands, where an agent runs them
    disk_bytes: int  # as the machine sees it
    sha256: str  # of the file of the disk, or of all that the disk is made of
    created_at: float
    base_sha256: str | None = None  # of the file of a disk below layers
    layers: tuple[str, ...] = ()  # digests, lowest first; all but the first are qcow2, and so is it above a disk

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidArgumentError(f"the format of a disk is one of {', '.join(FORMATS)}, not {self.format[:20]!r}")
        if not 0.0 <= self.boot_wait_s <= limits.MACHINE_BOOT_WAIT_S_MAX:
            raise LimitError(f"boot_wait_s must be between 0 and {limits.MACHINE_BOOT_WAIT_S_MAX:g}")
        if len(self.command_line.encode()) > limits.MACHINE_COMMAND_LINE_BYTES_MAX or "\0" in self.command_line:
            raise LimitError(f"a command line has at most {limits.MACHINE_COMMAND_LINE_BYTES_MAX} bytes")
        if len(self.layers) > limits.MACHINE_LAYERS_MAX:
            raise LimitError(f"the disk of a machine has at most {limits.MACHINE_LAYERS_MAX} layers")


@dataclass(frozen=True, slots=True)
class MachineImage:
    name: str
    directory: Path
    manifest: Manifest
    data: tuple[str, ...] = ()  # the files of its layers, once they are to be read

    @property
    def files(self) -> tuple[str, ...]:
        """What its disk is made of, lowest first."""
        return (*((str(self.disk),) if self.disk.exists() else ()), *self.data)

    @property
    def disk(self) -> Path:
        return self.directory / "disk"

    @property
    def kernel(self) -> Path:
        return self.directory / "kernel"

    @property
    def initrd(self) -> Path:
        return self.directory / "initrd"

    def used_bytes(self) -> int:
        """On the node's disk."""
        return sum(path.stat().st_blocks * 512 for path in self.directory.iterdir())


class MachineImages:
    """Of one node. All methods block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._since_s = time.time() - 1.0  # the kernel's clock for files is somewhat behind

    def list(self) -> list[MachineImage]:
        if not self._directory.is_dir():
            return []
        return [image for path in sorted(self._directory.iterdir()) if (image := self._find(path.name)) is not None]

    def layers(self) -> set[str]:
        """Digests of the layers that images have; one that cannot be read needs none."""
        found: set[str] = set()
        for path in self._directory.iterdir() if self._directory.is_dir() else ():
            with contextlib.suppress(StorageError):
                if (image := self._find(path.name)) is not None:
                    found.update(image.manifest.layers)
        return found

    def get(self, name: str) -> MachineImage:
        """Raises EnvironmentNotFoundError."""
        found = self._find(parse_name(name, "image name"))
        if found is None:
            raise EnvironmentNotFoundError(
                f"this node has no machine image {name!r}", hint="`dsec vm ls` lists them; make one: `dsec vm build`"
            )
        return found

    def remove(self, name: str) -> None:
        """Machines of it run on. Raises EnvironmentNotFoundError."""
        gone = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._directory))
        try:
            self.get(name).directory.rename(gone / "image")
        finally:
            shutil.rmtree(gone, ignore_errors=True)

    def begin(self, name: str) -> Path:
        """An empty directory to put disk, kernel and initrd in; then `finish`, and in any case `give_up`. Raises
        ConflictError when there is an image of that name."""
        parse_name(name, "image name")
        self._check_free(name)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._directory))

    def begin_again(self, name: str) -> Path:
        """As `begin`, of an image that takes the place of one that there is."""
        self.get(name)
        return Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._directory))

    def finish(self, work: Path, name: str, manifest: Manifest, *, again: bool = False) -> MachineImage:
        """`again`: in the place of the image of this name."""
        fault_point("fullvm.image.finish")
        for path in work.iterdir():
            path.chmod(0o444)
        work.chmod(0o755)
        (work / _MANIFEST).write_bytes(to_json(manifest))
        if again:
            exchange(work, self._directory / name)
            return MachineImage(name, self._directory / name, manifest)
        self._check_free(name)
        try:
            work.rename(self._directory / name)
        except OSError as error:
            raise ConflictError(f"there is a machine image {name!r} already") from error
        return MachineImage(name, self._directory / name, manifest)

    def give_up(self, work: Path) -> None:
        """Idempotent; does nothing to what is finished, but to what that has taken the place of."""
        shutil.rmtree(work, ignore_errors=True)

    def add(self, name: str, fill: Callable[[Path], Manifest]) -> MachineImage:
        """`fill` is given the directory, and says what it has put there."""
        work = self.begin(name)
        try:
            return self.finish(work, name, fill(work))
        finally:
            self.give_up(work)

    def sweep(self) -> None:
        """Removes what an earlier process has not finished."""
        for path in self._directory.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < self._since_s:
                    shutil.rmtree(path, ignore_errors=True)

    def _check_free(self, name: str) -> None:
        if (self._directory / name).exists():
            raise ConflictError(
                f"there is a machine image {name!r} already", hint=f"choose another name, or `dsec vm rm {name}`"
            )
        if self._directory.is_dir() and sum(1 for _ in self._directory.iterdir()) >= limits.MACHINE_IMAGES_MAX:
            raise LimitError(f"a node has at most {limits.MACHINE_IMAGES_MAX} machine images")

    def _find(self, name: str) -> MachineImage | None:
        try:
            content = (self._directory / name / _MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return MachineImage(name, self._directory / name, from_json(content, Manifest))
        except DsecError as error:
            raise StorageError(f"the manifest of the machine image {name!r} is damaged: {error.message}") from error


def chain_sha256(base: str | None, layers: Sequence[str]) -> str:
    """What a disk is called that is made of these; `base`: of the file of a disk below them."""
    parts = [*([] if base is None else [f"disk {base}"]), *(f"layer {digest}" for digest in layers)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def copy_disk(source: Path, target: Path, *, format: str) -> tuple[int, str]:
    """The size that a machine sees, and the file's sha256. Holes stay holes.

    The format is as told, never as it looks: a raw disk may begin with whatever its owner wrote. Raises
    InvalidArgumentError and LimitError.
    """
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise InvalidArgumentError(f"{source} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgumentError(f"{source} is no regular file")
        if found.st_size > limits.DISK_BYTES_MAX:
            raise LimitError("a disk has at most 64TiB")
        sha256, size = _copy(fd, target)
    finally:
        os.close(fd)
    if format == "qcow2":
        return checked_size(read_size(target)), sha256
    if size % _SECTOR:
        os.truncate(target, size + -size % _SECTOR)
    return checked_size(size + -size % _SECTOR), sha256


def checked_size(size: int) -> int:
    if not limits.MACHINE_DISK_BYTES_MIN <= size <= limits.DISK_BYTES_MAX:
        raise LimitError("a disk has between 512 bytes and 64TiB")
    return size


def _copy(source: int, target: Path) -> tuple[str, int]:
    digest, size, piece = hashlib.sha256(), 0, bytearray(_PIECE_BYTES)
    empty = memoryview(bytes(_PIECE_BYTES))
    with target.open("xb") as out:
        while count := os.readv(source, [piece]):
            view = memoryview(piece)[:count]
            digest.update(view)
            if view == empty[:count]:
                out.seek(count, os.SEEK_CUR)
            else:
                out.write(view)
            size += count
        out.truncate(size)
    return digest.hexdigest(), size
