"""Several layers made into one that hides of those below exactly what they hide. Offline, blocking, needs root.

A run is collapsed where it lies: what the layers below it have decides which whiteouts and opaque directories stay, so
nothing that a sandbox sees changes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.core import limits
from dsec.core.errors import LimitError
from dsec.core.spec import Environment
from dsec.core.units import format_size
from dsec.image.collapsed import Run, run_key
from dsec.image.environments import EnvironmentStore
from dsec.image.make import Report, log, make_layer, progress
from dsec.image.scan import OPAQUE_XATTR, is_whiteout, kept_xattrs, open_inside
from dsec.image.stack import CannotStackError, open_layer
from dsec.storage.layers import LayerLocation
from dsec.storage.mounts import mount_overlay
from dsec.storage.space import require_free
from dsec.storage.syscalls import RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, openat2
from dsec.wire.environments import EnvironmentInfo
from dsec.wire.layers import CollapseRequest

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_INSIDE: Final = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS
_CHUNK_BYTES: Final = 1 << 20


def collapse_now(store: EnvironmentStore, request: CollapseRequest, report: Report) -> EnvironmentInfo:
    """Collapse what of an environment is worth it; done already is success. It is used from the next create on.

    Raises EnvironmentNotFoundError, LimitError, CannotStackError where nothing can be mounted, StorageError.
    """
    info = store.get(request.name)
    locked, lease = store.acquire(Environment(request.name), collapsed=False)
    with lease:
        digests = locked.digests()
        for start, end in plan_runs([size_of(store, layer) for layer in locked.layers]):
            layers = digests[:end]
            with store.layers.single_flight(run_key(layers, start)):
                if store.runs.find(layers, start) is not None:
                    continue
                _collapse(store, locked.layers[:end], start, report)
    return info


def size_of(store: EnvironmentStore, layer: LayerLocation) -> int | None:
    """Bytes on this disk; None for a layer whose content is elsewhere."""
    return None if layer.remote is not None else store.layers.record(layer.digest).size_bytes


def plan_runs(sizes: Sequence[int | None], bytes_max: int = limits.COLLAPSE_BYTES_MAX) -> list[tuple[int, int]]:
    """Which layers to make one, as (first, after last), lowest first. Pure.

    None for environments that have few. The highest layers change most often, and are left alone.
    """
    if len(sizes) <= limits.COLLAPSE_ABOVE:
        return []
    runs = []
    start = taken = 0
    end = len(sizes) - limits.COLLAPSE_KEPT
    for at, size in enumerate([*sizes[:end], None]):
        if size is None or taken + size > bytes_max:
            if at - start > 1:
                runs.append((start, at))
            start, taken = (at + 1, 0) if size is None else (at, size)
        else:
            taken += size
    return runs


def _collapse(store: EnvironmentStore, layers: tuple[LayerLocation, ...], start: int, report: Report) -> None:
    run = layers[start:]
    size = sum(store.layers.record(layer.digest).size_bytes for layer in run)
    progress(report, "collapse", f"making one layer of {len(run)}, {format_size(size)}")
    require_free(store.state, 2 * size)
    with store.layers.staging() as work, ExitStack() as opened:
        tops = [opened_top(layer, opened) for layer in reversed(run)]
        below = merged_below(layers[:start], opened)
        (work / "tree").mkdir(mode=0o755)
        Merge(tops, below, work / "tree").run()
        with make_layer(store.layers, work / "tree", work, report) as held, store.layers.publishing():
            digests = tuple(layer.digest for layer in layers)
            store.runs.put(Run(layers=digests, start=start, layer=held.digests[0]))
    log(report, f"{len(run)} layers are {held.digests[:1] or ''} now")


def merged_below(layers: Sequence[LayerLocation], opened: ExitStack) -> int | None:
    """One view of the layers below the run."""
    if not layers:
        return None
    try:
        top = mount_overlay([_handle(layer, opened) for layer in reversed(layers)])
    except OSError as error:
        raise CannotStackError(f"the layers below cannot be mounted: {error.strerror}") from error
    opened.callback(os.close, top)
    return top


def _handle(layer: LayerLocation, opened: ExitStack) -> int:
    fd = open_layer(layer)
    opened.callback(os.close, fd)
    return fd


def opened_top(layer: LayerLocation, opened: ExitStack) -> int:
    fd = os.open(".", _DIRECTORY, dir_fd=_handle(layer, opened))
    opened.callback(os.close, fd)
    return fd


@dataclass(slots=True)
class _Directory:
    """A directory of the result: which layers have a say in it, highest first, and whether those below the run do."""

    path: bytes
    layers: list[int]
    shows_below: bool
    opaque: bool = False
    children: list[_Directory] = field(default_factory=list)


class Merge:
    """Layers, highest first, into the empty directory `target`; `below` is the view of what lies under them.

    `blind`: nobody has looked what does, so all stays that may hide something of it.
    """

    def __init__(self, tops: Sequence[int], below: int | None, target: Path, *, blind: bool = False) -> None:
        self._tops = tops
        self._below = below
        self._target = target
        self._blind = blind
        self._links: dict[tuple[int, int], bytes] = {}
        self._made: list[_Directory] = []
        self._entries = 0

    def run(self) -> None:
        """Raises LimitError, or OSError when a layer cannot be read or the target not be written."""
        root = os.open(self._target, _DIRECTORY)
        try:
            left = [_Directory(b"", list(range(len(self._tops))), self._blind or self._below is not None)]
            while left:
                here = left.pop()
                self._made.append(here)
                left += self._fill(root, here)
            for made in reversed(self._made):  # filling a directory changes its time
                self._finish(root, made)
        finally:
            os.close(root)

    def _fill(self, root: int, here: _Directory) -> list[_Directory]:
        children = []
        with ExitStack() as opened:
            sources = {layer: self._enter(self._tops[layer], here.path, opened) for layer in here.layers}
            below = (
                self._enter(self._below, here.path, opened) if here.shows_below and self._below is not None else None
            )
            target = self._enter(root, here.path, opened)
            names: dict[bytes, list[int]] = {}
            for layer, fd in sources.items():
                for entry in os.listdir(fd):  # noqa: PTH208 - of a descriptor
                    names.setdefault(os.fsencode(entry), []).append(layer)
            for name in sorted(names):
                self._count()
                path = here.path + b"/" + name if here.path else name
                first = names[name][0]
                info = os.stat(name, dir_fd=sources[first], follow_symlinks=False)
                if is_whiteout(info):
                    if (self._blind and here.shows_below) or _stat(below, name) is not None:
                        os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
                elif stat.S_ISDIR(info.st_mode):
                    os.mkdir(name, 0o700, dir_fd=target)
                    under = _stat(below, name)
                    shows = here.shows_below if self._blind else under is not None and stat.S_ISDIR(under.st_mode)
                    children.append(_merged(path, name, [(layer, sources[layer]) for layer in names[name]], shows))
                else:
                    self._copy(root, target, path, name, info, first, sources[first])
        return children

    def _enter(self, top: int, path: bytes, opened: ExitStack) -> int:
        fd = openat2(top, path or b".", _DIRECTORY, resolve=_INSIDE)
        opened.callback(os.close, fd)
        return fd

    def _copy(
        self, root: int, target: int, path: bytes, name: bytes, info: os.stat_result, layer: int, source: int
    ) -> None:
        if info.st_nlink > 1:
            first = self._links.setdefault((layer, info.st_ino), path)
            if first != path:
                with _parent(root, first) as (there, other):
                    os.link(other, name, src_dir_fd=there, dst_dir_fd=target, follow_symlinks=False)
                return
        copy_entry(source, target, name, info)

    def _finish(self, root: int, made: _Directory) -> None:
        with ExitStack() as opened:
            source = self._enter(self._tops[made.layers[0]], made.path, opened)
            target = self._enter(root, made.path, opened)
            copy_attributes(source, target)
            if made.opaque:
                os.setxattr(target, OPAQUE_XATTR, b"y")
            info = os.fstat(source)
            os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))

    def _count(self) -> None:
        self._entries += 1
        if self._entries > limits.IMAGE_ENTRIES_MAX:
            raise LimitError(f"more than {limits.IMAGE_ENTRIES_MAX} entries in the collapsed layer")


def _merged(path: bytes, name: bytes, sources: list[tuple[int, int]], shows: bool) -> _Directory:
    """The directory `name` of the highest layer with those of lower ones that show through it; with `shows` also what
    lies below the run."""
    layers = []
    cut = False
    for layer, fd in sources:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode):  # something else lies there, or a whiteout: nothing shows from further down
            cut = True
            break
        layers.append(layer)
        if is_opaque(fd, name):
            cut = True
            break
    return _Directory(path, layers, shows_below=shows and not cut, opaque=shows and cut)


def is_opaque(directory: int, name: bytes) -> bool:
    """Whether a directory of a layer hides what lies below it."""
    fd = open_inside(directory, name, _DIRECTORY)
    try:
        return os.getxattr(fd, OPAQUE_XATTR) == b"y"
    except OSError:
        return False
    finally:
        os.close(fd)


def _stat(directory: int | None, name: bytes) -> os.stat_result | None:
    if directory is None:
        return None
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


@contextmanager
def _parent(root: int, path: bytes) -> Iterator[tuple[int, bytes]]:
    above, _, name = path.rpartition(b"/")
    fd = openat2(root, above or b".", _DIRECTORY, resolve=_INSIDE)
    try:
        yield fd, name
    finally:
        os.close(fd)


# ---- one entry -------------------------------------------------------------------------------------


def copy_entry(source: int, target: int, name: bytes, info: os.stat_result) -> None:
    """Copy what is no directory, with all that belongs to a layer."""
    if stat.S_ISREG(info.st_mode):
        _copy_file(source, target, name, info)
        return
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    else:
        os.mknod(name, info.st_mode, info.st_rdev, dir_fd=target)
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)
    os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)  # again: chown has cleared set-user-id bits
    os.utime(name, ns=(info.st_mtime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_file(source: int, target: int, name: bytes, info: os.stat_result) -> None:
    reading = open_inside(source, name, os.O_RDONLY)
    try:
        writing = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=target
        )
        try:
            _copy_content(reading, writing)
            copy_attributes(reading, writing)
            os.utime(writing, ns=(info.st_mtime_ns, info.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _copy_content(reading: int, writing: int) -> None:
    zeros = bytes(_CHUNK_BYTES)
    size = 0
    while chunk := os.read(reading, _CHUNK_BYTES):
        if chunk == zeros[: len(chunk)]:
            os.lseek(writing, len(chunk), os.SEEK_CUR)
        else:
            view = memoryview(chunk)
            while view:
                view = view[os.write(writing, view) :]
        size += len(chunk)
    os.ftruncate(writing, size)


def copy_attributes(source: int, target: int) -> None:
    """Owner, mode and attributes of an open file or directory, but no mark of the overlay."""
    info = os.fstat(source)
    os.fchown(target, info.st_uid, info.st_gid)
    os.fchmod(target, stat.S_IMODE(info.st_mode))
    for key, value in kept_xattrs(source).items():
        if key != OPAQUE_XATTR:
            os.setxattr(target, key, value)
