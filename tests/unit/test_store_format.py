"""A blob is cut into chunks that can be fetched one by one and checked."""

from __future__ import annotations

import io
import struct
import tracemalloc
from pathlib import Path

import blake3
import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.errors import StorageError
from dsec.storage.store import format


def pieces(index: bytes) -> list[tuple[int, int, int, bytes]]:
    return list(struct.iter_unpack("<QII32s", index))


@given(st.lists(st.sampled_from(["zeros", "text", "noise"]), max_size=6), st.integers(0, 5000))
def test_chunks_together_are_the_blob(tmp_path_factory: pytest.TempPathFactory, kinds: list[str], tail: int) -> None:
    size = format.CHUNK_BYTES
    noise = blake3.blake3(b"seed").digest(length=size)
    content = {"zeros": bytes(size), "text": (b"words " * size)[:size], "noise": noise}
    blob = b"".join(content[kind] for kind in kinds) + b"t" * tail
    path = tmp_path_factory.mktemp("blob") / "data.blob"
    path.write_bytes(blob)
    data = io.BytesIO()

    cut = format.cut(path, data)

    found = b""
    for offset, stored, raw, digest in pieces(cut.index):
        packed = data.getvalue()[offset : offset + stored]
        chunk = bytes(raw) if stored == 0 else packed
        if 0 < stored < raw:
            chunk = zstandard.ZstdDecompressor().decompress(packed)
        assert blake3.blake3(chunk).digest() == digest
        found += chunk
    assert found == blob
    assert cut.stored == len(data.getvalue())


def test_an_object_that_is_not_what_its_name_says_is_refused() -> None:
    ref, packed = format.pack_object(b"metadata" * 1000)
    other, other_packed = format.pack_object(b"others")

    assert format.unpack_object(ref, packed) == b"metadata" * 1000
    for wrong in (other_packed, packed[:-1], b"", b"\0" * 50):
        with pytest.raises(StorageError):
            format.unpack_object(ref, wrong)
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    tracemalloc.start()
    with pytest.raises(StorageError):
        format.unpack_object(other, bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000


def test_an_index_of_another_blob_is_refused(tmp_path: Path) -> None:
    ref, _ = format.pack_object(b"")
    blob = format.BlobRef(size=300_000, chunk_size=format.CHUNK_BYTES, stored=1, index=ref)

    content = [struct.pack("<QII32s", 0, 1, 1, bytes(32))] * 2
    format.check_index(b"".join(content), blob)
    with pytest.raises(StorageError):
        format.check_index(content[0], blob)


def test_a_hole_hashes_to_zeros(tmp_path: Path) -> None:
    """Nobody would compare it with anything later."""
    (tmp_path / "blob").write_bytes(bytes(format.CHUNK_BYTES) + b"content" + bytes(format.CHUNK_BYTES))
    with (tmp_path / "data").open("wb") as data:
        cut = format.cut(tmp_path / "blob", data)
    ref, _ = format.pack_object(b"")
    blob = format.BlobRef(size=2 * format.CHUNK_BYTES + 7, chunk_size=format.CHUNK_BYTES, stored=1, index=ref)
    records = [cut.index[at : at + 48] for at in range(0, len(cut.index), 48)]

    format.check_index(cut.index, blob)
    for lie in (
        records[0] + records[1][:8] + bytes(4) + records[1][12:] + records[2],
        records[0][:12] + struct.pack("<I", 1 << 31) + records[0][16:] + records[1] + records[2],
    ):
        with pytest.raises(StorageError, match="hole"):
            format.check_index(lie, blob)


@pytest.mark.parametrize(
    "numbers",
    [
        {"chunk_size": 0},
        {"chunk_size": 3 << 12},
        {"chunk_size": 8 << 20},
        {"size": 0},
        {"size": -1},
        {"size": 1 << 60},
        {"stored": -1},
        {"stored": 300_001},
    ],
)
def test_numbers_that_no_layer_has_are_refused(numbers: dict[str, int]) -> None:
    ref, _ = format.pack_object(b"")
    good = format.BlobRef(size=300_000, chunk_size=format.CHUNK_BYTES, stored=300_000, index=ref)
    manifest = format.LayerManifest(digest="ab" * 32, entries=1, created_at=0.0, meta=ref, blob=good)

    format.check_manifest(manifest)
    with pytest.raises(StorageError):
        format.check_manifest(msgspec.structs.replace(manifest, blob=msgspec.structs.replace(good, **numbers)))
