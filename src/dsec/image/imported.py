"""Images that are not an image layout on this disk yet: each becomes one first, and is then built as such. Blocking."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.core.image_names import parse_image_name
from dsec.image.environments import EnvironmentStore
from dsec.image.make import Report, log, progress
from dsec.image.registry.accounts import Accounts
from dsec.image.registry.blobs import BlobCache
from dsec.image.registry.client import DEFAULT_SETTINGS, Registry, RegistrySettings
from dsec.image.registry.pull import Found, fetch_layout, resolve
from dsec.image.sources import docker_archive, dockerfile, oci
from dsec.image.stack import known_stack
from dsec.wire.environments import DockerArchiveSource, DockerfileSource, ImageSource, OciSource, RegistrySource

_LAYOUT: Final = "image"  # below the build's own directory


@dataclass(slots=True)
class Importer:
    """For one build: what a registry says is asked once."""

    state: Path
    settings: RegistrySettings = DEFAULT_SETTINGS
    environ: Mapping[str, str] = field(default_factory=dict)
    _found: tuple[Registry, Found] | None = None
    _made: OciSource | None = None

    def build_key(self, source: ImageSource) -> str:
        """Equal for requests that lead to the same content. Raises what the registry raises."""
        if isinstance(source, DockerArchiveSource):
            return docker_archive.build_key(source)
        if isinstance(source, DockerfileSource):
            return dockerfile.build_key(source)
        return oci.key_of(source.owner, self._resolve(source)[1].manifest.digest)

    @contextmanager
    def layout(
        self, source: ImageSource, store: EnvironmentStore, work: Path, report: Report, *, whole: bool = False
    ) -> Iterator[OciSource]:
        """An image layout below `work`, and what is built instead of `source` within the `with`.

        Of a registry's image, layers that `store` has are left out, unless `whole`; these are held. Once more with
        `whole` it has them, too.
        """
        with ExitStack() as held:
            without: set[str] = set()
            if isinstance(source, RegistrySource) and not whole:
                digests = [layer.digest for layer in self._resolve(source)[1].image.layers]
                count, lease = known_stack(store, source.owner, digests)
                held.enter_context(lease)
                without = set(digests[:count]) - set(digests[count:])
            yield self._to_layout(source, work, report, without)

    def _to_layout(self, source: ImageSource, work: Path, report: Report, without: set[str]) -> OciSource:
        if isinstance(source, RegistrySource):
            self._fetch(source, work / _LAYOUT, report, without)
            return OciSource(os.fspath(work / _LAYOUT), None, source.owner)
        if self._made is None:
            self._made = self._make(source, work, report)
        return self._made

    def _make(self, source: DockerArchiveSource | DockerfileSource, work: Path, report: Report) -> OciSource:
        if isinstance(source, DockerArchiveSource):
            progress(report, "fetch", f"reading {source.path}")
            return docker_archive.to_layout(source, work / _LAYOUT)
        progress(report, "fetch", f"buildah builds {source.path}")
        return dockerfile.to_layout(
            source, work, log=lambda line: log(report, line), environ=self.environ, insecure=self.settings.insecure
        )

    def _fetch(self, source: RegistrySource, layout: Path, report: Report, without: set[str]) -> None:
        registry, found = self._resolve(source)
        cache = BlobCache(self.state)
        fetch_layout(registry, found, cache, layout, lambda text: progress(report, "fetch", text), without=without)
        cache.collect(self.settings.cache_bytes)

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
