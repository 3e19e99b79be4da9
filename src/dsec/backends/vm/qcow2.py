"""Copy-on-write disks without a program (QEMU's docs/interop/qcow2.txt): empty ones made, those of others looked at.

What `qemu-img create -b` takes 10 ms for is four small tables.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from dsec.core.errors import InvalidArgumentError

_MAGIC: Final = 0x514649FB
_CLUSTER_BITS: Final = 16
CLUSTER: Final = 1 << _CLUSTER_BITS  # of disks that are made here
_HEADER_BYTES: Final = 104
_FORMAT_NAME: Final = 0xE2792ACA
_REFCOUNT_BITS_LOG2: Final = 4
_DIRTY, _ELSEWHERE, _COMPRESSION = 1, 4, 8  # features that a reader must know
_LAID_OUT: Final = struct.Struct(">IIQIIQIIQQIIQ")


def write_overlay(path: Path, *, backing: str, backing_format: str, size_bytes: int) -> None:
    """A disk that reads as `backing` until it is written. `backing` is what the monitor is to open.

    Of 64 KiB clusters: the header, one table of reference counts with its block, and the first-level table. Raises
    OSError (FileExistsError: nothing is overwritten).
    """
    table_entries = -(-size_bytes // (CLUSTER * CLUSTER // 8))
    table_clusters = max(1, -(-table_entries * 8 // CLUSTER))
    used = 3 + table_clusters
    extension = struct.pack(">II", _FORMAT_NAME, len(backing_format)) + _padded(backing_format.encode())
    extension += struct.pack(">II", 0, 0)
    name = backing.encode()
    header = _LAID_OUT.pack(
        _MAGIC,
        3,
        _HEADER_BYTES + len(extension),
        len(name),
        _CLUSTER_BITS,
        size_bytes,
        0,
        table_entries,
        3 * CLUSTER,
        1 * CLUSTER,
        1,
        0,
        0,
    )
    header += struct.pack(">QQQII", 0, 0, 0, _REFCOUNT_BITS_LOG2, _HEADER_BYTES)
    with path.open("xb") as file:
        file.write(header + extension + name)
        file.seek(CLUSTER)
        file.write(struct.pack(">Q", 2 * CLUSTER))
        file.seek(2 * CLUSTER)
        file.write(struct.pack(f">{used}H", *[1] * used))
        file.truncate(used * CLUSTER)


def read_size(path: Path) -> int:
    """How large the disk in the file is to a machine.

    Raises InvalidArgumentError for what is no qcow2, and for one that would have a monitor open other files: its
    backing file, or a file of its data.
    """
    return _checked(path, above=False)


def check_overlay(path: Path) -> int:
    """As `read_size`, of one that may stand on another file: a monitor is told on which."""
    return _checked(path, above=True)


def _checked(path: Path, *, above: bool) -> int:
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    if len(head) < _LAID_OUT.size or head[:4] != _MAGIC.to_bytes(4, "big"):
        raise InvalidArgumentError("the disk is no qcow2", hint="say format raw when it is one")
    _, version, backing_at, backing_bytes, _, size, encrypted, *_ = _LAID_OUT.unpack_from(head)
    if version not in (2, 3):
        raise InvalidArgumentError(f"the disk is a qcow2 of version {version}; 2 and 3 are known")
    if (backing_at or backing_bytes) and not above:
        raise InvalidArgumentError(
            "the disk stands on another file", hint="make it whole: `qemu-img convert -O qcow2 IN OUT`"
        )
    if encrypted:
        raise InvalidArgumentError("the disk is encrypted", hint="`qemu-img convert` decrypts it")
    if version == 3:
        (features,) = struct.unpack_from(">Q", head, _LAID_OUT.size)
        if features & _ELSEWHERE:
            raise InvalidArgumentError(
                "the disk has its data in another file", hint="make it whole: `qemu-img convert`"
            )
        if unknown := features & ~(_DIRTY | _COMPRESSION):
            raise InvalidArgumentError(f"the disk is damaged, or has features that are not known: {unknown:#x}")
    return int(size)


def _padded(text: bytes) -> bytes:
    return text + bytes(-len(text) % 8)
