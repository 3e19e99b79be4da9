"""What the kernel is told of another process's memory (process_madvise(2))."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
from typing import Final

_SYS_PROCESS_MADVISE: Final = 440  # on all architectures
# Memory that is locked or a device's, and what was unmapped meanwhile.
_PASSED: Final = frozenset({errno.EINVAL, errno.ENOMEM})


class Advice(enum.IntEnum):
    WILLNEED = 3
    PAGEOUT = 21


class _Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def advise(pidfd: int, start: int, length: int, advice: Advice) -> None:
    """Raises OSError; not for memory of which nothing can be said."""
    part = _Part(start, length)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(_SYS_PROCESS_MADVISE, pidfd, ctypes.byref(part), ctypes.c_size_t(1), int(advice), 0)
    if done < 0 and (number := ctypes.get_errno()) not in _PASSED:
        raise OSError(number, os.strerror(number))
