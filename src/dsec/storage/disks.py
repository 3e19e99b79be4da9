"""Disks of machines as layers: kept, published and loaded on demand as those of environments are. Blocking."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.core import limits
from dsec.core.errors import LimitError, NotFoundError, StorageError, UnsupportedError
from dsec.core.units import format_size
from dsec.storage.layers import (
    BLOB_NAME,
    META_NAME,
    LayerKind,
    LayerRecord,
    LayerStore,
    Lease,
    write_synced,
)
from dsec.storage.remote import RemoteLayers
from dsec.storage.space import require_free
from dsec.storage.store import format
from dsec.storage.store.places import Place, WebPlace, open_place
from dsec.storage.store.publish import attach_layer, publish_disk, publish_layer, require_store
from dsec.wire import codec

_ATTACHES: Final = 3  # tries to hold a layer that is removed again at the same moment
_COPY_S: Final = 3_600


@dataclass(frozen=True, slots=True)
class DiskLayers:
    layers: LayerStore
    remote: RemoteLayers

    def add(self, file: Path, what: format.DiskMeta) -> Lease:
        """The file itself, which is below a staging directory, becomes a layer. It is held until the lease is released;
        the same content twice is one layer. Raises StorageError, LimitError."""
        meta = codec.to_json(what)
        with self.layers.staging() as work:
            staged = work / "layer"
            staged.mkdir()
            blob = staged / BLOB_NAME
            if file.stat().st_size > limits.IMAGE_BYTES_MAX:
                raise LimitError(f"a layer of a disk has at most {format_size(limits.IMAGE_BYTES_MAX)}")
            file.rename(blob)
            blob.chmod(0o444)
            os.chown(blob, os.geteuid(), os.getegid())
            ref = format.BlobRef(size=blob.stat().st_size, chunk_size=format.CHUNK_BYTES, stored=0, index=_NO_INDEX)
            digest = format.sealed(meta, ref, format.hash_chunks(blob))
            write_synced(staged / META_NAME, meta)
            record = LayerRecord(
                digest=digest,
                kind=LayerKind.DISK,
                size_bytes=blob.stat().st_blocks * 512,
                entries=0,
                created_at=time.time(),
            )
            with self.layers.publishing():
                self.layers.publish(staged, record)
                return self.layers.lease([digest])

    def what(self, digest: str) -> format.DiskMeta:
        """Raises NotFoundError, StorageError for what is no disk."""
        layer = self.layers.get(digest)
        found = format.disk_meta(layer.meta.read_bytes()) if layer.kind is LayerKind.DISK else None
        if found is None:
            raise StorageError(f"layer {digest[:12]} is no disk of a machine")
        return found

    def file(self, digest: str) -> Path:
        """What a monitor reads of it: of one from a store, a file that is filled as it is read. Raises as
        `RemoteLayers.serve` does."""
        layer = self.layers.get(digest)
        if layer.remote is not None:
            return Path(self.remote.serve(layer))
        assert layer.blob is not None
        return layer.blob

    # ---- stores ----------------------------------------------------------------------------------

    def store(self, url: str, *, write: bool = False) -> Place:
        """Raises ForbiddenError, NotFoundError, UnsupportedError for one that cannot be written."""
        self.remote.trusted.check(url)
        place = open_place(url)
        if write and isinstance(place, WebPlace):
            raise UnsupportedError(
                f"the store {place.url} is read only", hint="push to the directory or bucket that the web server serves"
            )
        require_store(place, make=write)
        return place

    def push(self, digest: str, place: Place) -> None:
        """What is there already is left as it is."""
        publish_layer(self.layers, digest, place)

    def push_file(self, file: Path, what: format.DiskMeta, place: Place) -> str:
        """The digest of the layer that it is there."""
        return publish_disk(self.layers, file, what, place)

    @contextmanager
    def attached(self, digests: tuple[str, ...], place: Place) -> Iterator[None]:
        """They are here, and stay, while the block runs; their content is in the store."""
        with ExitStack() as held:
            for digest in digests:
                held.enter_context(self._attach(digest, place))
            yield

    def _attach(self, digest: str, place: Place) -> Lease:
        for _ in range(_ATTACHES):
            attach_layer(self.layers, digest, place)
            try:
                return self.layers.lease([digest])
            except NotFoundError:
                continue  # collected in between: nothing names it yet
        raise StorageError(f"layer {digest[:12]} is removed as soon as it is here", hint="ask again")


_NO_INDEX: Final = format.ObjectRef(sha256="", size=0, stored=0)


def copy_file(source: Path, target: Path) -> None:
    """Of a regular file in anybody's directory. Blocks are shared where the file system can; holes stay holes.

    Raises StorageError, CapacityError.
    """
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"the disk cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError("the disk is no regular file")
        require_free(target.parent, found.st_blocks * 512)
        _copy(fd, target)
    finally:
        os.close(fd)


def _copy(fd: int, target: Path) -> None:
    command = ["cp", "--reflink=auto", "--sparse=auto", f"/proc/self/fd/{fd}", str(target)]
    try:
        subprocess.run(
            command, check=True, capture_output=True, timeout=_COPY_S, stdin=subprocess.DEVNULL, pass_fds=(fd,)
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()[-300:]
        raise StorageError(f"the disk could not be copied: {said}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"the disk could not be copied: {error}") from error
    target.chmod(0o600)
