"""Making a layer of what an overlay has written: its upper directory, without what only that overlay understands."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from dsec.image.scan import OPAQUE_XATTR, is_whiteout, open_inside, walk

_PREFIX: Final = "trusted.overlay."
_ORIGIN: Final = "trusted.overlay.origin"  # empty: somewhere else; the kernel then looks for whiteouts
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def clean_upper(top: Path) -> int:
    """Take the overlay's notes (where something was copied from, …) off the tree `top`; how many entries it has.

    What hides something stays: whiteouts, and trusted.overlay.opaque of directories. The overlay must be unmounted.
    """
    entries = 0
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in walk(root):
            entries += 1
            info = entry.info
            if stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode):
                fd = open_inside(entry.directory, entry.name, _DIRECTORY if stat.S_ISDIR(info.st_mode) else os.O_RDONLY)
                try:
                    _clean(fd, stat.S_ISDIR(info.st_mode))
                finally:
                    os.close(fd)
            elif is_whiteout(info):
                os.utime(entry.name, ns=(0, 0), dir_fd=entry.directory, follow_symlinks=False)
    finally:
        os.close(root)
    return entries


def mark_whiteouts(top: Path) -> None:
    """So that whiteouts show nowhere, also in a directory that no other layer has: as mkfs.erofs does. Needs root."""
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in walk(root):
            if is_whiteout(entry.info):
                os.setxattr(entry.directory, _ORIGIN, b"")
    finally:
        os.close(root)


def _clean(fd: int, directory: bool) -> None:
    for name in os.listxattr(fd):
        if not name.startswith(_PREFIX):
            continue
        if directory and os.fsencode(name) == OPAQUE_XATTR and os.getxattr(fd, name) == b"y":
            continue
        os.removexattr(fd, name)
