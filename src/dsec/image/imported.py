"""Images that are not an image layout on this disk yet: each becomes one first, and is then built as such. Blocking."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsec.core.image_names import parse_image_name
from dsec.image.make import Report, log, progress
from dsec.image.recipes import RECIPE_VERSION
from dsec.image.registry.accounts import Accounts
from dsec.image.registry.blobs import BlobCache
from dsec.image.registry.client import DEFAULT_SETTINGS, Registry, RegistrySettings
from dsec.image.registry.pull import Found, fetch_layout, resolve
from dsec.image.sources import docker_archive, dockerfile
from dsec.wire.environments import DockerArchiveSource, DockerfileSource, ImageSource, OciSource, RegistrySource


@dataclass(slots=True)
class Importer:
    """For one build: what a registry says is asked once."""

    state: Path
    settings: RegistrySettings = DEFAULT_SETTINGS
    environ: Mapping[str, str] = field(default_factory=dict)
    _found: tuple[Registry, Found] | None = None

    def build_key(self, source: ImageSource) -> str:
        """Equal for requests that lead to the same content. Raises what the registry raises."""
        if isinstance(source, DockerArchiveSource):
            return docker_archive.build_key(source)
        if isinstance(source, DockerfileSource):
            return dockerfile.build_key(source)
        digest = self._resolve(source)[1].manifest.digest
        # As that of a layout with the same image: it is the same environment.
        return hashlib.sha256(f"oci {RECIPE_VERSION} {source.owner} {digest}".encode()).hexdigest()

    def to_layout(self, source: ImageSource, work: Path, report: Report) -> OciSource:
        """Make an image layout below `work`; what is built instead."""
        if isinstance(source, DockerArchiveSource):
            progress(report, "fetch", f"reading {source.path}")
            return docker_archive.to_layout(source, work / "image")
        if isinstance(source, DockerfileSource):
            progress(report, "fetch", f"buildah builds {source.path}")
            return dockerfile.to_layout(
                source,
                work,
                log=lambda line: log(report, line),
                environ=self.environ,
                insecure=self.settings.insecure,
            )
        registry, found = self._resolve(source)
        cache = BlobCache(self.state)
        layout = work / "image"
        fetch_layout(registry, found, cache, layout, lambda text: progress(report, "fetch", text))
        cache.collect(self.settings.cache_bytes)
        return OciSource(os.fspath(layout), None, source.owner)

    def _resolve(self, source: RegistrySource) -> tuple[Registry, Found]:
        if self._found is None:
            registry = Registry(parse_image_name(source.image), Accounts(self.environ), settings=self.settings)
            self._found = registry, resolve(registry)
        return self._found


def describe(source: ImageSource) -> str:
    """For people, in records and logs."""
    if isinstance(source, DockerArchiveSource):
        return f"docker archive {source.path}" + (f" ({source.reference})" if source.reference else "")
    if isinstance(source, DockerfileSource):
        return f"Dockerfile of {source.path}" + (f" ({source.target})" if source.target else "")
    return f"image {parse_image_name(source.image)}"
