"""Where a file system puts the directories of a directory: apart, for what has nothing to do with each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from typing import Final

_GETFLAGS: Final = 0x80086601  # FS_IOC_GETFLAGS
_SETFLAGS: Final = 0x40086602  # FS_IOC_SETFLAGS
_TOPDIR: Final = 0x00020000  # FS_TOPDIR_FL: ext4(5), chattr(1) "T"
_FLAGS: Final = struct.Struct("i")  # whatever the numbers above say, the kernel takes an int


def spread_children(directory: str | os.PathLike[str]) -> None:
    """On ext4, each directory made in `directory` comes into a block group of its own.

    Together they would share one, and there ext4 without a journal looks at every inode that was deleted in the last
    minutes before it takes the next: where sandboxes come and go, that is a millisecond of each create. Elsewhere, and
    where it is refused, nothing happens. Raises OSError when the directory cannot be opened.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            (flags,) = _FLAGS.unpack(fcntl.ioctl(fd, _GETFLAGS, bytes(_FLAGS.size)))
            if not flags & _TOPDIR:
                fcntl.ioctl(fd, _SETFLAGS, _FLAGS.pack(flags | _TOPDIR))
    finally:
        os.close(fd)
