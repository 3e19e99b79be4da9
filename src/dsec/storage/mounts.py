"""Mounting EROFS images, and overlays of trees, without a loop device and without a place in the mount table."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
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
_NOSUID_NODEV_NOEXEC: Final = 0x2 | 0x4 | 0x8
_RDONLY_NOSUID_NODEV_NOEXEC: Final = 0x1 | _NOSUID_NODEV_NOEXEC
# Nothing in an upper directory that only this kernel, or only above these lowers, understands.
_PLAIN: Final = {"xino": "off", "index": "off", "metacopy": "off", "redirect_dir": "off"}


def mount_erofs(meta: Path, blob: Path | None = None) -> int:
    """A detached read-only mount of an image, as a descriptor to its top. It ends when the descriptor is closed.

    Raises OSError: ENOTBLK when the kernel has no file-backed EROFS (before 6.12) or the file lies on tmpfs, ENODEV
    without EROFS, EPERM without privileges.
    """
    return _top(detached_erofs(meta, blob))


def detached_erofs(meta: Path, blob: Path | None = None) -> int:
    """As `mount_erofs`, by the mount's own descriptor: good for walking from, and as a lower of an overlay."""
    context = check_syscall("fsopen", _FSOPEN, ctypes.c_char_p(b"erofs"), _CLOEXEC)
    try:
        _configure(context, _SET_STRING, "source", os.fspath(meta))
        _configure(context, _SET_FLAG, "ro")
        if blob is not None:
            _configure(context, _SET_STRING, "device", os.fspath(blob))
        return _create(context, _RDONLY_NOSUID_NODEV_NOEXEC)
    finally:
        os.close(context)


def mount_overlay(lowers: Sequence[int], upper: Path | None = None, work: Path | None = None) -> int:
    """A detached overlay of open directories, highest first, as a descriptor to its top; it holds them.

    Read-only without `upper` and `work`, which are empty directories of one file system. What is written is in `upper`
    when the descriptor is closed. Raises OSError: EINVAL for file systems that cannot be an upper, EPERM without
    privileges.
    """
    if upper is None and len(lowers) == 1:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=lowers[0])  # the kernel wants two
    context = check_syscall("fsopen", _FSOPEN, ctypes.c_char_p(b"overlay"), _CLOEXEC)
    try:
        for lower in lowers:
            _configure(context, _SET_STRING, "lowerdir+", f"/proc/self/fd/{lower}")
        if upper is not None and work is not None:
            _configure(context, _SET_STRING, "upperdir", os.fspath(upper))
            _configure(context, _SET_STRING, "workdir", os.fspath(work))
            _configure(context, _SET_FLAG, "volatile")
        for key, value in _PLAIN.items():
            _configure(context, _SET_STRING, key, value)
        mount = _create(context, _NOSUID_NODEV_NOEXEC if upper is not None else _RDONLY_NOSUID_NODEV_NOEXEC)
    finally:
        os.close(context)
    return _top(mount)


def _create(context: int, attributes: int) -> int:
    _configure(context, _CREATE)
    return check_syscall("fsmount", _FSMOUNT, context, _CLOEXEC, attributes)


def _top(mount: int) -> int:
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
