"""The records of a store, and the cutting of a blob into chunks that can be fetched one by one."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import blake3
import msgspec
import zstandard

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, StorageError
from dsec.wire import codec

STORE_VERSION: Final = 1
CHUNK_BYTES: Final = 256 << 10
CHUNKS_MAX: Final = 4 << 20  # of one layer; more is no number of a chunk
_CHUNK_BYTES_MIN: Final = 4 << 10  # as native/loader/src/index.rs has them
_CHUNK_BYTES_MAX: Final = 4 << 20
_LEVEL: Final = 3
DISK_FORMATS: Final = ("raw", "qcow2")
_DISK_BEGINS: Final = b'{"dsec_disk":'
_RECORD: Final = struct.Struct("<QII32s")  # as native/loader/src/index.rs reads it
_SEALED: Final = struct.Struct("<QI")
_THREADS: Final = 4
_AHEAD: Final = 32  # chunks in memory while they are compressed


class StoreRecord(msgspec.Struct, frozen=True):
    """`dsec-store.json`: what makes a place a store."""

    version: int = STORE_VERSION


class ObjectRef(msgspec.Struct, frozen=True, kw_only=True):
    """An object kept compressed by zstd, named by the sha256 of what is in it."""

    sha256: str
    size: int
    stored: int


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a layer: `size` bytes in chunks of `chunk_size`, of which `stored` bytes lie in the data object."""

    size: int
    chunk_size: int
    stored: int
    index: ObjectRef


class LayerManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`layers/…/<digest>.json`: published last, so whoever sees it finds the rest. Readers ignore unknown fields."""

    version: int = STORE_VERSION
    digest: str  # as `sealed` computes it
    entries: int
    created_at: float
    meta: ObjectRef
    blob: BlobRef | None = None  # None: a layer without content


class TraceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`traces/<digest>.json`: chunks in the order in which a real use wanted them."""

    version: int = STORE_VERSION
    digest: str
    chunk_size: int
    chunks: tuple[int, ...]


class DiskMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a layer that is a file of a disk: the digest of the layer names what it is to be read as, too."""

    dsec_disk: int = STORE_VERSION
    format: str  # raw | qcow2
    size: int  # as a machine sees it


def disk_meta(meta: bytes) -> DiskMeta | None:
    """None: it is of an image with files. Raises StorageError."""
    if not meta.startswith(_DISK_BEGINS):
        return None
    try:
        found = codec.from_json(meta, DiskMeta)
    except InvalidArgumentError as error:
        raise StorageError(f"what a disk of the store is cannot be read: {error.message}") from error
    if found.dsec_disk != STORE_VERSION or found.format not in DISK_FORMATS or found.size <= 0:
        raise StorageError("a disk of the store is of a kind that is not known")
    return found


def manifest_path(digest: str) -> str:
    return f"layers/{digest[:2]}/{digest}.json"


def object_path(kind: str, name: str) -> str:
    """`kind` is "meta" or "index" with a sha256, or "data" with a layer's digest."""
    return f"{kind}/{name[:2]}/{name}"


def trace_path(digest: str) -> str:
    return f"traces/{digest}.json"


@dataclass(frozen=True, slots=True)
class Cut:
    """What cutting a blob led to."""

    index: bytes
    stored: int


def cut(blob: Path, data: IO[bytes]) -> Cut:
    """Write the chunks of `blob`, each compressed by itself, to `data`; holes take no room.

    Memory is bounded whatever the size. Raises StorageError when the blob cannot be read.
    """
    records: list[bytes] = []
    offset = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for raw_size, digest, stored in _in_order(pool, _chunks(blob), _pack):
            records.append(_RECORD.pack(offset if stored else 0, len(stored), raw_size, digest))
            data.write(stored)
            offset += len(stored)
    return Cut(b"".join(records), offset)


def _chunks(blob: Path) -> Iterator[bytes]:
    try:
        with blob.open("rb", buffering=0) as file:
            while chunk := _read_full(file):
                yield chunk
    except OSError as error:
        raise StorageError(f"cannot read {blob.name}: {error.strerror}") from error


def _read_full(file: IO[bytes]) -> bytes:
    parts = []
    need = CHUNK_BYTES
    while need and (part := file.read(need)):
        parts.append(part)
        need -= len(part)
    return b"".join(parts)


