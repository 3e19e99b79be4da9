"""Environments in stores: their records, how one is pushed, and how one is attached. Blocking."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError, NotFoundError, StorageError, UnsupportedError
from dsec.core.references import TAG_DEFAULT, Reference, parse_reference, parse_tagged
from dsec.core.spec import Environment
from dsec.core.units import format_size
from dsec.image.environments import EnvironmentStore
from dsec.image.make import Report, progress
from dsec.image.recipes import RECIPE_VERSION
from dsec.image.records import ImageConfig, check_config, record_digest, stack_layers
from dsec.storage.layers import LayerKind, LayerLocation, LayerStore, Lease
from dsec.storage.store.format import STORE_VERSION
from dsec.storage.store.places import Place, WebPlace, open_place
from dsec.storage.store.publish import attach_layer, is_published, publish_layer, require_store, sealed_digest
from dsec.wire import codec
from dsec.wire.environments import EnvironmentInfo, PushRequest, StoreSource

_ATTACHES: Final = 3  # tries to hold a layer that is removed again at the same moment


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`images/<name>/<tag>.json` in a store, published after its layers. Readers ignore unknown fields."""

    version: int = STORE_VERSION
    name: str  # NAME, or NAME:TAG
    layers: tuple[str, ...]  # digests, lowest first; of a composed environment those of its parts
    config: ImageConfig = ImageConfig()
    source: str  # for people: what it was built from
    created_at: float


def image_path(name: str) -> str:
    reference = parse_tagged(name)
    return f"images/{reference.name}/{reference.tag}.json"


def read_image(source: StoreSource) -> ImageRecord:
    """Raises NotFoundError, UnavailableError; StorageError or LimitError for a record that cannot be used."""
    place = open_place(source.url)
    require_store(place)
    try:
        content = _content(place, source.environment)
    except NotFoundError as error:
        raise NotFoundError(
            f"the store {place.url} has no environment {source.environment!r}",
            hint=f"push it from a node that has it: dsec env push {source.environment} {place.url}",
        ) from error
    if len(content) > limits.IMAGE_MANIFEST_BYTES_MAX:
        raise LimitError(f"the record of an environment has at most {limits.IMAGE_MANIFEST_BYTES_MAX} bytes")
    try:
        image = codec.from_json(content, ImageRecord)
        check_config(image.config)
    except InvalidArgumentError as error:
        raise StorageError(f"environment {source.environment!r} of the store is not understood: {error}") from error
    if image.version != STORE_VERSION or image.name != str(parse_tagged(source.environment)) or not image.layers:
        raise StorageError(f"the store {place.url} has another environment, or version, as {source.environment!r}")
    if len(image.layers) > limits.IMAGE_LAYERS_MAX:
        raise LimitError(f"an image has at most {limits.IMAGE_LAYERS_MAX} layers, not {len(image.layers)}")
    found = record_digest(image.layers, image.config)
    if source.digest is not None and not found.startswith(source.digest):
        raise StorageError(
            f"environment {source.environment!r} of the store is {found[:12]}, and not {source.digest[:12]}",
            hint="it was pushed again, or somebody has changed it",
        )
    return image


def _content(place: Place, name: str) -> bytes:
    try:
        return place.get(image_path(name))
    except NotFoundError:
        reference = parse_tagged(name)
        if reference.tag != TAG_DEFAULT:
            raise
        return place.get(f"images/{reference.name}.json")  # of a version before there were tags


def build_key(source: StoreSource, image: ImageRecord) -> str:
    """Names what the store says now: an environment that was pushed again is another one."""
    content = codec.to_json((source.url.rstrip("/"), image))
    return hashlib.sha256(b"store %d " % RECIPE_VERSION + content).hexdigest()


@contextmanager
def attached(layers: LayerStore, image: ImageRecord, source: StoreSource, report: Report) -> Iterator[None]:
    """All layers are usable, and held, for the time of the `with`; their content stays in the store."""
    place = open_place(source.url)
    with ExitStack() as held:
        for number, digest in enumerate(image.layers, 1):
            progress(report, "attach", f"layer {number} of {len(image.layers)}, {digest[:12]}")
            held.enter_context(_attach(layers, digest, place))
        yield


def _attach(layers: LayerStore, digest: str, place: Place) -> Lease:
    for _ in range(_ATTACHES):
        attach_layer(layers, digest, place)
        try:
            return layers.lease([digest])
        except NotFoundError:
            continue  # collected in between: nothing names it yet
    raise StorageError(f"layer {digest[:12]} is removed as soon as it is here", hint="ask again")


def push_now(store: EnvironmentStore, request: PushRequest, report: Report) -> EnvironmentInfo:
    """Put an environment into a store, layers first and its record last; what is there already is left as it is.

    The answer has the digests of the store: they name all that will ever be read of it, wherever it is pulled.
    Raises UnsupportedError for layers kept as directories and for stores that cannot be written, and what the store
    raises. After an error the store has whole layers that nothing names, at worst.
    """
    place = open_place(request.store)
    if isinstance(place, WebPlace):
        raise UnsupportedError(
            f"the store {place.url} is read only", hint="push to the directory or bucket that the web server serves"
        )
    locked, lease = store.acquire(Environment(base=request.name), collapsed=False)
    with lease:
        _check_kinds(request.name, locked.layers)
        require_store(place, make=True)
        sealed = []
        for number, layer in enumerate(locked.layers, 1):
            what = f"layer {number} of {len(locked.layers)}, {layer.digest[:12]}"
            sealed.append(_push_layer(store.layers, layer, place, what, report))
        layers = stack_layers([sealed])
        info = store.get(request.name)
        reference = parse_reference(request.name)
        name = str(reference if reference.digest is None else Reference(reference.name))
        config = ImageConfig(
            env=locked.env,
            user=locked.user,
            workdir=locked.workdir,
            entrypoint=locked.entrypoint,
            command=locked.command,
        )
        image = ImageRecord(name=name, layers=layers, config=config, source=info.source, created_at=info.created_at)
        progress(report, "publish", f"naming it {name}")
        content = codec.to_json(image)
        if _present(place, name) != content:
            place.put(image_path(name), content)
        sizes = dict(zip(sealed, info.layer_bytes, strict=False))
        return msgspec.structs.replace(
            info,
            digest=record_digest(layers, config),
            layers=layers,
            layer_bytes=tuple(sizes.get(digest, 0) for digest in layers),
        )


def _present(place: Place, name: str) -> bytes | None:
    try:
        return place.get(image_path(name))
    except NotFoundError:
        return None


def _check_kinds(name: str, layers: tuple[LayerLocation, ...]) -> None:
    for layer in layers:
        if layer.kind is not LayerKind.EROFS:
            raise UnsupportedError(
                f"environment {name!r} has layer {layer.digest[:12]} as a directory, which cannot be pushed",
                hint="it needs EROFS images: see `dsec doctor`, and build it again with --refresh --replace",
            )


def _push_layer(layers: LayerStore, layer: LayerLocation, place: Place, what: str, report: Report) -> str:
    """What the store calls it."""
    name = sealed_digest(layers, layer.digest)
    if is_published(place, name):
        progress(report, "push", f"{what}: it is there already")
        return name
    progress(report, "wait", f"{what}: waiting for others who push it, if there are any")
    key = hashlib.sha256(f"push {place.url} {layer.digest}".encode()).hexdigest()
    with layers.single_flight(key):
        size = layer.blob.stat().st_size if layer.blob is not None else 0
        progress(report, "push", f"{what}, {format_size(size)}")
        return publish_layer(layers, layer.digest, place).digest
