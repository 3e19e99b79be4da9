"""A copy of a tree that hostile code goes on changing, taken in passes; the last one, while it stands still, is short.

Each pass lists the whole tree and copies the content of what it has not copied before. A copy is good for as long as
the change time of its inode stays what it was: every change sets it, with two exceptions that passes look out for.

* A change within the clock's tick after the copy. So what was changed at about the time of a pass is copied again.
* A page that is mapped for writing sets it once, when it is first written to. So `Mapped` names what may be mapped.

`build` makes the tree of the last pass, from copies alone. Ids are as the source's file system has them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from dsec.core import limits
from dsec.core.errors import CapacityError, DeadlineError, LimitError, Outcome, StorageError
from dsec.core.units import format_size
from dsec.storage.space import require_free
from dsec.storage.syscalls import RESOLVE_BENEATH, RESOLVE_IN_ROOT, RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV, openat2

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # should it have become a pipe: nobody waits for its writer
_INSIDE: Final = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV
_FICLONE: Final = 0x40049409
_TICK_NS: Final = 100_000_000  # ten of the slowest clocks that kernels stamp inodes with
_CHUNK_BYTES: Final = 4 << 20
_SPACE_CHECK_BYTES: Final = 64 << 20
_DEADLINE_EVERY: Final = 64  # items
_NOBODY: Final = 65_534
_SET_IDS: Final = stat.S_ISUID | stat.S_ISGID
_OPAQUE: Final = "trusted.overlay.opaque"
_KEPT: Final = (_OPAQUE, "security.capability", "system.posix_acl_access", "system.posix_acl_default")
_INCOMPLETE: Final = ("trusted.overlay.metacopy", "trusted.overlay.redirect")
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE)


@dataclass(frozen=True, slots=True)
class Mapped:
    """Files that may be mapped for writing, by paths from the tree's top. `sure` False: there may be others."""

    paths: Collection[bytes] = ()
    sure: bool = True


@dataclass(slots=True)
class Pass:
    """What a pass has done."""

    entries: int = 0
    copied_files: int = 0
    copied_bytes: int = 0
    content_bytes: int = 0  # of all files, holes included


class _Item(NamedTuple):
    """One entry; parents come before what is in them."""

    depth: int
    name: bytes
    mode: int
    ino: int
    uid: int
    gid: int
    mtime_ns: int
    target: bytes | None
    xattrs: dict[str, bytes] | None


@dataclass(slots=True)
class _Known:
    """Of an inode, as of the pass that copied it."""

    ctime_ns: int
    size: int
    mode: int
    good: bool
    target: bytes | None = None
    xattrs: dict[str, bytes] | None = None


@dataclass(slots=True)
class Dropped:
    """What a layer cannot hold. Told, never silent."""

    devices: int = 0
    squashed: int = 0  # owners that a sandbox has no id for

    def __str__(self) -> str:
        parts = [(self.devices, "device nodes left out"), (self.squashed, "owners above 65534 became nobody")]
        return "; ".join(f"{number} {what}" for number, what in parts if number)


