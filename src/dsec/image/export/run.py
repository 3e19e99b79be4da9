"""One export, whatever it is to."""

from __future__ import annotations

from collections.abc import Mapping

from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.image.export.files import write_archive, write_layout
from dsec.image.export.parts import Exporter
from dsec.image.export.pushed import push_image
from dsec.image.make import Report
from dsec.image.registry.blobs import BlobCache
from dsec.image.registry.client import RegistrySettings
from dsec.wire.images import ExportedImage, ExportRequest, LayoutTarget, RegistryTarget


def export_now(
    store: EnvironmentStore,
    request: ExportRequest,
    report: Report,
    *,
    settings: RegistrySettings,
    environ: Mapping[str, str],
    data: Mapping[str, str],
) -> ExportedImage:
    """Again is quick: what is there already is left as it is.

    `environ` says where accounts are; `data` has the files with the data of layers that are loaded from stores.
    Raises EnvironmentNotFoundError, InvalidArgumentError for a place that cannot be, what the registry or disk raises.
    """
    cache = BlobCache(store.state)
    locked, lease = store.acquire(Environment(base=request.name), collapsed=False)
    try:
        with lease:
            created_at = store.get(request.name).created_at
            exporter = Exporter(store, cache, report, settings, environ, data, locked, created_at)
            if isinstance(request.target, RegistryTarget):
                return push_image(exporter, request.target)
            if isinstance(request.target, LayoutTarget):
                return write_layout(exporter, request.name, request.target)
            return write_archive(exporter, request.name, request.target)
    finally:
        cache.collect(settings.cache_bytes)
