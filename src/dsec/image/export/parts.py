"""An environment as the parts of an image: its layers as blobs, its configuration, its manifest."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec.image.environments import EnvironmentStore, LockedEnvironment
from dsec.image.make import Report, log, progress
from dsec.image.packing import pack_layer
from dsec.image.registry.blobs import BlobCache, Packed
from dsec.image.registry.client import RegistrySettings
from dsec.image.registry.images import OCI_CONFIG, OCI_LAYER, OCI_MANIFEST, Descriptor, machine
from dsec.storage.layers import LayerLocation
from dsec.wire import codec
from dsec.wire.images import Compression

_MEDIA_TYPES: Final = {
    Compression.NONE: OCI_LAYER,
    Compression.GZIP: f"{OCI_LAYER}+gzip",
    Compression.ZSTD: f"{OCI_LAYER}+zstd",
}


@dataclass(frozen=True, slots=True)
class Content:
    """The small blobs of an image."""

    config: bytes
    manifest: bytes
    size_bytes: int  # with those of the layers

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)


@dataclass(frozen=True, slots=True)
class Exporter:
    """What an export works with."""

    store: EnvironmentStore
    cache: BlobCache
    report: Report
    settings: RegistrySettings
    environ: Mapping[str, str]
    data: Mapping[str, str]  # files with the data of layers that are loaded from stores, by digest
    locked: LockedEnvironment
    created_at: float

    def layers(self) -> Iterator[tuple[LayerLocation, str]]:
        """Lowest first, each with what it is called in messages."""
        for number, layer in enumerate(self.locked.layers, 1):
            yield layer, f"layer {number} of {len(self.locked.layers)}, {layer.digest[:12]}"


@contextmanager
def blob_of(
    exporter: Exporter, layer: LayerLocation, compression: Compression, what: str
) -> Iterator[tuple[Packed, Path]]:
    """The layer as a blob, in a file that is there for the time of the `with`."""
    with exporter.store.layers.staging() as work:
        file = work / "blob"
        known = exporter.cache.packed(layer.digest, compression)
        if known is None or not exporter.cache.link(known.digest, known.size, file):
            progress(exporter.report, "pack", what)
            data = exporter.data.get(layer.digest)
            made = pack_layer(layer, None if data is None else Path(data), file, compression)
            if made.dropped:
                log(exporter.report, f"{what}: {made.dropped} device nodes and sockets left out")
            places = known.places if known is not None and known.digest == made.digest else ()
            known = Packed(
                digest=made.digest,
                size=made.size,
                diff_id=made.diff_id,
                media_type=_MEDIA_TYPES[compression],
                places=places,
            )
            if compression is not Compression.NONE:  # those are large, and quickly made again
                exporter.cache.adopt(file, known.digest)
                exporter.cache.note(layer.digest, compression, known)
        yield known, file


def content_of(exporter: Exporter, packed: list[Packed]) -> Content:
    here, locked = machine(), exporter.locked
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(exporter.created_at))
    run: dict[str, Any] = {"Env": [f"{name}={value}" for name, value in locked.env.items()]}
    for key, value in (
        ("User", locked.user),
        ("WorkingDir", locked.workdir),
        ("Entrypoint", list(locked.entrypoint)),
        ("Cmd", list(locked.command)),
    ):
        if value:
            run[key] = value
    config = codec.to_json(
        {
            "created": made,
            "architecture": here.architecture,
            "os": here.os,
            "config": run,
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in packed]},
            "history": [{"created": made, "created_by": "dsec"} for _ in packed],
        }
    )
    layers = [Descriptor(media_type=layer.media_type, digest=layer.digest, size=layer.size) for layer in packed]
    manifest = codec.to_json(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": Descriptor(media_type=OCI_CONFIG, digest=digest_of(config), size=len(config)),
            "layers": layers,
        }
    )
    size = len(config) + len(manifest) + sum({layer.digest: layer.size for layer in packed}.values())
    return Content(config, manifest, size)


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
