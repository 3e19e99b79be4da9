"""Mounting EROFS images without a loop device and without a place in the mount table."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

from dsec.storage.syscalls import check_syscall

# The same numbers on every architecture.
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_CLOEXEC: Final = 1
_SET_FLAG: Final = 0
_SET_STRING: Final = 1
_CREATE: Final = 6
_RDONLY_NOSUID_NODEV_NOEXEC: Final = 0x1 | 0x2 | 0x4 | 0x8


def mount_erofs(meta: Path, blob: Path | None = None) -> int:
    """A detached read-only mount of an image, as a descriptor to its top. It ends when the descriptor is closed.

    Raises OSError: ENOTBLK when the kernel has no file-backed EROFS (before 6.12) or the file lies on tmpfs, ENODEV
    without EROFS, EPERM without privileges.
    """
    context = check_syscall("fsopen", _FSOPEN, ctypes.c_char_p(b"erofs"), _CLOEXEC)
    try:
        _configure(context, _SET_STRING, "source", os.fspath(meta))
        _configure(context, _SET_FLAG, "ro")
        if blob is not None:
            _configure(context, _SET_STRING, "device", os.fspath(blob))
        _configure(context, _CREATE)
        mount = check_syscall("fsmount", _FSMOUNT, context, _CLOEXEC, _RDONLY_NOSUID_NODEV_NOEXEC)
    finally:
        os.close(context)
    try:
        # The mount's own descriptor can only be walked from; this one can also be read, and holds the mount as well.
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
    finally:
        os.close(mount)


def _configure(context: int, command: int, key: str | None = None, value: str | None = None) -> None:
    check_syscall(
        "fsconfig",
        _FSCONFIG,
        context,
        command,
        ctypes.c_char_p(None if key is None else key.encode()),
        ctypes.c_char_p(None if value is None else os.fsencode(value)),
        0,
    )
