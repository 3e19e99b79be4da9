"""An OCI image layout directory: the layers of one image, laid over each other."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError, UnsupportedError
from dsec.image.archive import apply_whiteouts, unpack_layer
from dsec.image.recipes import RECIPE_VERSION
from dsec.image.records import ImageConfig, check_config
from dsec.image.stage import Stage
from dsec.storage.syscalls import RESOLVE_BENEATH, openat2
from dsec.wire import codec
from dsec.wire.environments import OciSource, Ownership

_DIGEST: Final = re.compile(r"(sha256|sha512):([0-9a-f]{64}|[0-9a-f]{128})\Z")
_REFERENCE: Final = "org.opencontainers.image.ref.name"
_NESTING_MAX: Final = 4
_INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


class _Platform(msgspec.Struct):
    os: str = ""
    architecture: str = ""


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    platform: _Platform | None = None
    annotations: dict[str, str] | None = None


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct):
    config: _Descriptor
    layers: list[_Descriptor]


class _Run(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None


class _Config(msgspec.Struct):
    config: _Run | None = None
    os: str = ""
    architecture: str = ""


@dataclass(frozen=True, slots=True)
class OciImage:
    """One image of a layout, chosen and read; its layers are not opened yet."""

    digest: str  # of its manifest
    layers: tuple[_Descriptor, ...]
    config: ImageConfig


def build_key(source: OciSource) -> str:
    """Names the image's manifest, which names all its content."""
    with _layout(source.path) as layout:
        return key_of(source.owner, choose(layout, source.reference).digest)


def key_of(owner: Ownership, manifest: str) -> str:
    """The same for an image wherever it comes from; `manifest` is the digest of its manifest."""
    return hashlib.sha256(f"oci-layers {RECIPE_VERSION} {owner} {manifest}".encode()).hexdigest()


@contextmanager
def opened(source: OciSource) -> Iterator[tuple[ImageConfig, list[OciLayer]]]:
    """What the image says about running it, and its layers, lowest first; to be read within the `with`.

    Raises InvalidArgumentError, LimitError or UnsupportedError.
    """
    with _layout(source.path) as layout:
        image = choose(layout, source.reference)
        yield image.config, [OciLayer(layout, descriptor) for descriptor in image.layers]


class OciLayer:
    """One layer of an image. Its blob is checked against its digest whenever it is read."""

    def __init__(self, layout: int, descriptor: _Descriptor) -> None:
        self._layout = layout
        self._descriptor = descriptor

    @property
    def digest(self) -> str:
        return self._descriptor.digest

    def unpack(self, stage: Stage, *, lowest: bool) -> None:
        """Raises InvalidArgumentError or LimitError. The lowest layer has nothing to hide."""
        if not lowest:
            with _blob(self._layout, self._descriptor) as blob:
                apply_whiteouts(blob, stage)
                blob.finish()
        with _blob(self._layout, self._descriptor) as blob:
            unpack_layer(blob, stage)
            blob.finish()


def fill(source: OciSource, stage: Stage) -> ImageConfig:
    """All layers as one tree. Raises InvalidArgumentError or LimitError."""
    with opened(source) as (config, layers):
        for number, layer in enumerate(layers):
            layer.unpack(stage, lowest=number == 0)
        return config


def choose(layout: int, reference: str | None) -> OciImage:
    """The image called `reference`, or the only one, for linux/amd64. Raises InvalidArgumentError if not clear."""
    index = _decode(_read(layout, b"index.json"), _Index, "index.json")
    descriptor = _select(index.manifests, reference)
    for _ in range(_NESTING_MAX):
        if descriptor.media_type not in _INDEX_TYPES:
            break
        inner = _decode(_small_blob(layout, descriptor), _Index, "image index")
        descriptor = _select(inner.manifests, None)
    else:
        raise LimitError(f"indexes of the image lie more than {_NESTING_MAX} deep in each other")
    manifest = _decode(_small_blob(layout, descriptor), _Manifest, "manifest")
    if len(manifest.layers) > limits.IMAGE_LAYERS_MAX:
        raise LimitError(f"the image has {len(manifest.layers)} layers; the most is {limits.IMAGE_LAYERS_MAX}")
    config = _decode(_small_blob(layout, manifest.config), _Config, "image configuration")
    if (config.os or "linux", config.architecture or "amd64") != ("linux", "amd64"):
        raise UnsupportedError(f"the image is for {config.os}/{config.architecture}; this build runs linux/amd64")
    return OciImage(descriptor.digest, tuple(manifest.layers), _image_config(config.config or _Run()))


