"""The layers of an image one by one: each is unpacked over those below it, and is a layer of its own.

The kernel's overlay says what a layer means: links of lower layers are followed, hidden entries become whiteouts,
directories that a layer does not mention stay as they are below. A layer is the same for every image that has it above
the same others, and is made once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from dsec.core import limits
from dsec.core.errors import NotFoundError, StorageError
from dsec.image.environments import EnvironmentStore
from dsec.image.make import Report, log, make_layer, progress
from dsec.image.recipes import RECIPE_VERSION
from dsec.image.records import BuildRecord, stack_layers
from dsec.image.scan import OPAQUE_XATTR, kept_xattrs
from dsec.image.stage import Stage
from dsec.image.upper import clean_upper
from dsec.storage.layers import LayerKind, LayerLocation, LayerStore, Lease
from dsec.storage.mounts import detached_erofs, mount_overlay
from dsec.storage.trees import remove_tree
from dsec.wire.environments import Ownership

_TREE: Final = "tree"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class LayerArchive(Protocol):
    """One layer of an image as its source has it."""

    @property
    def digest(self) -> str:
        """Names the bytes of the archive."""
        ...

    def unpack(self, stage: Stage, *, lowest: bool) -> None:
        """Raises InvalidArgumentError or LimitError. The lowest layer has nothing to hide."""
        ...


class CannotStackError(StorageError):
    """A layer cannot be unpacked over others here; an image can only become one layer."""


@dataclass(slots=True)
class Unpacking:
    """What layers of one image are made with, and what they have taken so far."""

    store: EnvironmentStore
    owner: Ownership
    work: Path
    report: Report
    refresh: bool = False
    bytes_left: int = limits.IMAGE_BYTES_MAX
    entries_left: int = limits.IMAGE_ENTRIES_MAX


def unpack_stack(unpacking: Unpacking, archives: Sequence[LayerArchive]) -> Lease:
    """A layer for each archive, lowest first; held, and named by nobody yet.

    Raises CannotStackError, and what the archives and the store raise.
    """
    layers = unpacking.store.layers
    key = ""
    below: tuple[str, ...] = ()
    with ExitStack() as held:
        for number, archive in enumerate(archives, 1):
            progress(unpacking.report, "stage", f"layer {number} of {len(archives)}, {archive.digest[:19]}")
            key = _layer_key(unpacking.owner, archive.digest, key)
            with layers.single_flight(key):
                lease = None if unpacking.refresh else _known(unpacking.store, key)
                if lease is None:
                    lease = _make(unpacking, archive, key, below)
            held.enter_context(lease)
            below = stack_layers([below, lease.digests])
        return layers.lease(below)


def known_stack(store: EnvironmentStore, owner: Ownership, digests: Sequence[str]) -> tuple[int, Lease]:
    """How many of an image's layers are here from the lowest on, without need of their archives; these are held."""
    found: list[str] = []
    key, count = "", 0
    for digest in digests:
        key = _layer_key(owner, digest, key)
        lease = _known(store, key)
        if lease is None:
            break
        with lease:
            found += lease.digests
        count += 1
    try:
        return count, store.layers.lease(found)
    except NotFoundError:
        return 0, store.layers.lease(())


def _layer_key(owner: Ownership, digest: str, below: str) -> str:
    """Names what an archive makes above others; `below` is the key of the next lower one."""
    return hashlib.sha256(f"oci-layer {RECIPE_VERSION} {owner} {digest} over {below}".encode()).hexdigest()


def _known(store: EnvironmentStore, key: str) -> Lease | None:
    known = store.built(key)
    if known is None:
        return None
    try:
        return store.layers.lease(known.layers)
    except NotFoundError:
        return None


def _make(unpacking: Unpacking, archive: LayerArchive, key: str, below: tuple[str, ...]) -> Lease:
    store, report = unpacking.store, unpacking.report
    place = unpacking.work / key[:16]
    place.mkdir()
    try:
        if below:
            entries = _unpack_over(unpacking, archive, below, place)
        else:
            entries = _unpack(unpacking, archive, place / _TREE, over=False)
        if below and entries <= 1:
            return store.layers.lease(())  # nothing but the top: it changes nothing
        lease = make_layer(store.layers, place / _TREE, place, report)
        with store.layers.publishing():
            store.put_built(key, BuildRecord(layers=lease.digests, source=f"layer {archive.digest}"))
        return lease
    finally:
        remove_tree(place)


def _unpack(unpacking: Unpacking, archive: LayerArchive, root: Path, *, over: bool) -> int:
    with Stage(
        root,
        owner=unpacking.owner,
        bytes_max=unpacking.bytes_left,
        entries_max=unpacking.entries_left,
        over=over,
    ) as stage:
        archive.unpack(stage, lowest=not over)
        stage.finish()
    unpacking.bytes_left -= stage.content_bytes
    unpacking.entries_left -= stage.entries
    if dropped := str(stage.dropped):
        log(unpacking.report, dropped)
    return stage.entries + 1


def _unpack_over(unpacking: Unpacking, archive: LayerArchive, below: tuple[str, ...], place: Path) -> int:
    with over(unpacking.store.layers, below, place) as root:
        _unpack(unpacking, archive, root, over=True)
    return clean_upper(place / _TREE)


@contextmanager
def over(layers: LayerStore, below: Sequence[str], place: Path) -> Iterator[Path]:
    """An overlay of layers (lowest first) for the time of the `with`; what is written is in `place`/tree afterwards.

    Raises CannotStackError.
    """
    upper, work = place / _TREE, place / "overlay"
    upper.mkdir()
    work.mkdir()
    with ExitStack() as opened:
        lowers = []
        for digest in reversed(below):
            lowers.append(open_layer(layers.get(digest)))
            opened.callback(os.close, lowers[-1])
        try:
            _copy_top(lowers[0], upper)
            top = mount_overlay(lowers, upper, work)
        except OSError as error:
            raise CannotStackError(f"no overlay can be mounted in {place}: {error.strerror}") from error
        opened.callback(os.close, top)
        yield Path(f"/proc/self/fd/{top}")


def open_layer(layer: LayerLocation) -> int:
    """The top of a layer, as a descriptor to walk from. Raises CannotStackError for one whose content is in a store."""
    if layer.remote is not None:
        raise CannotStackError(f"the content of layer {layer.digest[:12]} is in a store")
    try:
        if layer.kind is LayerKind.DIRECTORY:
            return os.open(layer.meta, _DIRECTORY)
        return detached_erofs(layer.meta, layer.blob)
    except OSError as error:
        raise CannotStackError(f"layer {layer.digest[:12]} cannot be mounted: {error.strerror}") from error


def _copy_top(lower: int, upper: Path) -> None:
    """The top of an overlay is its upper's: without a word of the layer it stays what it was."""
    below = os.open(".", _DIRECTORY, dir_fd=lower)
    fd = os.open(upper, _DIRECTORY)
    try:
        info = os.fstat(below)
        if os.geteuid() == 0:
            os.fchown(fd, info.st_uid, info.st_gid)
        os.fchmod(fd, info.st_mode & 0o7777)
        for name, value in kept_xattrs(below).items():
            if name != OPAQUE_XATTR:
                os.setxattr(fd, name, value)
        os.utime(fd, ns=(info.st_mtime_ns, info.st_mtime_ns))
    finally:
        os.close(below)
        os.close(fd)