def _in_order(
    pool: ThreadPoolExecutor, chunks: Iterator[bytes], work: Callable[[bytes], tuple[int, bytes, bytes]]
) -> Iterator[tuple[int, bytes, bytes]]:
    waiting: list[Future[tuple[int, bytes, bytes]]] = []
    for chunk in chunks:
        waiting.append(pool.submit(work, chunk))
        if len(waiting) >= _AHEAD:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


def _pack(raw: bytes) -> tuple[int, bytes, bytes]:
    digest = blake3.blake3(raw).digest()
    if raw.count(0) == len(raw):
        return len(raw), digest, b""
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    # As many bytes as the chunk has: it is kept as it is.
    return len(raw), digest, packed if len(packed) < len(raw) else raw


def pack_object(raw: bytes) -> tuple[ObjectRef, bytes]:
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    return ObjectRef(sha256=hashlib.sha256(raw).hexdigest(), size=len(raw), stored=len(packed)), packed


def unpack_object(ref: ObjectRef, packed: bytes) -> bytes:
    """The content, checked against its name. Raises StorageError, also when it would be larger than it says."""
    if ref.size > limits.STORE_OBJECT_BYTES_MAX:
        raise StorageError(f"an object of {ref.size} bytes is larger than the {limits.STORE_OBJECT_BYTES_MAX} we take")
    try:
        # As a stream: `decompress` makes room for whatever the frame says it holds.
        with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
            raw = reader.read(max(ref.size, 0) + 1)
    except zstandard.ZstdError as error:
        raise StorageError(f"object {ref.sha256[:12]} of the store cannot be unpacked: {error}") from error
    if len(raw) != ref.size or hashlib.sha256(raw).hexdigest() != ref.sha256:
        raise StorageError(f"object {ref.sha256[:12]} of the store is not what was published")
    return raw


def check_manifest(manifest: LayerManifest) -> None:
    """Raises StorageError for numbers that no layer has; a store may be anybody's."""
    blob = manifest.blob
    if blob is None:
        return
    size = blob.chunk_size
    if not _CHUNK_BYTES_MIN <= size <= _CHUNK_BYTES_MAX or size & (size - 1):
        raise StorageError(f"layer {manifest.digest[:12]} of the store has chunks of {size} bytes")
    if not 0 < blob.size <= limits.IMAGE_BYTES_MAX or not 0 <= blob.stored <= blob.size:
        raise StorageError(
            f"layer {manifest.digest[:12]} of the store cannot have {blob.size} bytes, {blob.stored} kept"
        )


def sealed(meta: bytes, blob: BlobRef | None, index: bytes = b"") -> str:
    """The digest by which a store has a layer: of all that is ever read of it, down to each chunk of its data.

    Whoever knows it can check what anybody gives them: metadata at once, a chunk when it comes.
    """
    total = hashlib.sha256(b"dsec-sealed-1\0" + hashlib.sha256(meta).digest())
    if blob is not None:
        total.update(_SEALED.pack(blob.size, blob.chunk_size))
        for _, _, _, digest in _RECORD.iter_unpack(index):
            total.update(digest)
    return total.hexdigest()


def hash_chunks(blob: Path) -> bytes:
    """An index without places: what `sealed` needs of the blob. Raises StorageError when it cannot be read."""
    with ThreadPoolExecutor(_THREADS) as pool:
        hashed = _in_order(pool, _chunks(blob), _hash)
        return b"".join(_RECORD.pack(0, 0, raw_size, digest) for raw_size, digest, _ in hashed)


def _hash(raw: bytes) -> tuple[int, bytes, bytes]:
    return len(raw), blake3.blake3(raw).digest(), b""


def index_chunks(size: int, chunk_size: int) -> int:
    return -(-size // chunk_size)


def check_index(index: bytes, blob: BlobRef) -> None:
    """Raises StorageError when an index cannot be that of the blob; the loader checks where each record points to.

    Holes are never fetched, so that nobody would compare them: they must be of zeros by what they hash to.
    """
    if len(index) != index_chunks(blob.size, blob.chunk_size) * _RECORD.size:
        raise StorageError("the index of a layer does not fit its blob")
    zeros: dict[int, bytes] = {}
    for _, stored, raw_size, digest in _RECORD.iter_unpack(index):
        if stored:
            continue
        if raw_size > blob.chunk_size:
            raise StorageError("the index of a layer has a hole that is larger than a chunk")
        if raw_size not in zeros:
            zeros[raw_size] = blake3.blake3(bytes(raw_size)).digest()
        if digest != zeros[raw_size]:
            raise StorageError("the index of a layer has a hole where there is content")