def _select(manifests: list[_Descriptor], reference: str | None) -> _Descriptor:
    names = sorted({(m.annotations or {}).get(_REFERENCE, "") for m in manifests} - {""})
    hint = f"it holds: {', '.join(names)}" if names else None
    if reference is not None:
        manifests = [m for m in manifests if (m.annotations or {}).get(_REFERENCE) == reference]
        if not manifests:
            raise InvalidArgumentError(f"the layout has no image {reference[:200]!r}", hint=hint)
    fitting = [
        m for m in manifests if m.platform is None or (m.platform.os, m.platform.architecture) == ("linux", "amd64")
    ]
    if not fitting:
        raise UnsupportedError("the layout has no image for linux/amd64", hint=hint)
    if len({m.digest for m in fitting}) > 1:
        raise InvalidArgumentError(
            "the layout holds several images", hint=f"name one by its reference; {hint or 'none has one'}"
        )
    return fitting[0]


def _image_config(run: _Run) -> ImageConfig:
    workdir = run.working_dir or None
    if workdir is not None and not workdir.startswith("/"):
        workdir = f"/{workdir}"
    config = ImageConfig(
        env=dict(item.split("=", 1) for item in run.env or [] if "=" in item and not item.startswith("=")),
        user=run.user or None,
        workdir=workdir,
        entrypoint=tuple(run.entrypoint or ()),
        command=tuple(run.cmd or ()),
    )
    check_config(config)
    return config


# ---- the layout on disk ----------------------------------------------------------------------------


@contextmanager
def _layout(path: str) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgumentError(f"cannot open the image layout {path!r}: {error.strerror}") from error
    try:
        marker = _decode(_read(fd, b"oci-layout"), dict, "oci-layout")
        if not str(marker.get("imageLayoutVersion", "")).startswith("1."):
            raise InvalidArgumentError(f"{path!r} is not an OCI image layout of version 1")
        yield fd
    finally:
        os.close(fd)


class _Blob:
    """A blob being read, with its size and digest checked at the end."""

    def __init__(self, file: IO[bytes], descriptor: _Descriptor) -> None:
        self._file = file
        self._descriptor = descriptor
        self._hash = hashlib.new(descriptor.digest.split(":")[0])
        self._left = descriptor.size

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        self._hash.update(data)
        return data

    def finish(self) -> None:
        """Raises InvalidArgumentError unless all of it, and nothing else, was there."""
        while self.read(1 << 20):
            pass
        digest = self._descriptor.digest
        if self._left or self._file.read(1) or self._hash.hexdigest() != digest.split(":")[1]:
            raise InvalidArgumentError(
                f"the blob {digest[:19]}… of the image is damaged: its content has another digest"
            )


@contextmanager
def _blob(layout: int, descriptor: _Descriptor) -> Iterator[_Blob]:
    match = _DIGEST.match(descriptor.digest)
    if not match or descriptor.size < 0 or len(match[2]) != {"sha256": 64, "sha512": 128}[match[1]]:
        raise InvalidArgumentError(f"{descriptor.digest[:80]!r} of {descriptor.size} bytes is not a blob")
    with _open(layout, f"blobs/{match[1]}/{match[2]}".encode()) as file:
        yield _Blob(file, descriptor)


def _small_blob(layout: int, descriptor: _Descriptor) -> bytes:
    if descriptor.size > limits.IMAGE_MANIFEST_BYTES_MAX:
        raise LimitError(f"a manifest of {descriptor.size} bytes; the most is {limits.IMAGE_MANIFEST_BYTES_MAX}")
    with _blob(layout, descriptor) as blob:
        data = blob.read()
        blob.finish()
        return data


def _read(layout: int, name: bytes) -> bytes:
    with _open(layout, name) as file:
        data = file.read(limits.IMAGE_MANIFEST_BYTES_MAX + 1)
    if len(data) > limits.IMAGE_MANIFEST_BYTES_MAX:
        raise LimitError(f"{os.fsdecode(name)} of the layout is over {limits.IMAGE_MANIFEST_BYTES_MAX} bytes")
    return data


@contextmanager
def _open(layout: int, name: bytes) -> Iterator[IO[bytes]]:
    try:
        fd = openat2(layout, name, os.O_RDONLY | os.O_NONBLOCK, resolve=RESOLVE_BENEATH)
    except OSError as error:
        raise InvalidArgumentError(f"the image layout has no readable {os.fsdecode(name)}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidArgumentError(f"{os.fsdecode(name)} of the image layout is not a file")
        yield file


def _decode(data: bytes, kind: type[Any], what: str) -> Any:
    try:
        return codec.from_json(data, kind)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"the {what} of the image layout is not what it should be: {error.message}"
        ) from error
