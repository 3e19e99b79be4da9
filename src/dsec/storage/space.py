"""Room on the disk: a store never fills the file system of its node."""

from __future__ import annotations

import errno
import os
from typing import Final

from dsec.core.errors import CapacityError
from dsec.core.limits import DISK_FREE_BYTES_MIN
from dsec.core.units import format_size

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def store_full() -> CapacityError:
    """What FULL means where layers are made."""
    return CapacityError("the disk of the store is full", hint="remove environments or make room")


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that an ordinary writer may still take on the file system of `path`."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def require_free(
    path: str | os.PathLike[str], need_bytes: int = 0, *, reserve_bytes: int = DISK_FREE_BYTES_MIN
) -> None:
    """Raises CapacityError unless `need_bytes` can be written and `reserve_bytes` stay free."""
    free = free_bytes(path)
    if free - need_bytes < reserve_bytes:
        raise CapacityError(
            f"the disk of {os.fspath(path)} has {format_size(free)} free, and {format_size(need_bytes)} are needed",
            hint=f"{format_size(reserve_bytes)} are always kept free; remove environments or make room",
        )
