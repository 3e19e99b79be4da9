"""What a node needs of environments, and the store of `dsec.image` behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from dsec.backends.base import Layer
from dsec.core.errors import EnvironmentNotFoundError, NotFoundError, StorageError
from dsec.core.spec import Environment
from dsec.image.build import build_events, collapse_events, export_events, machine_events, push_events
from dsec.image.compose import compose, update
from dsec.image.environments import EnvironmentStore, StoreFacts
from dsec.image.inventory import find_layer, get_layer, list_layers, remove_layer
from dsec.image.registry.blobs import BlobCache
from dsec.image.registry.client import DEFAULT_SETTINGS, RegistrySettings
from dsec.node.loading import environment_stats, layer_use, record_trace
from dsec.node.pulling import Pulls, missing
from dsec.storage.disks import DiskLayers
from dsec.storage.layers import LayerKind, LayerLocation
from dsec.storage.remote import RemoteLayers
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    EnvironmentInfo,
    EnvironmentStats,
    EnvironmentTrace,
    LayerUse,
    MachineBuild,
    PushRequest,
    StoreSource,
)
from dsec.wire.images import ExportRequest
from dsec.wire.layers import CollapseRequest, ComposeRequest, LayerInfo


class Hold(Protocol):
    """Keeps layers from being removed."""

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an environment stands for now. It stays so until `hold` is released."""

    hold: Hold
    layers: tuple[Layer, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


class Environments(Protocol):
    """Where environments come from."""

    async def acquire(self, environment: Environment) -> Resolved:
        """Raises EnvironmentNotFoundError, LimitError or StorageError."""
        ...

    async def hold(self, digests: Collection[str]) -> Hold:
        """For sandboxes that are adopted. Raises NotFoundError when a layer is gone."""
        ...

    async def layers(self, digests: Sequence[str]) -> tuple[Hold, tuple[Layer, ...]]:
        """These, lowest first, as a backend mounts them. Raises NotFoundError when one is gone."""
        ...

    def disks(self) -> DiskLayers:
        """Disks of machines as layers. Raises UnsupportedError where there is no store of layers."""
        ...

    async def list(self) -> list[EnvironmentInfo]: ...

    async def get(self, name: str) -> EnvironmentInfo: ...

    async def remove(self, name: str, *, live: Collection[str]) -> None:
        """Raises EnvironmentNotFoundError, or ConflictError while a sandbox uses it."""
        ...

    def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        """The story of a build; its last event is `done` or `error`."""
        ...

    def push(self, request: PushRequest) -> AsyncIterator[BuildEvent]:
        """The story of a push to a store, as of a build."""
        ...

    def export(self, request: ExportRequest) -> AsyncIterator[BuildEvent]:
        """The story of an export to a registry or a file, as of a build."""
        ...

    def build_machine(self, request: MachineBuild, target: Path) -> AsyncGenerator[BuildEvent]:
        """The story of an image for full machines, as of a build; its files are in `target`."""
        ...

    async def compose(self, request: ComposeRequest) -> EnvironmentInfo:
        """Raises EnvironmentNotFoundError, InvalidArgumentError, LimitError, ConflictError."""
        ...

    async def update(self, name: str) -> EnvironmentInfo:
        """As `compose`, for what is composed already."""
        ...

    def collapse(self, request: CollapseRequest) -> AsyncIterator[BuildEvent]:
        """The story of a collapse, as of a build."""
        ...

    async def named(self) -> Collection[str]:
        """Layers that environments have, and those that stand for runs of them."""
        ...

    async def list_layers(self) -> Sequence[LayerInfo]: ...

    async def get_layer(self, digest: str) -> LayerInfo:
        """Raises NotFoundError."""
        ...

    async def use_of_layer(self, digest: str) -> LayerUse:
        """Raises NotFoundError."""
        ...

    async def remove_layer(self, digest: str, *, live: Collection[str]) -> None:
        """Raises NotFoundError, ConflictError while an environment or a sandbox has it."""
        ...

    async def stats(self, name: str) -> EnvironmentStats:
        """Raises EnvironmentNotFoundError."""
        ...

    async def trace(self, name: str) -> EnvironmentTrace:
        """What has been read so far goes into the stores. Raises EnvironmentNotFoundError, ConflictError when nothing
        was, and what a store raises."""
        ...

    async def read_failure(self, digests: Sequence[str], since_s: float) -> str | None:
        """What reads of these layers have failed of since then (monotonic), as a cause of an exec's end; None while all
        are local."""
        ...

    async def describe(self) -> StoreFacts | None:
        """For doctor; None when there is no store."""
        ...

    async def renew(self) -> None:
        """Now and then: what is loaded on demand may have moved, or its signatures end."""
        ...

    async def tidy(self, *, live: Collection[str]) -> None:
        """At the node's start: what dead builders left, and layers that nothing names or uses, are removed."""
        ...


class StoredEnvironments:
    """Those of an EnvironmentStore. Resolving reads a few small files that are in memory; the rest runs in threads."""

    def __init__(
        self,
        store: EnvironmentStore,
        remote: RemoteLayers,
        *,
        registries: RegistrySettings = DEFAULT_SETTINGS,
        pull: Sequence[str] = (),
    ) -> None:
        """`pull`: stores from which environments are taken that are asked for and not here."""
        self._store = store
        self._remote = remote
        self._registries = registries
        self._pulls = Pulls(pull, self.build)

    async def acquire(self, environment: Environment) -> Resolved:
        try:
            locked, lease = self._store.acquire(environment)
        except EnvironmentNotFoundError:
            lacking = await missing(environment.names(), self._store.get)
            if not lacking or not all([await self._pulls.pull(name) for name in lacking]):
                raise
            locked, lease = self._store.acquire(environment)
        try:
            layers = await self._mountable(locked.layers)
        except BaseException:
            lease.release()
            raise
        return Resolved(
            hold=lease,
            layers=layers,
            env=dict(locked.env),
            user=locked.user,
            workdir=locked.workdir,
            entrypoint=locked.entrypoint,
            command=locked.command,
        )

    async def layers(self, digests: Sequence[str]) -> tuple[Hold, tuple[Layer, ...]]:
        lease = self._store.layers.lease(digests)
        try:
            return lease, await self._mountable([self._store.layers.get(digest) for digest in digests])
        except BaseException:
            lease.release()
            raise

    async def _mountable(self, found: Sequence[LayerLocation]) -> tuple[Layer, ...]:
        if all(layer.remote is None for layer in found):
            return tuple(_layer(layer, layer.blob) for layer in found)
        # The loader is asked: a process, and at first a store.
        return await asyncio.to_thread(
            lambda: tuple(
                _layer(
                    layer,
                    # Machines read devices as well as files; the kernel mounts files.
                    layer.blob
                    if layer.remote is None
                    else self._remote.serve(layer, block=layer.kind is LayerKind.DISK),
                )
                for layer in found
            )
        )

    async def hold(self, digests: Collection[str]) -> Hold:
        return self._store.layers.lease(digests)

    def disks(self) -> DiskLayers:
        return DiskLayers(self._store.layers, self._remote)

    async def list(self) -> list[EnvironmentInfo]:
        return await asyncio.to_thread(self._store.list)

    async def get(self, name: str) -> EnvironmentInfo:
        return await asyncio.to_thread(self._store.get, name)

    async def remove(self, name: str, *, live: Collection[str]) -> None:
        def work() -> None:
            layers = self._store.get(name).layers
            self._store.remove(name, live=live)
            for digest in layers:
                self._remote.forget(digest, unless=self._store.layers.has)

        await asyncio.to_thread(work)

    def build(self, request: BuildRequest) -> AsyncIterator[BuildEvent]:
        if isinstance(request.source, StoreSource):
            self._remote.trusted.check(request.source.url)
        return build_events(self._store, request, registries=self._registries)

    def push(self, request: PushRequest) -> AsyncIterator[BuildEvent]:
        self._remote.trusted.check(request.store)
        return push_events(self._store, request)

    def export(self, request: ExportRequest) -> AsyncIterator[BuildEvent]:
        return export_events(self._store, request, registries=self._registries, serve=self._remote.serve)

    def build_machine(self, request: MachineBuild, target: Path) -> AsyncGenerator[BuildEvent]:
        return machine_events(self._store, request, target)

    async def compose(self, request: ComposeRequest) -> EnvironmentInfo:
        return await asyncio.to_thread(compose, self._store, request)

    async def update(self, name: str) -> EnvironmentInfo:
        return await asyncio.to_thread(update, self._store, name)

    def collapse(self, request: CollapseRequest) -> AsyncIterator[BuildEvent]:
        return collapse_events(self._store, request)

    async def named(self) -> Collection[str]:
        return await asyncio.to_thread(self._store.named)

    async def list_layers(self) -> Sequence[LayerInfo]:
        return await asyncio.to_thread(list_layers, self._store)

    async def get_layer(self, digest: str) -> LayerInfo:
        return await asyncio.to_thread(get_layer, self._store, digest)

    async def use_of_layer(self, digest: str) -> LayerUse:
        return await asyncio.to_thread(lambda: layer_use(self._store, self._remote, find_layer(self._store, digest)))

    async def remove_layer(self, digest: str, *, live: Collection[str]) -> None:
        def work() -> None:
            found = remove_layer(self._store, digest, live=live)
            self._remote.forget(found, unless=self._store.layers.has)

        await asyncio.to_thread(work)

    async def stats(self, name: str) -> EnvironmentStats:
        return await asyncio.to_thread(environment_stats, self._store, self._remote, name)

    async def trace(self, name: str) -> EnvironmentTrace:
        return await asyncio.to_thread(record_trace, self._store, self._remote, name)

    async def read_failure(self, digests: Sequence[str], since_s: float) -> str | None:
        remote = [digest for digest in digests if self._is_remote(digest)]
        cause = await self._remote.failed_since(remote, since_s) if remote else None
        if cause is None:
            return None
        return "layer_corrupt" if cause == "corrupt" else "layer_unavailable"

    def _is_remote(self, digest: str) -> bool:
        try:
            return self._store.layers.get(digest).remote is not None
        except (NotFoundError, StorageError, OSError):
            return False

    async def describe(self) -> StoreFacts | None:
        return await asyncio.to_thread(lambda: replace(self._store.describe(), front=self._remote.front()))

    async def renew(self) -> None:
        await asyncio.to_thread(self._remote.renew, self._store.layers)

    async def tidy(self, *, live: Collection[str]) -> None:
        def work() -> None:
            self._store.layers.clean()
            BlobCache(self._store.state).collect(self._registries.cache_bytes)
            for digest in self._store.collect(live=live):
                self._remote.forget(digest, unless=self._store.layers.has)

        await asyncio.to_thread(work)


def _layer(layer: LayerLocation, blob: str | Path | None) -> Layer:
    return Layer(layer.digest, str(layer.kind), str(layer.meta), None if blob is None else str(blob))