@dataclass(slots=True)
class Mirror:
    """`source` is a descriptor of the tree's top, `place` a directory of ours that is not there yet."""

    source: int
    place: Path
    trust_times: bool = True  # False: a file system whose mapped files never change their times (tmpfs)
    emptied: Collection[bytes] = ()  # directories right below the top that are kept without what is in them
    dropped: Dropped = field(default_factory=Dropped)
    _known: dict[int, _Known] = field(default_factory=dict)
    _items: list[_Item] = field(default_factory=list)
    _reflinks: bool = True
    _unchecked_bytes: int = 0
    _clocks: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.place.mkdir(mode=0o700)
        (self.place / "pool").mkdir(mode=0o700)

    # ---- passes -------------------------------------------------------------------------------

    def look(self, mapped: Mapped) -> Pass:
        """A pass while everything may change; what goes away meanwhile is left to the next."""
        if not self.trust_times:
            return Pass()  # nothing copied now could be believed
        began_ns = self._now_ns()
        doubted = self._resolved(mapped.paths) if mapped.sure else None
        return self._pass(began_ns, doubted, exact=False, deadline_s=None)

    def take(self, *, within_s: float) -> Pass:
        """The last pass: nothing changes meanwhile. Raises DeadlineError, StorageError when something did change."""
        self._check_clocks()
        return self._pass(None, frozenset(), exact=True, deadline_s=time.monotonic() + within_s)

    def _pass(
        self, began_ns: int | None, doubted: frozenset[int] | None, *, exact: bool, deadline_s: float | None
    ) -> Pass:
        """`doubted`: inodes whose copies are not to be believed; None: all."""
        done = Pass()
        self._items = []
        self.dropped = Dropped()
        pool = os.open(self.place / "pool", _DIRECTORY | os.O_CLOEXEC)
        seen: set[int] = set()
        try:
            for directory, depth, name, info in self._walk(exact):
                done.entries += 1
                if done.entries > limits.IMAGE_ENTRIES_MAX:
                    raise LimitError(f"the sandbox has written more than {limits.IMAGE_ENTRIES_MAX} files")
                if deadline_s is not None and done.entries % _DEADLINE_EVERY == 0:
                    _check_deadline(deadline_s)
                mode, ino = info.st_mode, info.st_ino
                if ino not in seen:
                    seen.add(ino)
                    if stat.S_ISREG(mode):
                        done.content_bytes += info.st_size
                        if done.content_bytes > limits.IMAGE_BYTES_MAX:
                            raise LimitError(f"the sandbox has written more than {format_size(limits.IMAGE_BYTES_MAX)}")
                    hot = doubted is None or ino in doubted
                    hot = hot or (began_ns is not None and info.st_ctime_ns >= began_ns - _TICK_NS)
                    try:
                        self._learn(directory, depth, name, info, pool, done, deadline_s, good=not hot)
                    except OSError as error:
                        if exact or error.errno not in _GONE:
                            raise
                        continue
                known = self._known.get(ino)
                if known is None:  # another of its names went away before it was copied
                    continue
                uid, gid = info.st_uid, info.st_gid
                if uid > limits.IMAGE_ID_MAX or gid > limits.IMAGE_ID_MAX:
                    uid, gid, mode = self._squashed(uid, gid, mode)
                self._items.append(
                    _Item(depth, name, mode, ino, uid, gid, info.st_mtime_ns, known.target, known.xattrs)
                )
            self._forget(seen, pool)
        finally:
            os.close(pool)
        return done

    def _learn(
        self,
        directory: int,
        depth: int,
        name: bytes,
        info: os.stat_result,
        pool: int,
        done: Pass,
        deadline_s: float | None,
        *,
        good: bool,
    ) -> None:
        known = self._known.get(info.st_ino)
        key = (info.st_ctime_ns, info.st_size, info.st_mode)
        if known is not None and known.good and (known.ctime_ns, known.size, known.mode) == key:
            known.good = good
            return
        self._known.pop(info.st_ino, None)
        fresh = _Known(*key, good=good)
        if stat.S_ISREG(info.st_mode):
            fd = _open(directory, name, _FILE)
            try:
                if not _is(fd, info):
                    raise OSError(errno.ESTALE, "replaced meanwhile")
                fresh.xattrs = _xattrs(fd, name)
                self._copy(fd, b"%d" % info.st_ino, pool, info.st_size, deadline_s)
            finally:
                os.close(fd)
            done.copied_files += 1
            done.copied_bytes += info.st_size
        elif stat.S_ISDIR(info.st_mode):
            fd = os.dup(directory) if not depth else _open(directory, name, _DIRECTORY)
            try:
                fresh.xattrs = _xattrs(fd, name)
            finally:
                os.close(fd)
            if fresh.xattrs and self._is_emptied(depth, name):
                fresh.xattrs.pop(_OPAQUE, None)  # what is below shows again, as in a fresh sandbox
        elif stat.S_ISLNK(info.st_mode):
            fresh.target = os.readlink(name, dir_fd=directory)
        self._known[info.st_ino] = fresh

    def _squashed(self, uid: int, gid: int, mode: int) -> tuple[int, int, int]:
        """A sandbox has no ids above 65,534 for files: a set-user-id file of the agent's id would be the agent."""
        self.dropped.squashed += 1
        return (
            uid if uid <= limits.IMAGE_ID_MAX else _NOBODY,
            gid if gid <= limits.IMAGE_ID_MAX else _NOBODY,
            mode & ~_SET_IDS,
        )

    def _walk(self, exact: bool) -> Iterator[tuple[int, int, bytes, os.stat_result]]:
        """(open directory, depth, name, what stat says), the top first. Descriptors are good until the next step."""
        yield self.source, 0, b"", os.fstat(self.source)
        stack: list[tuple[int, Iterator[os.DirEntry[str]]]] = [(self.source, _entries(self.source))]
        try:
            while stack:
                here, entries = stack[-1]
                entry = next(entries, None)
                if entry is None:
                    stack.pop()
                    if stack:
                        os.close(here)
                    continue
                name = os.fsencode(entry.name)
                try:
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode) and not self._is_emptied(len(stack), name):
                        child = self._enter(here, name, len(stack))
                        stack.append((child, iter(())))
                        yield here, len(stack) - 1, name, info
                        stack[-1] = (child, _entries(child))
                        continue
                except OSError as error:
                    if exact or error.errno not in _GONE:
                        raise
                    continue
                if (stat.S_ISCHR(info.st_mode) and info.st_rdev != 0) or stat.S_ISBLK(info.st_mode):
                    self.dropped.devices += 1
                    continue
                yield here, len(stack), name, info
        finally:
            for fd, _ in stack[1:]:
                os.close(fd)

    def _is_emptied(self, depth: int, name: bytes) -> bool:
        return depth == 1 and name in self.emptied

    def _enter(self, here: int, name: bytes, depth: int) -> int:
        if depth > limits.IMAGE_DEPTH_MAX:
            raise LimitError(f"the sandbox has written directories deeper than {limits.IMAGE_DEPTH_MAX}")
        return _open(here, name, _DIRECTORY)

    def _forget(self, seen: set[int], pool: int) -> None:
        """Copies of what is there no more."""
        for ino in self._known.keys() - seen:
            if stat.S_ISREG(self._known.pop(ino).mode):
                os.unlink(b"%d" % ino, dir_fd=pool)

    # ---- what may not be believed -------------------------------------------------------------

    def _resolved(self, paths: Collection[bytes]) -> frozenset[int] | None:
        """Inodes of the mapped files; None when one of them is not where it should be."""
        found: set[int] = set()
        for path in paths:
            try:
                fd = openat2(self.source, path.lstrip(b"/"), os.O_PATH | os.O_NOFOLLOW, resolve=RESOLVE_IN_ROOT)
            except OSError:
                return None
            found.add(os.fstat(fd).st_ino)
            os.close(fd)
        return frozenset(found)

    def _now_ns(self) -> int:
        self._check_clocks()
        self._clocks = (time.time_ns(), time.monotonic_ns())
        return self._clocks[0]

    def _check_clocks(self) -> None:
        """After a step of the clock change times tell nothing: all is copied anew."""
        if self._clocks is None:
            return
        wall, steady = self._clocks
        if abs((time.time_ns() - wall) - (time.monotonic_ns() - steady)) > _TICK_NS // 2:
            for known in self._known.values():
                known.good = False

    # ---- content ------------------------------------------------------------------------------

    def _copy(self, source: int, name: bytes, pool: int, size: int, deadline_s: float | None) -> None:
        """Holes stay holes. Raises CapacityError before the disk is full."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=pool)
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=pool)
        try:
            if size and not self._cloned(source, target):
                self._copy_extents(source, target, size, deadline_s)
            os.ftruncate(target, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full() from error
            raise
        finally:
            os.close(target)

    def _cloned(self, source: int, target: int) -> bool:
        if self._reflinks:
            try:
                fcntl.ioctl(target, _FICLONE, source)
                return True
            except OSError:
                self._reflinks = False
        return False

    def _copy_extents(self, source: int, target: int, size: int, deadline_s: float | None) -> None:
        offset = 0
        while offset < size:
            try:
                start = os.lseek(source, offset, os.SEEK_DATA)
                end = min(os.lseek(source, start, os.SEEK_HOLE), size)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole is left
                    return
                raise
            while start < end:
                if deadline_s is not None:
                    _check_deadline(deadline_s)
                count = _copy_range(source, target, start, min(_CHUNK_BYTES, end - start))
                if count == 0:  # it became shorter meanwhile
                    return
                start += count
                self._take_space(count)
            offset = max(end, offset + 1)

    def _take_space(self, count: int) -> None:
        self._unchecked_bytes += count
        if self._unchecked_bytes >= _SPACE_CHECK_BYTES:
            self._unchecked_bytes = 0
            require_free(self.place)

    # ---- the tree -----------------------------------------------------------------------------

    def build(self) -> Path:
        """`place/tree` as the last pass saw it. Copies are moved there: no pass may follow."""
        require_free(self.place)
        tree = self.place / "tree"
        try:
            tree.mkdir(mode=0o700)
            pool = os.open(self.place / "pool", _DIRECTORY | os.O_CLOEXEC)
            try:
                self._build(os.open(tree, _DIRECTORY | os.O_CLOEXEC), pool)
            finally:
                os.close(pool)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full() from error
            raise StorageError(f"the copy of the sandbox's files cannot be made: {error.strerror}") from error
        return tree

    def _build(self, top: int, pool: int) -> None:
        stack: list[tuple[int, _Item]] = [(top, self._items[0])]
        placed: set[int] = set()
        try:
            for item in self._items[1:]:
                while len(stack) > item.depth:
                    _finish(*stack.pop())
                here = stack[-1][0]
                if stat.S_ISDIR(item.mode):
                    os.mkdir(item.name, 0o700, dir_fd=here)
                    stack.append((_open(here, item.name, _DIRECTORY), item))
                elif stat.S_ISREG(item.mode):
                    os.link(b"%d" % item.ino, item.name, src_dir_fd=pool, dst_dir_fd=here, follow_symlinks=False)
                    if item.ino not in placed:
                        placed.add(item.ino)
                        _finish(os.open(item.name, _FILE | os.O_CLOEXEC, dir_fd=here), item)
                else:
                    _make_special(here, item)
            while stack:
                _finish(*stack.pop())
        finally:
            for fd, _ in stack:
                os.close(fd)
        for ino in placed:
            os.unlink(b"%d" % ino, dir_fd=pool)


def _make_special(here: int, item: _Item) -> None:
    """A symbolic link, a pipe, a socket, or the overlay's mark for what is hidden (a character device 0:0)."""
    if stat.S_ISLNK(item.mode):
        os.symlink(item.target or b"", item.name, dir_fd=here)
    else:
        os.mknod(item.name, stat.S_IFMT(item.mode) | 0o600, dir_fd=here)
        os.chmod(item.name, stat.S_IMODE(item.mode), dir_fd=here)
    os.chown(item.name, item.uid, item.gid, dir_fd=here, follow_symlinks=False)
    if not stat.S_ISLNK(item.mode) and item.mode & _SET_IDS:
        os.chmod(item.name, stat.S_IMODE(item.mode), dir_fd=here)  # which a change of owner takes away
    os.utime(item.name, ns=(item.mtime_ns, item.mtime_ns), dir_fd=here, follow_symlinks=False)


