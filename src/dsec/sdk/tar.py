"""A directory becomes a tar stream (pax), in constant memory."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.core.errors import ConflictError, InvalidArgumentError

_BLOCK: Final = 512
_PIECE_BYTES: Final = 256 << 10


def tar_chunks(root: Path) -> Iterator[bytes]:
    """The content of `root`, not `root` itself, in pieces of about 256 KiB. Owners become root: ids differ inside.

    Sockets, FIFOs and devices are left out; symbolic links are kept as they are and never followed.
    """
    if not root.is_dir():
        raise InvalidArgumentError(f"{root} is not a directory")
    buffer = bytearray()
    for piece in _members(root):
        buffer += piece
        if len(buffer) >= _PIECE_BYTES:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer) + bytes(2 * _BLOCK)


def _members(root: Path) -> Iterator[bytes]:
    linked: dict[tuple[int, int], str] = {}  # names already sent of files that have several
    pending = [""]
    while pending:
        directory = pending.pop()
        with os.scandir(root / directory) as entries:
            found = sorted(entries, key=lambda e: e.name)
        for entry in found:
            name = f"{directory}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                pending.append(f"{name}/")
            yield from _member(Path(entry.path), name, linked)


def _member(path: Path, name: str, linked: dict[tuple[int, int], str]) -> Iterator[bytes]:
    status = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode = stat.S_IMODE(status.st_mode)
    seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
    info.mtime = seconds
    if nanoseconds and seconds >= 0:
        info.pax_headers = {"mtime": f"{seconds}.{nanoseconds:09}"}
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        yield _header(info)
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
        yield _header(info)
    elif stat.S_ISREG(status.st_mode):
        inode = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and inode in linked:
            info.type, info.linkname = tarfile.LNKTYPE, linked[inode]
            yield _header(info)
            return
        if status.st_nlink > 1:
            linked[inode] = name
        yield from _content(path, info)


def _content(path: Path, info: tarfile.TarInfo) -> Iterator[bytes]:
    # Size and content come from one descriptor: what is there now, whatever happens to the name.
    # Non-blocking, for what has become a FIFO since it was looked at.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        info.size = os.fstat(descriptor).st_size
        yield _header(info)
        left = info.size
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ConflictError(f"{path} became shorter while it was being read")
            left -= len(piece)
            yield piece
    yield bytes(-info.size % _BLOCK)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
