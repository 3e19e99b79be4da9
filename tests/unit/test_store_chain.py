"""A store, whoever has it in hand, serves nothing else than what a digest names: metadata, index, and each chunk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import DsecError, InvalidArgumentError, StorageError
from dsec.image.environments import EnvironmentStore
from dsec.image.published import ImageRecord, image_path, push_now
from dsec.image.records import record_digest
from dsec.image.worker import build_now
from dsec.storage.layers import LayerStore
from dsec.storage.store import format
from dsec.storage.store.places import DirectoryPlace
from dsec.storage.store.publish import attach_layer, publish_layer, read_manifest, sealed_digest
from dsec.wire import codec
from dsec.wire.environments import BuildRequest, EnvironmentInfo, PushRequest, StoreSource
from tests.unit.test_image_published import CONFIG, LOWER, UPPER, add_layer, name

GOOD, EVIL = "a" * 64, "b" * 64


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    store = EnvironmentStore(tmp_path / "state")
    add_layer(store, LOWER, blob=os.urandom(3 * format.CHUNK_BYTES))
    add_layer(store, UPPER)
    name(store, "tools", (LOWER, UPPER))
    return store


@pytest.fixture
def place(tmp_path: Path) -> DirectoryPlace:
    return DirectoryPlace(tmp_path / "shared")


def push_it(store: EnvironmentStore, place: DirectoryPlace) -> EnvironmentInfo:
    return push_now(store, PushRequest(name="tools", store=place.url), lambda event: None)


def pull(state: Path, place: DirectoryPlace, digest: str | None = None) -> EnvironmentInfo:
    source = StoreSource(url=place.url, environment="tools", digest=digest)
    return build_now(EnvironmentStore(state), BuildRequest(name="mine", source=source), lambda event: None)


def test_the_digest_that_a_push_tells_is_that_of_every_node_that_pulls(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path
) -> None:
    there = push_it(store, place)

    for node, pin in (("one", None), ("two", there.digest), ("three", there.digest[:12])):
        found = pull(tmp_path / node, place, pin)
        assert (found.digest, found.layers) == (there.digest, there.layers)
    assert there.layers == tuple(sealed_digest(store.layers, digest) for digest in (LOWER, UPPER))


@pytest.mark.parametrize(
    "change",
    [
        lambda image, other: msgspec.structs.replace(image, layers=(*image.layers, other)),
        lambda image, other: msgspec.structs.replace(image, layers=image.layers[:1]),
        lambda image, other: msgspec.structs.replace(image, layers=image.layers[::-1]),
        lambda image, other: msgspec.structs.replace(
            image, config=msgspec.structs.replace(CONFIG, env={"LD_PRELOAD": "/x"})
        ),
        lambda image, other: msgspec.structs.replace(
            image, config=msgspec.structs.replace(CONFIG, entrypoint=("/bin/evil",))
        ),
    ],
)
def test_of_a_pinned_environment_nothing_can_be_changed(
    store: EnvironmentStore,
    place: DirectoryPlace,
    tmp_path: Path,
    change: Callable[[ImageRecord, str], ImageRecord],
) -> None:
    there = push_it(store, place)
    add_layer(store, EVIL, blob=b"evil")
    other = publish_layer(store.layers, EVIL, place).digest
    image = codec.from_json(place.get(image_path("tools")), ImageRecord)
    place.put(image_path("tools"), codec.to_json(change(image, other)))

    with pytest.raises(StorageError, match="and not"):
        pull(tmp_path / "other", place, there.digest)

    assert LayerStore(tmp_path / "other").digests() == []
    assert pull(tmp_path / "other", place).digest != there.digest  # whoever pins nothing gets what is said


@pytest.mark.parametrize("digest", ["", "abc", "g" * 12, "A" * 64, "a" * 65])
def test_what_is_no_digest_is_refused(digest: str) -> None:
    with pytest.raises(InvalidArgumentError):
        StoreSource(url="file:///x", environment="tools", digest=digest)


def lie_with_all(place: DirectoryPlace, good: str, evil: str) -> None:
    """All of another layer, under the name of this one."""
    manifest = read_manifest(place, evil)
    place.put(format.manifest_path(good), codec.to_json(msgspec.structs.replace(manifest, digest=good)))


def lie_with_meta(place: DirectoryPlace, good: str, evil: str) -> None:
    """Files with other owners and names, of the right data."""
    ref, packed = format.pack_object(b"other metadata")
    place.put(format.object_path("meta", ref.sha256), packed)
    put(place, good, meta=ref)


def lie_with_index(place: DirectoryPlace, good: str, evil: str) -> None:
    """One chunk is another one, which the store has."""
    manifest, other = read_manifest(place, good), read_manifest(place, evil)
    assert manifest.blob is not None
    assert other.blob is not None
    mine, theirs = indices(place, manifest), indices(place, other)
    ref, packed = format.pack_object(mine[:48] + theirs[48:96] + mine[96:])
    place.put(format.object_path("index", ref.sha256), packed)
    put(place, good, blob=msgspec.structs.replace(manifest.blob, index=ref))


def lie_with_a_hole(place: DirectoryPlace, good: str, evil: str) -> None:
    """Zeros instead of a chunk: of what is never fetched nobody computes a hash."""
    manifest = read_manifest(place, good)
    assert manifest.blob is not None
    mine = indices(place, manifest)
    ref, packed = format.pack_object(bytes(12) + mine[12:])
    place.put(format.object_path("index", ref.sha256), packed)
    put(place, good, blob=msgspec.structs.replace(manifest.blob, index=ref))


def lie_with_the_size(place: DirectoryPlace, good: str, evil: str) -> None:
    manifest = read_manifest(place, good)
    assert manifest.blob is not None
    put(place, good, blob=msgspec.structs.replace(manifest.blob, size=manifest.blob.size - 1))


def lie_with_nothing(place: DirectoryPlace, good: str, evil: str) -> None:
    """A layer without data: its files would be empty."""
    put(place, good, blob=None)


def indices(place: DirectoryPlace, manifest: format.LayerManifest) -> bytes:
    assert manifest.blob is not None
    ref = manifest.blob.index
    return format.unpack_object(ref, place.get(format.object_path("index", ref.sha256)))


def put(place: DirectoryPlace, digest: str, **changes: object) -> None:
    manifest = msgspec.structs.replace(read_manifest(place, digest), **changes)
    place.put(format.manifest_path(digest), codec.to_json(manifest))


@pytest.mark.parametrize(
    "lie", [lie_with_all, lie_with_meta, lie_with_index, lie_with_a_hole, lie_with_the_size, lie_with_nothing]
)
def test_a_layer_that_its_digest_does_not_name_is_not_attached(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path, lie: Callable[[DirectoryPlace, str, str], None]
) -> None:
    for digest in (GOOD, EVIL):
        add_layer(store, digest, blob=os.urandom(3 * format.CHUNK_BYTES))
    good, evil = (publish_layer(store.layers, digest, place).digest for digest in (GOOD, EVIL))
    before = place.get(format.manifest_path(good))
    node = LayerStore(tmp_path / "node")
    lie(place, good, evil)

    with pytest.raises(StorageError):
        attach_layer(node, good, place)

    assert node.digests() == []
    place.put(format.manifest_path(good), before)
    assert attach_layer(node, good, place).digest == good


def test_a_store_cannot_give_content_to_the_name_of_a_layer_of_the_node(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path
) -> None:
    """Names of layers that are built here are of trees: none is what any store's layer is called."""
    push_it(store, place)
    evil = publish_layer(store.layers, UPPER, place).digest
    lie_with_all(place, LOWER, evil)
    image = codec.from_json(place.get(image_path("tools")), ImageRecord)
    lying = msgspec.structs.replace(image, layers=(LOWER,))
    place.put(image_path("tools"), codec.to_json(lying))

    with pytest.raises(DsecError):
        pull(tmp_path / "other", place)

    assert LayerStore(tmp_path / "other").digests() == []


def test_a_layer_that_comes_from_a_store_has_the_same_name_in_the_next(
    store: EnvironmentStore, place: DirectoryPlace, tmp_path: Path
) -> None:
    there = push_it(store, place)
    pull(tmp_path / "other", place)
    node = LayerStore(tmp_path / "other")

    assert tuple(sealed_digest(node, digest) for digest in there.layers) == there.layers
    assert record_digest(there.layers, CONFIG) == there.digest
