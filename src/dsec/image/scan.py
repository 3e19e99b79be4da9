"""Walking a tree in a fixed order, and the digest that names a layer.

The digest covers what a sandbox can see of a layer, alone or above others: names, types, modes, owners, times, links,
attributes, content, what it hides of the layers below (whiteouts are character devices 0:0, opaque directories carry
trusted.overlay.opaque). It is the same for a staged directory and for the EROFS image made of it, so one is checked
against the other.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from dsec.core import limits
from dsec.core.errors import LimitError, StorageError
from dsec.storage.syscalls import RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV, openat2

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_INSIDE: Final = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV
_CHUNK_BYTES: Final = 1 << 20
_FORMAT: Final = b"dsec-tree-1\0"
OPAQUE_XATTR: Final = b"trusted.overlay.opaque"
_KEPT_XATTRS: Final = (OPAQUE_XATTR, b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry during a walk. `directory` is open only until the next step of the walk."""

    path: bytes  # relative; empty for the top
    directory: int
    name: bytes  # "." for the top
    info: os.stat_result


def walk(root: int) -> Iterator[Entry]:
    """Everything below the directory `root`, itself first, parents before children, names in byte order.

    Raises LimitError for a tree deeper than we take, StorageError for a mount point inside.
    """
    yield Entry(b"", root, b".", os.fstat(root))
    stack: list[tuple[int, bytes, Iterator[bytes]]] = [(root, b"", _names(root))]
    try:
        while stack:
            here, prefix, names = stack[-1]
            name = next(names, None)
            if name is None:
                stack.pop()
                if stack:
                    os.close(here)
                continue
            path = prefix + name
            info = os.stat(name, dir_fd=here, follow_symlinks=False)
            yield Entry(path, here, name, info)
            if stat.S_ISDIR(info.st_mode):
                if len(stack) > limits.IMAGE_DEPTH_MAX:
                    raise LimitError(f"a tree is deeper than {limits.IMAGE_DEPTH_MAX} directories")
                child = open_inside(here, name, _DIRECTORY)
                stack.append((child, path + b"/", _names(child)))
    finally:
        for fd, _, _ in stack[1:]:
            os.close(fd)


def open_inside(directory: int, name: bytes, flags: int) -> int:
    """Open a child, never through a link. Raises StorageError for a mount point, OSError otherwise."""
    try:
        return openat2(directory, name, flags | os.O_NOFOLLOW, resolve=_INSIDE)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise StorageError(f"a file system is mounted at {os.fsdecode(name)!r}") from error
        raise


@dataclass(frozen=True, slots=True)
class TreeDigest:
    digest: str  # sha256, hexadecimal
    entries: int
    content_bytes: int


def tree_digest(root: int, *, as_root: bool = False) -> TreeDigest:
    """`as_root` takes every owner as root: what a builder without privileges makes of it."""
    total = hashlib.sha256(_FORMAT)
    links: dict[int, bytes] = {}
    entries = content_bytes = 0
    for entry in walk(root):
        entries += 1
        info = entry.info
        if is_whiteout(info):  # the kernel gives them any time, mode and links
            _feed(total, b"whiteout", entry.path)
            continue
        first = entry.path
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            first = links.setdefault(info.st_ino, entry.path)
        if first != entry.path:
            _feed(total, b"link", entry.path, first)
            continue
        owner = b"0:0" if as_root else b"%d:%d" % (info.st_uid, info.st_gid)
        _feed(total, b"entry", entry.path, b"%o" % info.st_mode, owner, b"%d" % info.st_mtime_ns)
        if stat.S_ISREG(info.st_mode):
            fd = open_inside(entry.directory, entry.name, os.O_RDONLY)
            try:
                _feed_xattrs(total, fd)
                _feed(total, b"file", _content_digest(fd))
            finally:
                os.close(fd)
            content_bytes += info.st_size
        elif stat.S_ISLNK(info.st_mode):
            _feed(total, b"symlink", os.readlink(entry.name, dir_fd=entry.directory))
        elif stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
            _feed(total, b"device", b"%d:%d" % (os.major(info.st_rdev), os.minor(info.st_rdev)))
        elif stat.S_ISDIR(info.st_mode):
            fd = os.dup(entry.directory) if not entry.path else open_inside(entry.directory, entry.name, _DIRECTORY)
            try:
                _feed_xattrs(total, fd)
            finally:
                os.close(fd)
    return TreeDigest(total.hexdigest(), entries, content_bytes)


def is_whiteout(info: os.stat_result) -> bool:
    """The overlay's mark for "nothing here, whatever the layers below have"."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def kept_xattrs(fd: int) -> dict[bytes, bytes]:
    """The attributes of an open file that are part of a layer, in byte order."""
    names = sorted(os.fsencode(name) for name in os.listxattr(fd))
    return {name: os.getxattr(fd, name) for name in names if name.startswith(b"user.") or name in _KEPT_XATTRS}


def _names(fd: int) -> Iterator[bytes]:
    return iter(sorted(os.fsencode(name) for name in os.listdir(fd)))


def _content_digest(fd: int) -> bytes:
    digest = hashlib.sha256()
    while chunk := os.read(fd, _CHUNK_BYTES):
        digest.update(chunk)
    return digest.digest()


def _feed_xattrs(total: Any, fd: int) -> None:
    for name, value in kept_xattrs(fd).items():
        _feed(total, b"xattr", name, value)


def _feed(total: Any, *fields: bytes) -> None:
    # Lengths before contents: no two different trees give the same bytes.
    total.update(b"%d;" % len(fields) + b"".join(b"%d:" % len(field) + field for field in fields))
