"""Locks between processes: flock(2), which the kernel lets go when the holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock file `path`; waits as long as it takes. An exclusive holder removes the file when it is done."""
    fd = _locked(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        if not shared:
            path.unlink(missing_ok=True)
        os.close(fd)


def sweep_lock(path: Path) -> None:
    """Remove the lock file of a holder that died; one that is held stays."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if try_lock(fd) and is_same(fd, path):
            path.unlink()
    finally:
        os.close(fd)


def _locked(path: Path, how: int) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            if is_same(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        # The holder before us removed the file: a lock on it would exclude nobody.
        os.close(fd)


def is_same(fd: int, path: Path) -> bool:
    """Whether `path` still names what `fd` has open."""
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file or directory if nobody holds it against us; held until `fd` is closed."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
