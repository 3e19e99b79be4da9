"""A disk of a machine becomes a file of its own, for other programs: whole, under its name or not at all.

Blocking.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec.backends.fullvm.chain import NOBODY, PROGRAM, WORK, img
from dsec.backends.vm.copying import Deadline, copy_into
from dsec.backends.vm.disks import bind_of
from dsec.backends.vm.machine import plain_file
from dsec.core.errors import ConflictError, InvalidArgumentError, StorageError, UnsupportedError
from dsec.core.faults import fault_point
from dsec.core.limits import MIB
from dsec.storage.space import require_free

FORMATS: Final = ("raw", "qcow2")
_OUT: Final = "out"
_TABLES_BYTES: Final = 64 * MIB  # of a qcow2, beside what is in it
_MODE: Final = 0o600  # what is on a disk is its owner's


@dataclass(frozen=True, slots=True)
class DiskFiles:
    """What a disk is made of, lowest first: all but the lowest are qcow2, and that is of `format`."""

    files: Sequence[str]
    format: str
    size_bytes: int  # to a machine


def export(disk: DiskFiles, target: Path, *, format: str, work: Path, root: Path) -> int:
    """`target`, which is new, is the disk. How many bytes it takes. `work`: an empty directory; `root`: for jails.

    `qemu-img` reads what others have written: it does so as nobody, in a jail with these files only. Raises
    ConflictError, InvalidArgumentError (a place where no file can be), CapacityError, StorageError, UnsupportedError.
    """
    if format not in FORMATS:
        raise InvalidArgumentError(f"a disk becomes one of {', '.join(FORMATS)}, not {format[:20]!r}")
    if shutil.which(PROGRAM) is None:
        raise UnsupportedError(f"there is no {PROGRAM} to read the disk", hint="apt-get install qemu-utils")
    _check_place(target)
    binds = [bind_of(path, f"/files/{number}") for number, path in enumerate(disk.files)]
    require_free(work, sum(os.stat(path).st_blocks * 512 for path in disk.files))  # noqa: PTH116
    os.chown(work, NOBODY, NOBODY)
    most = disk.size_bytes + disk.size_bytes // 8 + _TABLES_BYTES
    source = f"json:{json.dumps(_node(disk))}"
    fault_point("fullvm.export")
    img(work, root, most, "convert", "-O", format, source, f"{WORK}/{_OUT}", binds=binds)
    try:
        return _put(work / _OUT, target)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}", hint="is the disk full?") from error


def _node(disk: DiskFiles) -> dict[str, Any]:
    """Formats and files are named down to the last: nothing that is written in a file names another."""
    node: dict[str, Any] = {"driver": disk.format, "file": plain_file("/files/0")}
    if disk.format == "qcow2":
        node["backing"] = None
    for number in range(1, len(disk.files)):
        node = {"driver": "qcow2", "file": plain_file(f"/files/{number}"), "backing": node}
    return node


def _check_place(target: Path) -> None:
    if os.path.lexists(target):
        raise ConflictError(f"there is a {target} already", hint="choose another name, or remove it")
    if not target.parent.is_dir():
        raise InvalidArgumentError(f"there is no directory {target.parent} on the node")


def _put(source: Path, target: Path) -> int:
    """Under no name until it is whole, so that nothing is left of it before. Raises ConflictError, OSError."""
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # who writes it has read what others have written
            raise StorageError(f"{PROGRAM} has left no file")
        require_free(target.parent, os.fstat(fd).st_blocks * 512, reserve_bytes=0)
        out, draft = _draft(target)
        try:
            copy_into(fd, out, Deadline(float("inf")))
            os.truncate(out, size)
            os.fsync(out)
            fault_point("fullvm.export.put")
            used = os.fstat(out).st_blocks * 512
            _name(draft or Path(f"/proc/self/fd/{out}"), target, follow=draft is None)
            return used
        except FileExistsError as error:
            raise ConflictError(f"there is a {target} already", hint="choose another name, or remove it") from error
        finally:
            os.close(out)
            if draft is not None:
                draft.unlink(missing_ok=True)
    finally:
        os.close(fd)


def _name(draft: Path, target: Path, *, follow: bool) -> None:
    """Nothing that has the name is replaced. Raises FileExistsError."""
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a directory it is linkat(2): link(2) does not follow.
        os.link(draft, target.name, dst_dir_fd=directory, follow_symlinks=follow)
    finally:
        os.close(directory)


def _draft(target: Path) -> tuple[int, Path | None]:
    """A file without a name, where the file system has that; else one that is hidden."""
    try:
        return os.open(target.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE), None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    draft = target.with_name(f".{target.name[:200]}.{os.urandom(4).hex()}")
    return os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE), draft
