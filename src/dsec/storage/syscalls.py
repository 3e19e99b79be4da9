"""System calls that Python 3.11 does not offer."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10

_TMPFS_MAGIC: Final = 0x01021994
_OPENAT2: Final = 437  # the same number on every architecture
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_CLONE_NEWNET: Final = 0x40000000
_AGAIN_MAX: Final = 16  # EAGAIN: a rename went on while the kernel looked at ".."

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def openat2(directory: int, path: bytes, flags: int, *, resolve: int, mode: int = 0) -> int:
    """open(2) relative to `directory` under the rules `resolve`. The descriptor closes on exec. Raises OSError."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    for _ in range(_AGAIN_MAX):
        fd = _libc.syscall(
            ctypes.c_long(_OPENAT2), directory, ctypes.c_char_p(path), ctypes.byref(how), ctypes.sizeof(how)
        )
        if fd >= 0:
            return int(fd)
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), os.fsdecode(path))


def exchange(one: os.PathLike[str], other: os.PathLike[str]) -> None:
    """Each has the other's name when this returns; at no time is there none of either. Raises OSError."""
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(one))


def syncfs(fd: int) -> None:
    """Everything written to the file system of `fd` is on the disk when this returns. Raises OSError."""
    if _libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_in_memory(fd: int) -> bool:
    """Whether an open file lies on a tmpfs. Raises OSError."""
    found = ctypes.create_string_buffer(256)  # struct statfs; its first word is the type
    if _libc.fstatfs(fd, found) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return ctypes.c_long.from_buffer(found).value == _TMPFS_MAGIC


def check_syscall(name: str, number: int, *arguments: object) -> int:
    """A raw system call. Raises OSError that carries `name`."""
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return int(result)


def enter_network(namespace: int) -> None:
    """This thread, and no other, is in the network of the descriptor from now on. Raises OSError."""
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def leave_network() -> None:
    """This thread, and no other, is in a network of its own from now on, which has nothing but a loopback that is down.
    Raises OSError."""
    if _libc.unshare(_CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