def _finish(fd: int, item: _Item) -> None:
    """Attributes of a file or directory whose content is there; closes it."""
    try:
        # The owner first: chown takes away set-user-id bits and capabilities.
        os.fchown(fd, item.uid, item.gid)
        os.fchmod(fd, stat.S_IMODE(item.mode))
        for name, value in (item.xattrs or {}).items():
            os.setxattr(fd, name, value)
        os.utime(fd, ns=(item.mtime_ns, item.mtime_ns))
    finally:
        os.close(fd)


def _entries(fd: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(fd) as entries:
        yield from entries


def _open(directory: int, name: bytes, flags: int) -> int:
    try:
        return openat2(directory, name, flags, resolve=_INSIDE)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise StorageError(f"a file system is mounted at {os.fsdecode(name)!r}") from error
        raise


def _is(fd: int, info: os.stat_result) -> bool:
    found = os.fstat(fd)
    return (found.st_ino, stat.S_IFMT(found.st_mode)) == (info.st_ino, stat.S_IFMT(info.st_mode))


def _xattrs(fd: int, name: bytes) -> dict[str, bytes] | None:
    """Those that are part of a layer. Raises StorageError for marks of an upper that is no whole layer."""
    names = os.listxattr(fd)
    if not names:
        return None
    for found in names:
        if found in _INCOMPLETE:
            raise StorageError(f"{os.fsdecode(name)!r} is not whole: it carries {found}")
    kept = {
        found: os.getxattr(fd, found)
        for found in sorted(names)
        if found in _KEPT or (found.startswith("user.") and len(found) > 5)
    }
    if sum(len(key) + len(value) for key, value in kept.items()) > limits.IMAGE_XATTRS_BYTES_MAX:
        raise LimitError(
            f"the extended attributes of {os.fsdecode(name)!r} are over {limits.IMAGE_XATTRS_BYTES_MAX} bytes"
        )
    return kept or None


def _copy_range(source: int, target: int, offset: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, count, offset, offset)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    data = os.pread(source, count, offset)
    written = 0
    while written < len(data):
        written += os.pwrite(target, data[written:], offset + written)
    return len(data)


def _check_deadline(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise DeadlineError(
            "the sandbox changes more than can be copied while it stands still",
            outcome=Outcome.UNCHANGED,
            hint="let it do less meanwhile, pause it first, or raise snapshot_freeze_s",
        )


def _full() -> CapacityError:
    return CapacityError("the disk of the node is full", hint="remove snapshots or environments, or make room")
