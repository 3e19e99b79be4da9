"""Layers as people see them: what each is, who has it, and removing one. Blocking."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dsec.core.errors import ConflictError, InvalidArgumentError, NotFoundError, StorageError
from dsec.image.environments import EnvironmentStore
from dsec.storage.layers import LayerRecord
from dsec.wire.layers import LayerInfo


def list_layers(store: EnvironmentStore) -> list[LayerInfo]:
    """All of them, by digest; those that cannot be read are left out (`dsec doctor` counts them)."""
    users, runs = store.users(), _runs(store)
    found = []
    for digest in store.layers.digests():
        try:
            found.append(_info(store.layers.record(digest), users, runs))
        except (NotFoundError, StorageError):
            continue
    return found


def get_layer(store: EnvironmentStore, digest: str) -> LayerInfo:
    """By its digest, or the beginning of it. Raises NotFoundError, InvalidArgumentError when several begin so."""
    return _info(store.layers.record(find_layer(store, digest)), store.users(), _runs(store))


def find_layer(store: EnvironmentStore, digest: str) -> str:
    """Raises NotFoundError, InvalidArgumentError when several begin so."""
    fitting = [known for known in store.layers.digests() if known.startswith(digest)]
    if len(fitting) > 1:
        raise InvalidArgumentError(f"several layers begin with {digest}", hint="give more of the digest")
    if not fitting:
        raise NotFoundError(f"there is no layer {digest[:12]} on this node", hint="`dsec layer ls` shows all")
    return fitting[0]


def remove_layer(store: EnvironmentStore, digest: str, *, live: Collection[str]) -> str:
    """Remove a layer that nothing has; its digest. Raises NotFoundError, ConflictError that says what has it."""
    with store.layers.collecting():
        found = get_layer(store, digest)
        if found.environments:
            raise ConflictError(
                f"layer {found.digest[:12]} is part of {', '.join(found.environments[:5])}",
                hint="remove those first: dsec env rm",
            )
        store.layers.remove(found.digest, live=live)
    return found.digest


def _runs(store: EnvironmentStore) -> Mapping[str, Sequence[str]]:
    return {run.layer: run.of for run in store.runs.all()}


def _info(record: LayerRecord, users: Mapping[str, Sequence[str]], runs: Mapping[str, Sequence[str]]) -> LayerInfo:
    return LayerInfo(
        digest=record.digest,
        kind=str(record.kind),
        size_bytes=record.size_bytes,
        entries=record.entries,
        created_at=record.created_at,
        store=record.remote.store if record.remote is not None else None,
        environments=tuple(users.get(record.digest, ())),
        collapsed=tuple(runs.get(record.digest, ())),
    )
