"""Layers to a store, and from it: their metadata whole, their data to be read chunk by chunk later."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, TypeVar

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError, NotFoundError, StorageError, UnsupportedError
from dsec.core.units import format_size
from dsec.storage.layers import (
    INDEX_NAME,
    META_NAME,
    LayerKind,
    LayerLocation,
    LayerRecord,
    LayerStore,
    RemoteBlob,
    write_synced,
)
from dsec.storage.space import require_free
from dsec.storage.store import format
from dsec.storage.store.places import Place
from dsec.wire import codec

T = TypeVar("T")

_NO_INDEX: Final = format.ObjectRef(sha256="", size=0, stored=0)


def require_store(place: Place, *, make: bool = False) -> None:
    """Raises NotFoundError when there is no store (with `make` it is made), StorageError for one of another kind."""
    try:
        record = _record(place, "dsec-store.json", format.StoreRecord)
    except NotFoundError:
        if not make:
            raise NotFoundError(f"{place.url} is not a store", hint="make it by publishing to it") from None
        place.put("dsec-store.json", codec.to_json(format.StoreRecord()))
        return
    if record.version != format.STORE_VERSION:
        raise StorageError(f"{place.url} is a store of version {record.version}; this is {format.STORE_VERSION}")


def is_published(place: Place, digest: str) -> bool:
    try:
        place.size(format.manifest_path(digest))
    except NotFoundError:
        return False
    return True


def sealed_digest(layers: LayerStore, digest: str) -> str:
    """What a store calls a layer of this node. Reads all of it, unless it came from a store.

    Raises NotFoundError, StorageError, UnsupportedError for a layer that is kept as a directory.
    """
    layer = layers.get(digest)
    if layer.remote is not None:
        return digest
    if layer.kind is LayerKind.DIRECTORY:
        raise UnsupportedError(
            f"layer {digest[:12]} is no image and cannot be published", hint="it needs EROFS images: see `dsec doctor`"
        )
    size = layer.blob.stat().st_size if layer.blob is not None else 0
    if layer.blob is None or not size:
        return format.sealed(layer.meta.read_bytes(), None)
    return format.sealed(layer.meta.read_bytes(), _ref(size), format.hash_chunks(layer.blob))


def _ref(size: int, stored: int = 0, index: format.ObjectRef = _NO_INDEX) -> format.BlobRef:
    return format.BlobRef(size=size, chunk_size=format.CHUNK_BYTES, stored=stored, index=index)


def publish_layer(layers: LayerStore, digest: str, place: Place) -> format.LayerManifest:
    """Put a local layer into a store, data first and manifest last; there already is success.

    Raises UnsupportedError for a layer that is kept as a directory, and what the store raises.
    """
    require_store(place, make=True)
    name = sealed_digest(layers, digest)
    if is_published(place, name):
        return read_manifest(place, name)
    layer = layers.get(digest)
    if layer.remote is not None:
        raise UnsupportedError(
            f"the content of layer {digest[:12]} is in the store {layer.remote.store}, and not here",
            hint="push it from the node that built it",
        )
    record = layers.record(digest)
    return _publish(layers, name, layer.meta.read_bytes(), layer.blob, place, record.entries, record.created_at)


def publish_disk(layers: LayerStore, disk: Path, what: format.DiskMeta, place: Place) -> str:
    """As `publish_layer`, of a file that is no layer here. Its digest."""
    if disk.stat().st_size > limits.IMAGE_BYTES_MAX:
        raise LimitError(
            f"a disk in a store has at most {format_size(limits.IMAGE_BYTES_MAX)}, empty parts included",
            hint="a qcow2 has no empty parts: `qemu-img convert -O qcow2 IN OUT`, and import that",
        )
    require_store(place, make=True)
    meta = codec.to_json(what)
    name = format.sealed(meta, _ref(disk.stat().st_size), format.hash_chunks(disk))
    if not is_published(place, name):
        _publish(layers, name, meta, disk, place, 0, time.time())
    return name


def _publish(
    layers: LayerStore, name: str, meta: bytes, data: Path | None, place: Place, entries: int, created_at: float
) -> format.LayerManifest:
    blob = _publish_blob(layers, name, meta, data, place) if data is not None else None
    ref, packed = format.pack_object(meta)
    place.put(format.object_path("meta", ref.sha256), packed)
    manifest = format.LayerManifest(digest=name, entries=entries, created_at=created_at, meta=ref, blob=blob)
    place.put(format.manifest_path(name), codec.to_json(manifest))
    return manifest


def _publish_blob(layers: LayerStore, name: str, meta: bytes, blob: Path, place: Place) -> format.BlobRef | None:
    size = blob.stat().st_size
    if size == 0:
        return None
    require_free(layers.state, size)
    with layers.staging() as work:
        with (work / "data").open("xb") as data:
            cut = format.cut(blob, data)
        if format.sealed(meta, _ref(size), cut.index) != name:
            raise StorageError(f"the data of layer {name[:12]} has changed on the disk while it was read")
        place.put_file(format.object_path("data", name), work / "data")
    index, packed = format.pack_object(cut.index)
    place.put(format.object_path("index", index.sha256), packed)
    return _ref(size, cut.stored, index)


def read_manifest(place: Place, digest: str) -> format.LayerManifest:
    """Raises NotFoundError, or StorageError when it is not of this layer, or makes no sense."""
    manifest = _record(place, format.manifest_path(digest), format.LayerManifest)
    if manifest.digest != digest or manifest.version != format.STORE_VERSION:
        raise StorageError(f"the store {place.url} has another layer, or another version, under {digest[:12]}")
    format.check_manifest(manifest)
    return manifest


def _record(place: Place, path: str, type: type[T]) -> T:
    content = place.get(path)
    if len(content) > limits.STORE_RECORD_BYTES_MAX:
        raise StorageError(f"{path} of {place.url} has more than {limits.STORE_RECORD_BYTES_MAX} bytes")
    try:
        return codec.from_json(content, type)
    except InvalidArgumentError as error:
        raise StorageError(f"{path} of {place.url} is not understood: {error.message}") from error


def attach_layer(layers: LayerStore, digest: str, place: Place) -> LayerLocation:
    """Make a layer of a store usable here: metadata and index are fetched, and must be what `digest` is made of; so
    must the data be, when it is read. A layer that is here already is success.

    Raises NotFoundError, StorageError for what the digest does not name, and what the store raises.
    """
    try:
        return layers.get(digest)
    except NotFoundError:
        pass
    manifest = read_manifest(place, digest)
    with layers.staging() as work:
        staged = work / "layer"
        staged.mkdir()
        meta = format.unpack_object(manifest.meta, place.get(format.object_path("meta", manifest.meta.sha256)))
        write_synced(staged / META_NAME, meta)
        remote, index = None, b""
        size_bytes = len(meta)
        if (blob := manifest.blob) is not None:
            index = format.unpack_object(blob.index, place.get(format.object_path("index", blob.index.sha256)))
            format.check_index(index, blob)
        if format.sealed(meta, blob, index) != digest:
            raise StorageError(f"what the store {place.url} gives for layer {digest[:12]} is something else")
        if blob is not None:
            write_synced(staged / INDEX_NAME, index)
            size_bytes += len(index)
            remote = RemoteBlob(store=place.url, size=blob.size, chunk_size=blob.chunk_size, stored=blob.stored)
        record = LayerRecord(
            digest=digest,
            kind=LayerKind.EROFS if format.disk_meta(meta) is None else LayerKind.DISK,
            size_bytes=size_bytes,
            entries=manifest.entries,
            created_at=manifest.created_at,
            remote=remote,
            origin=place.url,
        )
        with layers.publishing():
            return layers.publish(staged, record)


def read_trace(place: Place, digest: str, chunk_size: int) -> tuple[int, ...]:
    """What a use of this layer wanted before, in order; empty when nobody has recorded one with these chunks."""
    try:
        record = _record(place, format.trace_path(digest), format.TraceRecord)
    except NotFoundError:
        return ()
    if (record.digest, record.chunk_size) != (digest, chunk_size):
        return ()
    return tuple(chunk for chunk in record.chunks if 0 <= chunk < format.CHUNKS_MAX)


def write_trace(place: Place, digest: str, chunk_size: int, chunks: tuple[int, ...]) -> None:
    record = format.TraceRecord(digest=digest, chunk_size=chunk_size, chunks=chunks)
    place.put(format.trace_path(digest), codec.to_json(record))
