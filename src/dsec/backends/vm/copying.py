"""Files of machines copied: what is empty stays so, blocks are shared where the file system can. All of it blocks.

What a monitor can write is opened without following links, and never waited for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.core.errors import DeadlineError, SandboxFaultError, StorageError
from dsec.core.faults import fault_point

PIECE_BYTES: Final = 1 << 20
_FICLONE: Final = 0x40049409  # ioctl_ficlone(2)
_HASHED_BYTES: Final = 64 * 1024
_EMPTY: Final = bytes(_HASHED_BYTES)


class Deadline:
    """For a machine that stands still meanwhile."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._until = time.monotonic() + within_s

    def check(self) -> None:
        """Raises DeadlineError."""
        if time.monotonic() > self._until:
            raise DeadlineError(
                f"what the machine has written could not be copied within {self._within_s:g} s",
                hint="pause it first: then it stands still anyway",
            )


def open_written(path: Path, *, owner: int, bytes_max: int) -> int:
    """A regular file that the monitor has written, for reading. Raises SandboxFaultError for anything else there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxFaultError(f"the machine's {path.name} cannot be read: {error.strerror}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != owner or found.st_blocks * 512 > bytes_max:
        os.close(fd)
        raise SandboxFaultError(f"the machine's {path.name} is not what it should be")
    return fd


def copy_file(source: int, target: Path, deadline: Deadline, *, mode: int = 0o444) -> int:
    """Of an open file into a new one. How many bytes were copied. Raises DeadlineError, StorageError."""
    with _writing(target):
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            copied = copy_into(source, fd, deadline)
            os.fchmod(fd, mode)
            return copied
        finally:
            os.close(fd)


def copy_into(source: int, target: int, deadline: Deadline) -> int:
    """Raises OSError, DeadlineError."""
    fault_point("vm.copy")
    size = os.fstat(source).st_size
    with contextlib.suppress(OSError):  # another file system, or one that cannot
        fcntl.ioctl(target, _FICLONE, source)
        return 0
    os.ftruncate(target, size)
    copied = 0
    for start, end in data_of(source, size):
        for at in range(start, end, PIECE_BYTES):
            deadline.check()
            piece = os.pread(source, min(PIECE_BYTES, end - at), at)
            if piece.count(0) != len(piece):
                _write(target, piece, at)
                copied += len(piece)
    return copied


def write_sparse(target: int, piece: bytes, at: int, *, over: bool) -> int:
    """How many bytes were written. `over`: something else may be there already."""
    if not over and piece.count(0) == len(piece):
        return 0
    _write(target, piece, at)
    return len(piece)


def data_of(fd: int, size: int, at: int = 0) -> Iterator[tuple[int, int]]:
    """Where something may be that is not zero, from `at` to `size`, as (start, end)."""
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        if start >= size:
            return
        at = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, at


def digest_of(path: Path) -> str:
    """Of its size and of what is not zero in it: holes do not count, whoever copied it. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.blake2b(f"{size}".encode(), digest_size=32)
        last = -1
        for start, end in data_of(file.fileno(), size):
            for number in range(start // _HASHED_BYTES, -(-end // _HASHED_BYTES)):
                if number <= last:
                    continue
                last = number
                piece = os.pread(file.fileno(), _HASHED_BYTES, number * _HASHED_BYTES)
                if piece != _EMPTY[: len(piece)]:
                    digest.update(b"%d:" % number + piece)
    return digest.hexdigest()


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def link_or_copy(source: Path, opened: int, target: Path, deadline: Deadline) -> int:
    """The file that is open, by a second name where that can be: `source` is a name that it may still have."""
    with contextlib.suppress(OSError):
        os.link(source, target, follow_symlinks=False)
        if os.path.samestat(target.stat(follow_symlinks=False), os.fstat(opened)):
            return 0
        target.unlink()
    return copy_file(opened, target, deadline)


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "the node's disk is full: `dsec gc` may make room" if full else None
        raise StorageError(f"{target.name} of a machine cannot be written: {error.strerror}", hint=hint) from error


def _write(target: int, piece: bytes, at: int) -> None:
    view = memoryview(piece)
    while view:
        count = os.pwrite(target, view, at)
        view, at = view[count:], at + count
