"""What registries keep of an image: indexes, manifests, and which of several is for this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError, UnsupportedError
from dsec.core.image_names import is_digest
from dsec.wire import codec

OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
OCI_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
DOCKER_CONFIG: Final = "application/vnd.docker.container.image.v1+json"
REF_NAME: Final = "org.opencontainers.image.ref.name"
_INDEXES: Final = (OCI_INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
_OLD: Final = (
    "application/vnd.docker.distribution.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v1+prettyjws",
)
_LAYERS: Final = (OCI_LAYER, "application/vnd.oci.image.layer.nondistributable.v1.tar")
_DOCKER_LAYERS: Final = (
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
)
_COMPRESSIONS: Final = ("", "gzip", "zstd")
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64", "ppc64le": "ppc64le"}


class Platform(msgspec.Struct, omit_defaults=True):
    os: str = ""
    architecture: str = ""
    variant: str = ""


class Descriptor(msgspec.Struct, rename="camel", omit_defaults=True):
    media_type: str = ""
    digest: str = ""
    size: int = 0
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class _Head(msgspec.Struct, rename="camel"):
    """As much of any manifest as tells its kind."""

    schema_version: int = 0
    media_type: str | None = None
    manifests: list[Descriptor] | None = None
    config: Descriptor | None = None
    layers: list[Descriptor] | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """One image, for one platform. Its blobs are within bounds, as far as the manifest tells the truth."""

    config: Descriptor
    layers: tuple[Descriptor, ...]

    def blobs(self) -> tuple[Descriptor, ...]:
        """Each once."""
        return tuple({blob.digest: blob for blob in (self.config, *self.layers)}.values())


def machine() -> Platform:
    """What images must be for to run here."""
    return Platform(os="linux", architecture=_ARCHITECTURES.get(platform.machine(), platform.machine()))


def read_manifest(content: bytes, media_type: str) -> Image | tuple[Descriptor, ...]:
    """The image, or the manifests that an index lists. Raises InvalidArgumentError, LimitError, UnsupportedError."""
    try:
        head: Any = codec.from_json(content, _Head)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"the manifest of the image is not what it should be: {error.message}") from error
    kind = head.media_type or media_type
    if kind in _OLD or head.schema_version == 1:
        raise UnsupportedError(
            "the image is of the first format of all (schema 1)", hint="push it again with a current tool"
        )
    if kind in _INDEXES or (head.manifests is not None and head.config is None):
        return tuple(_checked(item, "manifest") for item in head.manifests or ())
    if head.config is None or head.layers is None:
        raise InvalidArgumentError("the manifest of the image names no configuration or no layers")
    return _image(head.config, head.layers)


def choose(manifests: tuple[Descriptor, ...], here: Platform) -> Descriptor:
    """The one for this machine; of several the plainest variant. Raises UnsupportedError."""
    fitting = [item for item in manifests if _fits(item.platform, here)]
    if not fitting:
        known = sorted({f"{p.os}/{p.architecture}" for m in manifests if (p := m.platform) and p.os != "unknown"})
        raise UnsupportedError(
            f"the image is not there for {here.os}/{here.architecture}",
            hint=f"it is for {', '.join(known)[:200]}" if known else None,
        )
    return min(fitting, key=lambda item: item.platform.variant if item.platform else "")


def _fits(found: Platform | None, here: Platform) -> bool:
    return found is None or (found.os, found.architecture) == (here.os, here.architecture)


def _image(config: Descriptor, layers: list[Descriptor]) -> Image:
    if config.media_type not in (OCI_CONFIG, DOCKER_CONFIG, ""):
        raise UnsupportedError(f"it is not an image that can run, but {config.media_type[:100]!r}")
    if len(layers) > limits.IMAGE_LAYERS_MAX:
        raise LimitError(f"the image has {len(layers)} layers; the most is {limits.IMAGE_LAYERS_MAX}")
    if _checked(config, "configuration").size > limits.IMAGE_MANIFEST_BYTES_MAX:
        raise LimitError(f"the image's configuration has more than {limits.IMAGE_MANIFEST_BYTES_MAX} bytes")
    for layer in layers:
        _check_layer(_checked(layer, "layer"))
    if sum(layer.size for layer in layers) > limits.IMAGE_BYTES_MAX:
        raise LimitError(f"the layers of the image have more than {limits.IMAGE_BYTES_MAX} bytes")
    return Image(config, tuple(layers))


def _check_layer(layer: Descriptor) -> None:
    kind, mark, compression = layer.media_type.partition("+")
    if kind.startswith(_DOCKER_LAYERS) and not mark:
        kind, _, compression = kind.removesuffix(".").partition(".tar")
        kind, compression = f"{kind}.tar", compression.lstrip(".")
    if kind not in (*_LAYERS, *_DOCKER_LAYERS) or compression not in _COMPRESSIONS:
        raise UnsupportedError(f"a layer of the image is {layer.media_type[:100]!r}, which is not known here")


def _checked(item: Descriptor, what: str) -> Descriptor:
    if not is_digest(item.digest) or item.size < 0:
        raise InvalidArgumentError(
            f"a {what} of the image is {item.digest[:80]!r} of {item.size} bytes, which is nothing"
        )
    return item
