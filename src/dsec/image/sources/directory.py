"""A directory of this machine, copied."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Final

from dsec.core.errors import DsecError, InvalidArgumentError, StorageError
from dsec.image.recipes import RECIPE_VERSION
from dsec.image.scan import Entry, open_inside, tree_digest, walk
from dsec.image.stage import Attributes, Stage
from dsec.storage.space import FULL, store_full
from dsec.wire.environments import DirectorySource

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def build_key(source: DirectorySource) -> str:
    """Names the content as it is now. It is read in full; the copy may still differ, if someone writes meanwhile."""
    root = _open(source.path)
    try:
        digest = tree_digest(root).digest
    except OSError as error:
        raise _unreadable(source.path, error) from error
    finally:
        os.close(root)
    return hashlib.sha256(f"directory {RECIPE_VERSION} {source.owner} {digest}".encode()).hexdigest()


def fill(source: DirectorySource, stage: Stage) -> None:
    """Raises InvalidArgumentError for what an environment cannot hold."""
    root = _open(source.path)
    links: dict[tuple[int, int], bytes] = {}
    try:
        for entry in walk(root):
            _copy(entry, stage, links)
    except OSError as error:
        raise _unreadable(source.path, error) from error
    finally:
        os.close(root)


def _copy(entry: Entry, stage: Stage, links: dict[tuple[int, int], bytes]) -> None:
    info = entry.info
    if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
        stage.dropped.devices += 1
        return
    if stat.S_ISSOCK(info.st_mode):
        stage.dropped.sockets += 1
        return
    if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
        first = links.setdefault((info.st_dev, info.st_ino), entry.path)
        if first != entry.path:
            stage.hardlink(entry.path, first)
            return
    plain = Attributes(stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns)
    if stat.S_ISLNK(info.st_mode):
        stage.symlink(entry.path, os.readlink(entry.name, dir_fd=entry.directory), plain)
    elif stat.S_ISFIFO(info.st_mode):
        stage.fifo(entry.path, plain)
    elif stat.S_ISDIR(info.st_mode):
        fd = os.dup(entry.directory) if not entry.path else open_inside(entry.directory, entry.name, os.O_RDONLY)
        try:
            stage.directory(entry.path, _attributes(fd, plain))
        finally:
            os.close(fd)
    else:
        _copy_file(entry, stage, plain)


def _copy_file(entry: Entry, stage: Stage, plain: Attributes) -> None:
    # O_NONBLOCK: what was a file a moment ago may be a FIFO by now, and would block for ever.
    fd = open_inside(entry.directory, entry.name, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb", buffering=0) as content:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ESTALE, "it changed while it was read")
        stage.file(entry.path, _attributes(fd, plain), content)


def _attributes(fd: int, plain: Attributes) -> Attributes:
    xattrs = {os.fsencode(name): os.getxattr(fd, name) for name in os.listxattr(fd)}
    return Attributes(plain.mode, plain.uid, plain.gid, plain.mtime_ns, xattrs)


def _open(path: str) -> int:
    try:
        return os.open(path, _DIRECTORY)
    except OSError as error:
        raise InvalidArgumentError(f"cannot open the directory {path!r}: {error.strerror}") from error


def _unreadable(path: str, error: OSError) -> DsecError:
    if error.errno in FULL:
        return store_full()  # of the copy: nothing is written to the source
    if error.errno in (errno.EIO, errno.EROFS):
        return StorageError(f"cannot copy {path!r}: {error.strerror}")
    return InvalidArgumentError(
        f"cannot copy {path!r}: {error.strerror or error}", hint="it must hold still while it is read"
    )


def contains(source: DirectorySource, state: Path) -> bool:
    """Whether the store lies inside the source: it would be copied into itself without end."""
    return Path(source.path).resolve() in (state.resolve(), *state.resolve().parents)
