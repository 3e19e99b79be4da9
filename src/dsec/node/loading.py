"""How much of an environment has been loaded from stores, and recording what was read of it. Blocking."""

from __future__ import annotations

from collections.abc import Sequence

from dsec.core.errors import ConflictError, NotFoundError
from dsec.image.environments import EnvironmentStore
from dsec.storage.layers import LayerLocation, LayerStore, RemoteBlob
from dsec.storage.remote import RemoteLayers
from dsec.wire.environments import EnvironmentStats, EnvironmentTrace, LayerTrace, LayerUse, LoadFailure
from dsec.wire.loader import LayerStats


def environment_stats(store: EnvironmentStore, remote: RemoteLayers, name: str) -> EnvironmentStats:
    """Raises EnvironmentNotFoundError, StorageError for a layer that is lost, UnavailableError without the loader."""
    layers = (store.layers.get(digest) for digest in store.get(name).layers)
    return EnvironmentStats(name=name, layers=tuple(_use(store.layers, layer, remote) for layer in layers))


def layer_use(store: EnvironmentStore, remote: RemoteLayers, digest: str) -> LayerUse:
    """Raises NotFoundError, UnavailableError without the loader."""
    return _use(store.layers, store.layers.get(digest), remote)


def _use(layers: LayerStore, layer: LayerLocation, remote: RemoteLayers) -> LayerUse:
    if layer.remote is None:
        size = layers.record(layer.digest).size_bytes
        return LayerUse(digest=layer.digest, size_bytes=size, present_bytes=size)
    try:
        stats = remote.stats_of(layer.digest)
    except NotFoundError:
        return LayerUse(digest=layer.digest, store=layer.remote.store, size_bytes=layer.remote.size, present_bytes=0)
    return _loaded_use(layer.remote, stats)


def _loaded_use(remote: RemoteBlob, stats: LayerStats) -> LayerUse:
    error = stats.error
    return LayerUse(
        digest=stats.digest,
        store=remote.store,
        loaded=True,
        size_bytes=stats.size,
        present_bytes=min(stats.present * stats.chunk_size, stats.size),
        touched_bytes=min(stats.touched * stats.chunk_size, stats.size),
        read_bytes=stats.read_bytes,
        fetched_bytes=stats.fetched_bytes,
        hits=stats.hits,
        misses=stats.misses,
        waiting=stats.waiting,
        errors=stats.errors,
        corrupt=stats.corrupt,
        failure=LoadFailure(error.cause, error.detail) if error is not None else None,
    )


def record_trace(store: EnvironmentStore, remote: RemoteLayers, name: str) -> EnvironmentTrace:
    """Raises EnvironmentNotFoundError, ConflictError when nothing of it was read from a store, UnsupportedError for a
    store that cannot be written, and what else the store raises."""
    traces = traces_of(store.layers, remote, store.get(name).layers)
    if not traces:
        raise ConflictError(
            f"nothing of environment {name!r} has been read from a store",
            hint="make a sandbox from it, do what is usually done there, and ask again",
        )
    return EnvironmentTrace(name=name, layers=traces)


def traces_of(layers: LayerStore, remote: RemoteLayers, digests: Sequence[str]) -> tuple[LayerTrace, ...]:
    """What has been read of each, recorded in its store; without those of which nothing was."""
    traces = []
    for layer in [layers.get(digest) for digest in digests]:
        if layer.remote is None or not remote.loader.is_running():
            continue
        try:
            chunks = remote.record_trace(layer)
        except NotFoundError:
            continue  # no sandbox has begun with it yet
        if chunks:
            traces.append(LayerTrace(digest=layer.digest, chunks=chunks))
    return tuple(traces)
