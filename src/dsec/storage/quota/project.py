"""Project quota of ext4 and xfs: the files below a directory carry a number, and the file system counts by it.

Needs a file system that was made and mounted for it (ext4: `-O project,quota -E quotatype=prjquota`, mount option
`prjquota`; xfs: mount option `prjquota`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.core.errors import HostError, StorageError
from dsec.storage.quota.image import inodes_of
from dsec.storage.syscalls import check_syscall

_GET_ATTRIBUTES: Final = 0x801C581F
_SET_ATTRIBUTES: Final = 0x401C5820
_ATTRIBUTES: Final = struct.Struct("<IIIII8s")  # xflags, extent size, extents, project, cow extent size, padding
_INHERIT: Final = 0x200
_QUOTACTL_FD: Final = 443  # the same number on every architecture
_PROJECT: Final = 2
_GET: Final = (0x800007 << 8) | _PROJECT
_SET: Final = (0x800008 << 8) | _PROJECT
_QUOTA: Final = struct.Struct("<8QI4x")  # block hard, soft (KiB), bytes, inode hard, soft, inodes, two times, valid
_LIMITS: Final = 1 | 4  # QIF_BLIMITS | QIF_ILIMITS
_FIRST: Final = 0x4000_0000  # below it are the numbers that people use
_TRIES: Final = 16


@dataclass(frozen=True, slots=True)
class Used:
    project: int
    used_bytes: int
    inodes: int


def limit_directory(path: Path, size_bytes: int) -> int:
    """What is made below the empty directory `path` from now on is held to `size_bytes`; the number by which it is.

    Raises HostError when the file system has no project quota.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        project = _unused(fd)
        _set(fd, project, size_bytes, inodes_of(size_bytes))
        flags, extent, extents, _, cow, rest = _attributes(fd)
        fcntl.ioctl(fd, _SET_ATTRIBUTES, _ATTRIBUTES.pack(flags | _INHERIT, extent, extents, project, cow, rest))
        return project
    except OSError as error:
        raise HostError(f"no project quota at {path}: {_reason(error)}") from error
    finally:
        os.close(fd)


def used_below(path: Path) -> Used | None:
    """What is used below a directory that was limited; None when it is not. Raises StorageError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            project = _attributes(fd)[3]
            return _used(fd, project) if project else None
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"the quota of {path} cannot be read: {_reason(error)}") from error


def lift_limit(path: Path, project: int) -> None:
    """The number means nothing any more. `path` is any directory of the same file system. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _set(fd, project, 0, 0)
    finally:
        os.close(fd)


def _unused(fd: int) -> int:
    """Trees that are still being removed count for their number, so one is taken that nobody has."""
    for _ in range(_TRIES):
        project = _FIRST + secrets.randbelow(_FIRST)
        used = _used(fd, project)
        if (used.used_bytes, used.inodes) == (0, 0):
            return project
    raise OSError(errno.EAGAIN, "no free project number was found")


def _attributes(fd: int) -> tuple[int, int, int, int, int, bytes]:
    found: tuple[int, int, int, int, int, bytes] = _ATTRIBUTES.unpack(
        fcntl.ioctl(fd, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size))
    )
    return found


def _used(fd: int, project: int) -> Used:
    buffer = ctypes.create_string_buffer(_QUOTA.size)
    try:
        check_syscall("quotactl_fd", _QUOTACTL_FD, fd, _GET, project, buffer)
    except OSError as error:
        if error.errno == errno.ENOENT:  # xfs, of a number that nothing has
            return Used(project, 0, 0)
        raise
    _, _, used_bytes, _, _, inodes, *_ = _QUOTA.unpack(buffer.raw)
    return Used(project, used_bytes, inodes)


def _set(fd: int, project: int, size_bytes: int, inodes: int) -> None:
    kib = -(-size_bytes // 1024)
    record = _QUOTA.pack(kib, kib, 0, inodes, inodes, 0, 0, 0, _LIMITS)
    check_syscall("quotactl_fd", _QUOTACTL_FD, fd, _SET, project, ctypes.c_char_p(record))


def _reason(error: OSError) -> str:
    if error.errno in (errno.ESRCH, errno.ENOTTY, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return "its file system has none"
    return error.strerror or str(error)
