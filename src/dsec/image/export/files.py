"""An environment in an image layout directory, or in a file for `docker load`."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dsec.core import limits
from dsec.core.errors import CapacityError, InvalidArgumentError
from dsec.core.image_names import TAG_DEFAULT, parse_image_name
from dsec.image.export.parts import Content, Exporter, blob_of, content_of, digest_of
from dsec.image.registry.blobs import Packed
from dsec.image.registry.images import OCI_MANIFEST, REF_NAME, Descriptor, machine
from dsec.storage.space import require_free
from dsec.wire import codec
from dsec.wire.images import ArchiveTarget, Compression, ExportedImage, LayoutTarget

_MARK: Final = b'{"imageLayoutVersion":"1.0.0"}'
_CONTAINERD_NAME: Final = "io.containerd.image.name"
_ENTRIES_MAX: Final = 10_000


def write_layout(exporter: Exporter, name: str, target: LayoutTarget) -> ExportedImage:
    """Into a directory that is a layout or becomes one; what has the same reference there is replaced."""
    root = Path(target.path)
    with _disk_errors(target.path):
        entries = _entries_of(root)
        (root / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        packed = []
        for layer, what in exporter.layers():
            with blob_of(exporter, layer, target.compression, what) as (known, file):
                _copy(file, root / _place(known.digest), known.size)
                packed.append(known)
        content = content_of(exporter, packed)
        for blob in (content.config, content.manifest):
            _put(root / _place(digest_of(blob)), blob)
        called = target.reference or name
        entry = _entry(content, {REF_NAME: called})
        kept = [other for other in entries if (other.get("annotations") or {}).get(REF_NAME) != called]
        _put(root / "oci-layout", _MARK)
        _put(root / "index.json", codec.to_json({"schemaVersion": 2, "manifests": [*kept, entry]}))
    return _exported(target.path, content)


def write_archive(exporter: Exporter, name: str, target: ArchiveTarget) -> ExportedImage:
    """What docker writes since version 25: a list of images for `docker load`, over an image layout."""
    path = Path(target.path)
    called = target.reference or name
    called = called if ":" in called.rpartition("/")[2] else f"{called}:{TAG_DEFAULT}"
    parse_image_name(called)
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    with _disk_errors(target.path):
        try:
            with draft.open("xb") as file:
                with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
                    content = _fill(exporter, archive, called)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return _exported(target.path, content)


def _fill(exporter: Exporter, archive: tarfile.TarFile, called: str) -> Content:
    packed: dict[str, Packed] = {}
    order = []
    for layer, what in exporter.layers():
        with blob_of(exporter, layer, Compression.NONE, what) as (known, path):
            order.append(known)
            if known.digest not in packed:
                packed[known.digest] = known
                with path.open("rb") as content:
                    archive.addfile(_member(_place(known.digest), known.size), content)
    image = content_of(exporter, order)
    saved = {
        "Config": _place(digest_of(image.config)),
        "RepoTags": [called],
        "Layers": [_place(layer.digest) for layer in order],
    }
    entry = _entry(image, {REF_NAME: called.rpartition(":")[2], _CONTAINERD_NAME: str(parse_image_name(called))})
    for name, data in (
        (_place(digest_of(image.config)), image.config),
        (_place(image.digest), image.manifest),
        ("index.json", codec.to_json({"schemaVersion": 2, "manifests": [entry]})),
        ("manifest.json", codec.to_json([saved])),
        ("oci-layout", _MARK),
    ):
        archive.addfile(_member(name, len(data)), io.BytesIO(data))
    return image


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _entry(content: Content, annotations: dict[str, str]) -> Descriptor:
    return Descriptor(
        media_type=OCI_MANIFEST,
        digest=content.digest,
        size=len(content.manifest),
        platform=machine(),
        annotations=annotations,
    )


def _exported(path: str, content: Content) -> ExportedImage:
    return ExportedImage(
        reference=path, digest=content.digest, size_bytes=content.size_bytes, sent_bytes=content.size_bytes
    )


def _entries_of(root: Path) -> list[dict[str, Any]]:
    """Of a layout that is there already. Raises InvalidArgumentError for a directory that is something else."""
    try:
        with (root / "index.json").open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidArgumentError(f"{root}/index.json is not a file")
            content = file.read(limits.IMAGE_MANIFEST_BYTES_MAX + 1)
    except FileNotFoundError:
        if root.exists() and any(root.iterdir()):
            raise InvalidArgumentError(f"{root} is neither empty nor an image layout") from None
        return []
    entries = codec.from_json(content[: limits.IMAGE_MANIFEST_BYTES_MAX], dict[str, Any]).get("manifests")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArgumentError(f"{root}/index.json is not the index of an image layout")
    if len(entries) >= _ENTRIES_MAX:
        raise InvalidArgumentError(f"{root} has {len(entries)} images already")
    return entries


def _copy(source: Path, target: Path, size: int) -> None:
    """Whole or not at all. What has the name has the content."""
    if target.exists():
        return
    require_free(target.parent, size)
    draft = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        shutil.copyfile(source, draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _put(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _place(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


@contextmanager
def _disk_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (28, 122):  # ENOSPC, EDQUOT
            raise CapacityError(f"the disk of {path} is full", hint="make room there") from error
        raise InvalidArgumentError(f"cannot write the image to {path!r}: {error.strerror}") from error
