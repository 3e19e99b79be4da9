"""An environment pushed to a registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from dsec.core.image_names import TAG_DEFAULT, parse_image_name
from dsec.core.units import format_size
from dsec.image.export.parts import Exporter, blob_of, content_of, digest_of
from dsec.image.make import Report, progress
from dsec.image.registry.accounts import Accounts
from dsec.image.registry.blobs import Packed
from dsec.image.registry.client import Registry
from dsec.image.registry.images import OCI_MANIFEST
from dsec.image.registry.push import is_there, upload
from dsec.storage.layers import LayerLocation
from dsec.wire.images import Compression, ExportedImage, RegistryTarget

_PLACES_MAX: Final = 4  # repositories that are remembered to have a blob


def push_image(exporter: Exporter, target: RegistryTarget) -> ExportedImage:
    """Layers first and the manifest last: nobody sees an image that is not whole."""
    name = parse_image_name(target.image)
    registry = Registry(name, Accounts(exporter.environ), push=True, settings=exporter.settings)
    packed, sent = [], 0
    for layer, what in exporter.layers():
        known, size = _push_layer(exporter, registry, layer, target.compression, what)
        packed.append(known)
        sent += size
    content = content_of(exporter, packed)
    config = digest_of(content.config)
    if not registry.has_blob(config):
        upload(registry, config, content.config)
        sent += len(content.config)
    tag = name.tag or TAG_DEFAULT
    digest = registry.put_manifest(tag, content.manifest, OCI_MANIFEST)
    progress(exporter.report, "publish", f"{name.repository}:{tag} is {digest}")
    return ExportedImage(
        reference=f"{name.repository}@{digest}", digest=digest, size_bytes=content.size_bytes, sent_bytes=sent
    )


def _push_layer(
    exporter: Exporter, registry: Registry, layer: LayerLocation, compression: Compression, what: str
) -> tuple[Packed, int]:
    """What it is there, and how much of it had to be sent."""
    sent = 0
    known = exporter.cache.packed(layer.digest, compression)
    if known is not None and is_there(registry, known.digest, known.places):
        progress(exporter.report, "push", f"{what}: it is there already")
    else:
        with blob_of(exporter, layer, compression, what) as (known, file):
            if not is_there(registry, known.digest, known.places):
                progress(exporter.report, "push", f"{what}, {format_size(known.size)}")
                upload(registry, known.digest, file, _teller(exporter.report, what, known.size))
                sent = known.size
    places = dict.fromkeys((registry.image.repository, *known.places))
    known = msgspec.structs.replace(known, places=tuple(places)[:_PLACES_MAX])
    exporter.cache.note(layer.digest, compression, known)
    return known, sent


def _teller(report: Report, what: str, size: int) -> Callable[[int], None]:
    return lambda at: progress(report, "push", f"{what}, {format_size(at)} of {format_size(size)}")
