"""A tree being put together below one directory, from entries that may be hostile.

Names are resolved as inside a chroot (RESOLVE_IN_ROOT): a link to /etc or to ../../etc leads into the tree, never out
of it. Ownership, sizes, counts and depth are checked here, for every kind of source.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError, StorageError
from dsec.core.units import format_size
from dsec.image.scan import OPAQUE_XATTR
from dsec.storage.space import require_free
from dsec.storage.syscalls import RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS, openat2
from dsec.storage.trees import remove_entry
from dsec.wire.environments import Ownership

_IN_ROOT: Final = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
_CHUNK_BYTES: Final = 1 << 20
_SPACE_CHECK_BYTES: Final = 64 << 20
_NOBODY: Final = 65_534
TIME_S_MAX: Final = (1 << 34) - 1  # the year 2514: ext4 ends near it, and larger ones are lies


@dataclass(frozen=True, slots=True)
class Attributes:
    """What an entry has besides its content."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)


class Content(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(slots=True)
class Dropped:
    """What was left out, for one line of the log."""

    devices: int = 0
    sockets: int = 0
    xattrs: int = 0
    squashed: int = 0

    def __str__(self) -> str:
        words = [
            (self.devices, "device nodes left out"),
            (self.sockets, "sockets left out"),
            (self.xattrs, "extended attributes outside user.* left out"),
            (self.squashed, "entries with an owner that does not fit given to nobody"),
        ]
        return ", ".join(f"{count} {what}" for count, what in words if count)


class Stage:
    """Entries go below `root`; a later one replaces an earlier one of the same name. Call `finish` at the end."""

    def __init__(
        self,
        root: Path,
        *,
        owner: Ownership = Ownership.KEEP,
        bytes_max: int = limits.IMAGE_BYTES_MAX,
        entries_max: int = limits.IMAGE_ENTRIES_MAX,
        over: bool = False,
    ) -> None:
        """With `over`, `root` is the top of an overlay, and only what is put here makes its upper directory.

        Directories of the layers below that merely get other entries keep their times.
        """
        root.mkdir(mode=0o755, exist_ok=True)
        self.root = root
        self.dropped = Dropped()
        self.content_bytes = 0
        self.entries = 0
        self._owner = owner
        self._bytes_max = bytes_max
        self._entries_max = entries_max
        self._unchecked_bytes = 0
        self._privileged = os.geteuid() == 0
        self._fd = os.open(root, _DIRECTORY | os.O_CLOEXEC)
        # A directory's mode and time are set last: filling it changes the time, and needs it to be writable.
        self._directories: dict[bytes, Attributes] = {} if over else {b"": Attributes(0o755)}
        self._opaque: set[bytes] = set()
        self._over = over
        self._top = _place(self._fd)
        self._before: dict[bytes, int] = {}  # times of directories below that have been changed, by their true paths

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- entries ------------------------------------------------------------------------------

    def directory(self, path: bytes, attributes: Attributes) -> None:
        self._count(path)
        if path:
            with self._parent(path) as (parent, name):
                self._make_directory(parent, name)
        self._directories[path] = attributes

    def file(self, path: bytes, attributes: Attributes, content: Content) -> None:
        self._count(path)
        with self._parent(path) as (parent, name):
            remove_entry(parent, name)
            fd = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
            )
            try:
                self._write(fd, path, content)
                self._apply(fd, path, attributes)
            finally:
                os.close(fd)

    def symlink(self, path: bytes, target: bytes, attributes: Attributes) -> None:
        """`target` is kept as it is: inside a sandbox it can lead nowhere but into the sandbox."""
        self._count(path)
        if not target or b"\0" in target or len(target) > limits.PATH_BYTES_MAX:
            raise InvalidArgumentError(f"the link {_shown(path)} has an impossible target")
        with self._parent(path) as (parent, name):
            remove_entry(parent, name)
            os.symlink(target, name, dir_fd=parent)
            self._set_owner(
                path, attributes, lambda uid, gid: os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
            )
            os.utime(name, ns=_times(attributes), dir_fd=parent, follow_symlinks=False)

    def fifo(self, path: bytes, attributes: Attributes) -> None:
        self._count(path)
        with self._parent(path) as (parent, name):
            remove_entry(parent, name)
            os.mkfifo(name, 0o600, dir_fd=parent)
            self._set_owner(
                path, attributes, lambda uid, gid: os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
            )
            os.chmod(name, stat.S_IMODE(attributes.mode), dir_fd=parent)
            os.utime(name, ns=_times(attributes), dir_fd=parent, follow_symlinks=False)

    def hardlink(self, path: bytes, target: bytes) -> None:
        """Raises InvalidArgumentError when `target` is not there, or is a directory."""
        self._count(path)
        if path == target:
            return
        with self._parent(target, make=False) as (source, source_name), self._parent(path) as (parent, name):
            try:
                there = os.stat(source_name, dir_fd=source, follow_symlinks=False)
                if stat.S_ISDIR(there.st_mode):
                    raise InvalidArgumentError(f"{_shown(path)} is a hard link to the directory {_shown(target)}")
                if _same_entry(parent, name, there):
                    return
                remove_entry(parent, name)
                os.link(source_name, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                raise InvalidArgumentError(
                    f"{_shown(path)} is a hard link to {_shown(target)}, which is not in the archive before it"
                ) from None

    def has(self, path: bytes) -> bool:
        """Whether there is such an entry, whatever it is."""
        try:
            with self._parent(path, make=False) as (parent, name):
                os.stat(name, dir_fd=parent, follow_symlinks=False)
        except (InvalidArgumentError, FileNotFoundError):
            return False
        return True

    def whiteout(self, path: bytes) -> None:
        """Hide `path` of the layers below: for a stage that becomes a layer above others."""
        self._count(path)
        with self._parent(path) as (parent, name):
            remove_entry(parent, name)
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=parent)
            os.utime(name, ns=(0, 0), dir_fd=parent, follow_symlinks=False)

    def opaque(self, path: bytes) -> None:
        """Hide what the layers below have in the directory `path`, which is made if need be. Needs root."""
        with self._parent(path) as (parent, name):
            self._make_directory(parent, name)
        self._directories.setdefault(path, Attributes(0o755))
        self._opaque.add(path)

    def remove(self, path: bytes) -> None:
        """Remove an entry of an earlier layer; a missing one is fine."""
        try:
            with self._parent(path, make=False) as (parent, name):
                remove_entry(parent, name)
        except InvalidArgumentError:
            return

    def clear(self, path: bytes) -> None:
        """Remove what is in a directory of an earlier layer; a missing one is fine."""
        try:
            fd = openat2(self._fd, path or b".", _DIRECTORY, resolve=_IN_ROOT)
        except OSError:
            return
        try:
            place = self._true_path(fd)
            if self._over and place:
                self._make_opaque(place, fd)
                return
            self._note(fd)
            for name in os.listdir(fd):  # noqa: PTH208 - of a descriptor
                remove_entry(fd, os.fsencode(name))
        finally:
            os.close(fd)

    def _make_opaque(self, path: bytes, fd: int) -> None:
        """Removed and made again, as one whole to hide what is below, and not entry by entry."""
        info = os.fstat(fd)
        xattrs = {os.fsencode(name): os.getxattr(fd, name) for name in os.listxattr(fd) if name.startswith("user.")}
        with self._parent(path) as (parent, name):
            remove_entry(parent, name)
            os.mkdir(name, 0o700, dir_fd=parent)
        # Changed by this layer already, it has the time of before; named by it, all is known of it.
        mtime_ns = self._before.get(path, info.st_mtime_ns)
        known = Attributes(stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, mtime_ns, xattrs)
        self._directories.setdefault(path, known)

    def finish(self) -> None:
        """Give the directories their owners, modes and times."""
        # Longest first: a directory that its owner may not enter hides those inside from a builder who is not root.
        for path in sorted(self._directories, key=len, reverse=True):
            try:
                fd = openat2(self._fd, path or b".", _DIRECTORY | os.O_NOFOLLOW, resolve=_IN_ROOT)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    continue  # gone again, or replaced by an entry of another kind
                raise
            try:
                if path in self._opaque:
                    os.setxattr(fd, OPAQUE_XATTR, b"y")
                self._apply(fd, path, self._directories[path])
                self._before.pop(self._true_path(fd), None)
            finally:
                os.close(fd)
        for place, mtime_ns in self._before.items():
            self._restore(place, mtime_ns)

    def _restore(self, place: bytes, mtime_ns: int) -> None:
        """The time that a directory has in the layers below, if it has changed since, and is still there."""
        try:
            fd = openat2(self._fd, place or b".", _DIRECTORY | os.O_NOFOLLOW, resolve=_IN_ROOT)
        except OSError:
            return
        try:
            if os.fstat(fd).st_mtime_ns != mtime_ns:
                os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)

    def _note(self, fd: int) -> None:
        """Before something in the directory `fd` changes."""
        if self._over:
            self._before.setdefault(self._true_path(fd), os.fstat(fd).st_mtime_ns)

    def _true_path(self, fd: int) -> bytes:
        """From the top, without links."""
        return _place(fd).removeprefix(self._top).lstrip(b"/")

    # ---- helpers ------------------------------------------------------------------------------

    def _count(self, path: bytes) -> None:
        if len(path) > limits.IMAGE_PATH_BYTES_MAX:
            raise LimitError(
                f"the path {_shown(path)}… has {len(path)} bytes; the most is {limits.IMAGE_PATH_BYTES_MAX}"
            )
        if path.count(b"/") >= limits.IMAGE_DEPTH_MAX:
            raise LimitError(f"{_shown(path)}… is deeper than {limits.IMAGE_DEPTH_MAX} directories")
        self.entries += 1
        if self.entries > self._entries_max:
            raise LimitError(f"more than {self._entries_max} entries", hint="an environment is made of fewer files")

    def _parent(self, path: bytes, *, make: bool = True) -> _Parent:
        directory, _, name = path.rpartition(b"/")
        if not name or name in (b".", b"..") or len(name) > limits.NAME_BYTES_MAX:
            raise InvalidArgumentError(f"{_shown(path)} is not a name that a file can have")
        fd = self._open_directory(directory, path, make=make)
        self._note(fd)
        return _Parent(fd, name)

    def _open_directory(self, directory: bytes, path: bytes, *, make: bool) -> int:
        try:
            return openat2(self._fd, directory or b".", _DIRECTORY, resolve=_IN_ROOT)
        except OSError as error:
            if error.errno == errno.ENOENT and make:
                return self._make_parents(directory)
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                raise InvalidArgumentError(f"{_shown(path)} lies in something that is no directory") from error
            raise

    def _make_parents(self, directory: bytes) -> int:
        """Parents that the source does not mention, mode 755. Each is resolved afresh: it may be a link."""
        above, _, name = directory.rpartition(b"/")
        parent = self._open_directory(above, directory, make=True)
        try:
            self._note(parent)
            try:
                os.mkdir(name, 0o755, dir_fd=parent)
            except FileExistsError:  # a link that leads nowhere
                raise InvalidArgumentError(f"{_shown(directory)} is not a directory, and has files below it") from None
            self._count(directory)
            self._directories[directory] = Attributes(0o755)
            return openat2(parent, name, _DIRECTORY | os.O_NOFOLLOW, resolve=_IN_ROOT)
        finally:
            os.close(parent)

    def _make_directory(self, parent: int, name: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                remove_entry(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)

    def _write(self, fd: int, path: bytes, content: Content) -> None:
        size = 0
        while chunk := content.read(_CHUNK_BYTES):
            size += len(chunk)
            self.take_bytes(len(chunk), path)
            if chunk.count(0) == len(chunk):
                os.lseek(fd, len(chunk), os.SEEK_CUR)  # a hole: an archive of zeros takes no room here
            else:
                _write_all(fd, chunk)
        os.ftruncate(fd, size)

    def take_bytes(self, count: int, path: bytes) -> None:
        """Count content against the bounds. Raises LimitError or CapacityError."""
        self.content_bytes += count
        self._unchecked_bytes += count
        if self.content_bytes > self._bytes_max:
            raise LimitError(f"more than {format_size(self._bytes_max)} of content, at {_shown(path)}")
        if self._unchecked_bytes >= _SPACE_CHECK_BYTES:
            self._unchecked_bytes = 0
            require_free(self.root)

    def _apply(self, fd: int, path: bytes, attributes: Attributes) -> None:
        # The owner first: chown clears the set-user-id bits that chmod then sets.
        self._set_owner(path, attributes, lambda uid, gid: os.fchown(fd, uid, gid))
        os.fchmod(fd, stat.S_IMODE(attributes.mode))
        self._set_xattrs(fd, path, attributes.xattrs)
        os.utime(fd, ns=_times(attributes))

    def _set_owner(self, path: bytes, attributes: Attributes, chown: _Chown) -> None:
        uid, gid = self.owner_of(path, attributes.uid, attributes.gid)
        if self._privileged:
            chown(uid, gid)

    def owner_of(self, path: bytes, uid: int, gid: int) -> tuple[int, int]:
        """The ids that an entry gets. Raises InvalidArgumentError when the source's do not fit and must be kept."""
        if self._owner is Ownership.ROOT:
            return 0, 0
        if 0 <= uid <= limits.IMAGE_ID_MAX and 0 <= gid <= limits.IMAGE_ID_MAX:
            return uid, gid
        if self._owner is Ownership.KEEP:
            raise InvalidArgumentError(
                f"{_shown(path)} belongs to {uid}:{gid}, and a sandbox has no ids above {limits.IMAGE_ID_MAX}",
                hint='build with owner "squash" to give such files to nobody, or "root" to give all files to root',
            )
        self.dropped.squashed += 1
        return (uid if 0 <= uid <= limits.IMAGE_ID_MAX else _NOBODY), (
            gid if 0 <= gid <= limits.IMAGE_ID_MAX else _NOBODY
        )

    def _set_xattrs(self, fd: int, path: bytes, xattrs: Mapping[bytes, bytes]) -> None:
        kept = dict(self.kept_xattrs(xattrs.items()))
        if sum(len(name) + len(value) for name, value in kept.items()) > limits.IMAGE_XATTRS_BYTES_MAX:
            raise LimitError(
                f"the extended attributes of {_shown(path)} are over {limits.IMAGE_XATTRS_BYTES_MAX} bytes"
            )
        for name, value in kept.items():
            try:
                os.setxattr(fd, name, value)
            except OSError as error:
                raise StorageError(f"cannot set {name!r} of {_shown(path)}: {error.strerror}") from error

    def kept_xattrs(self, xattrs: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
        # trusted.overlay.* of a layer would steer the overlay; security.* belongs to the host's modules.
        for name, value in xattrs:
            if name.startswith(b"user.") and len(name) > 5:
                yield name, value
            else:
                self.dropped.xattrs += 1


class _Chown(Protocol):
    def __call__(self, uid: int, gid: int, /) -> None: ...


class _Parent:
    """The open directory of an entry and the entry's name in it, for a `with`."""

    def __init__(self, fd: int, name: bytes) -> None:
        self._fd = fd
        self._name = name

    def __enter__(self) -> tuple[int, bytes]:
        return self._fd, self._name

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _place(fd: int) -> bytes:
    return os.fsencode(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115 - one call, for every entry


def _same_entry(directory: int, name: bytes, other: os.stat_result) -> bool:
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (info.st_dev, info.st_ino) == (other.st_dev, other.st_ino)


def _times(attributes: Attributes) -> tuple[int, int]:
    mtime_ns = min(max(attributes.mtime_ns, 0), TIME_S_MAX * 1_000_000_000)
    return mtime_ns, mtime_ns


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _shown(path: bytes) -> str:
    return repr(os.fsdecode(path[:200]))
