"""Pulling: an image of a registry becomes an OCI layout directory, from which it is built as any other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.core.errors import LimitError, StorageError
from dsec.core.image_names import ImageName
from dsec.core.units import format_size
from dsec.image.registry.blobs import BlobCache
from dsec.image.registry.client import Manifest, Registry
from dsec.image.registry.images import OCI_MANIFEST, REF_NAME, Descriptor, Image, choose, machine, read_manifest
from dsec.wire import codec

_NESTING_MAX: Final = 4
_AT_ONCE: Final = 3  # blobs that are fetched: what docker does, and registries are used to
_TELL_S: Final = 2.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """What a name stands for now, on this machine."""

    name: ImageName
    manifest: Manifest  # of the image itself, never an index
    image: Image


def resolve(registry: Registry) -> Found:
    """Raises NotFoundError, UnsupportedError when there is none for this machine, what the registry raises."""
    manifest = registry.manifest(registry.image.reference)
    for _ in range(_NESTING_MAX):
        read = read_manifest(manifest.content, manifest.media_type)
        if isinstance(read, Image):
            return Found(registry.image, manifest, read)
        chosen = choose(read, machine())
        manifest = registry.manifest(chosen.digest)
        if chosen.size != len(manifest.content):
            raise StorageError(f"the manifest {chosen.digest[:19]}… has another size than its index says")
    raise LimitError(f"indexes of the image lie more than {_NESTING_MAX} deep in each other")


def fetch_layout(
    registry: Registry,
    found: Found,
    cache: BlobCache,
    layout: Path,
    tell: Tell = lambda _: None,
    *,
    without: Collection[str] = (),
) -> None:
    """Make the directory `layout` an image layout with that one image. What broke off goes on where it did.

    Blobs in `without` are left out. Again: what is still missing is fetched.
    """
    for algorithm in ("sha256", "sha512"):
        (layout / "blobs" / algorithm).mkdir(parents=True, exist_ok=True)
    blobs = [
        blob for blob in found.image.blobs() if blob.digest not in without and not _place(layout, blob.digest).exists()
    ]
    progress = _Progress(blobs, tell)

    def fetch(blob: Descriptor) -> None:
        cache.fetch(registry, blob.digest, blob.size, _place(layout, blob.digest), progress.of(blob.digest))

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pull") as pool:
        futures = [pool.submit(fetch, blob) for blob in blobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            progress.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    write_layout(layout, found.manifest.content, found.manifest.digest, found.manifest.media_type)


def write_layout(layout: Path, manifest: bytes, digest: str, media_type: str, *, name: str | None = None) -> None:
    """The manifest, the index and the mark of a layout whose other blobs are there."""
    _place(layout, digest).write_bytes(manifest)
    entry = Descriptor(
        media_type=media_type or OCI_MANIFEST,
        digest=digest,
        size=len(manifest),
        annotations={REF_NAME: name} if name else None,
    )
    (layout / "index.json").write_bytes(codec.to_json({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_bytes(b'{"imageLayoutVersion":"1.0.0"}')


def _place(layout: Path, digest: str) -> Path:
    algorithm, _, name = digest.partition(":")
    return layout / "blobs" / algorithm / name


class _StoppedError(Exception):
    """Another blob has failed."""


class _Progress:
    """Tells now and then how much of all blobs is here. Once `stopped`, the next that comes ends its download."""

    def __init__(self, blobs: Sequence[Descriptor], tell: Tell) -> None:
        self._total = sum(blob.size for blob in blobs)
        self._have: dict[str, int] = {}
        self._tell = tell
        self._mutex = threading.Lock()
        self._told_at = time.monotonic()
        self.stopped = threading.Event()
        tell(f"{len(blobs)} blobs, {format_size(self._total)}")

    def of(self, digest: str) -> Callable[[int], None]:
        def hear(have: int) -> None:
            if self.stopped.is_set():
                raise _StoppedError
            with self._mutex:
                self._have[digest] = have
                now = time.monotonic()
                if now - self._told_at < _TELL_S:
                    return
                self._told_at = now
                self._tell(f"{format_size(sum(self._have.values()))} of {format_size(self._total)}")

        return hear
