"""Removing and measuring trees that hostile code has made.

No recursion and no path is built: a tree may be deeper than PATH_MAX and wider than memory. Links are never followed,
and a file system mounted inside is never entered.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from dsec.core.errors import StorageError
from dsec.storage.syscalls import RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV, openat2

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_INSIDE: Final = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV
_DEPTH_MAX: Final = 64  # descriptors held while removing; deeper directories are first moved up to the top


@dataclass(frozen=True, slots=True)
class TreeSize:
    """What a tree takes: bytes as the disk counts them, hard links once, and directory entries."""

    disk_bytes: int = 0
    entries: int = 0


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove `path` and all below it; a missing path is fine.

    Raises StorageError when something cannot be removed (a mount point inside, a read-only file system); what could be
    removed before is gone, and a later call goes on from there.
    """
    target = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link in the last place
    try:
        parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        remove_entry(parent, os.fsencode(target.name))
    except OSError as error:
        raise StorageError(f"cannot remove {target}: {_reason(error)}") from error
    finally:
        os.close(parent)


def remove_entry(directory: int, name: bytes) -> None:
    """Remove the entry `name` of `directory`, whatever it is; a missing one is fine. Raises OSError."""
    try:
        os.unlink(name, dir_fd=directory)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):  # Linux says EISDIR, POSIX says EPERM
        pass
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), os.fsdecode(name))
    root = _open_directory(directory, name)
    try:
        _empty(root)
    finally:
        os.close(root)
    os.rmdir(name, dir_fd=directory)


def tree_size(path: str | os.PathLike[str]) -> TreeSize:
    """Sizes below `path`, itself included. What vanishes meanwhile is not counted. Raises StorageError."""
    seen: set[tuple[int, int]] = set()
    disk_bytes = entries = 0
    try:
        for info in _stats(path):
            entries += 1
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                if (info.st_dev, info.st_ino) in seen:
                    continue
                seen.add((info.st_dev, info.st_ino))
            disk_bytes += info.st_blocks * 512
    except OSError as error:
        raise StorageError(f"cannot measure {os.fspath(path)}: {_reason(error)}") from error
    return TreeSize(disk_bytes, entries)


class _Entries(Protocol):
    """What os.scandir gives; its class has no public name."""

    def __next__(self) -> os.DirEntry[str]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Level:
    fd: int
    name: bytes
    entries: _Entries


def _empty(root: int) -> None:
    while (seen := _sweep(root)) is not None:
        if seen.removed == 0:
            raise OSError(errno.ENOTEMPTY, f"{seen.blocked or 'an entry'} cannot be removed")


@dataclass(slots=True)
class _Sweep:
    removed: int = 0
    blocked: str | None = None


def _sweep(root: int) -> _Sweep | None:
    """One pass below `root`; None when there was nothing. What appears during a pass is left to the next one."""
    done = _Sweep()
    found = False
    stack = [_Level(root, b"", os.scandir(root))]
    try:
        while stack:
            level = stack[-1]
            entry = _next(level.entries)
            if entry is None:
                _leave(stack, done)
                continue
            found = True
            name = os.fsencode(entry.name)
            if not entry.is_dir(follow_symlinks=False):
                _unlink(level.fd, name, done)
            elif len(stack) < _DEPTH_MAX:
                _enter(stack, name)
            else:
                _move_up(level.fd, name, root, done)
    finally:
        for level in stack:
            level.entries.close()
        for level in stack[1:]:
            os.close(level.fd)
    return done if found else None


def _next(entries: _Entries) -> os.DirEntry[str] | None:
    try:
        return entries.__next__()
    except StopIteration:
        return None


def _enter(stack: list[_Level], name: bytes) -> None:
    try:
        fd = _open_directory(stack[-1].fd, name)
    except (FileNotFoundError, NotADirectoryError):
        return
    stack.append(_Level(fd, name, os.scandir(fd)))


def _leave(stack: list[_Level], done: _Sweep) -> None:
    level = stack.pop()
    if not stack:
        return
    os.close(level.fd)
    try:
        os.rmdir(level.name, dir_fd=stack[-1].fd)
        done.removed += 1
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        done.blocked = os.fsdecode(level.name)


def _unlink(directory: int, name: bytes, done: _Sweep) -> None:
    try:
        os.unlink(name, dir_fd=directory)
        done.removed += 1
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        done.blocked = os.fsdecode(name)  # replaced while we looked: the next pass sees what it is


def _move_up(directory: int, name: bytes, root: int, done: _Sweep) -> None:
    """Make a deep directory a child of the top, where the next pass finds it."""
    os.rename(name, f".removing-{secrets.token_hex(8)}", src_dir_fd=directory, dst_dir_fd=root)
    done.removed += 1


def _open_directory(directory: int, name: bytes) -> int:
    """Open a child directory, never through a link or into another mount; made writable for its owner."""
    if os.geteuid() != 0:
        _make_accessible(directory, name)
    try:
        return openat2(directory, name, _DIRECTORY, resolve=_INSIDE)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise OSError(errno.EBUSY, f"a file system is mounted at {os.fsdecode(name)}") from error
        raise


def _make_accessible(directory: int, name: bytes) -> None:
    fd = openat2(directory, name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, resolve=_INSIDE)
    try:
        if os.fstat(fd).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)  # noqa: PTH101 - fchmod refuses an O_PATH descriptor
    finally:
        os.close(fd)


@dataclass(slots=True)
class _Open:
    """A directory on the way down: who it is, and which of its directories are still to be visited."""

    key: tuple[int, int]
    pending: list[bytes]


def _stats(path: str | os.PathLike[str]) -> Iterator[os.stat_result]:
    """Depth first with one descriptor: going up is by "..", which must be where we came from."""
    top = Path(path).lstat()
    yield top
    if not stat.S_ISDIR(top.st_mode):
        return
    fd = os.open(path, _DIRECTORY | os.O_CLOEXEC)
    try:
        stack = [_Open(_key(fd), [])]
        yield from _list(fd, stack[-1].pending)
        while stack:
            if stack[-1].pending:
                child = _descend(fd, stack[-1].pending.pop())
                if child is None:
                    continue
                os.close(fd)
                fd = child
                stack.append(_Open(_key(fd), []))
                yield from _list(fd, stack[-1].pending)
                continue
            stack.pop()
            if stack:
                above = os.open("..", _DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
                os.close(fd)
                fd = above
                if _key(fd) != stack[-1].key:
                    raise OSError(errno.ESTALE, "the tree was moved while it was measured")
    finally:
        os.close(fd)


def _list(fd: int, directories: list[bytes]) -> Iterator[os.stat_result]:
    with os.scandir(fd) as entries:
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(info.st_mode):
                directories.append(os.fsencode(entry.name))
            yield info


def _descend(fd: int, name: bytes) -> int | None:
    try:
        return openat2(fd, name, _DIRECTORY, resolve=_INSIDE)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
            return None
        raise


def _key(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
