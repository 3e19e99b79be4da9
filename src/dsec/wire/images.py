"""Environments as images of the OCI: where they are exported to. Where they come from is in `wire.environments`."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgumentError
from dsec.core.image_names import parse_image_name
from dsec.core.references import parse_reference
from dsec.core.spec import check_path

_NAME_CHARS_MAX: Final = 255


class Compression(enum.StrEnum):
    """Of the layers of an image."""

    GZIP = "gzip"  # every tool takes it
    ZSTD = "zstd"  # quicker and smaller; not for tools before 2021
    NONE = "none"


class RegistryTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="registry"):
    """A repository of a registry, by the name of the image to be: HOST/PATH:TAG."""

    image: str
    compression: Compression = Compression.GZIP

    def __post_init__(self) -> None:
        if parse_image_name(self.image).digest is not None:
            raise InvalidArgumentError("an image is pushed by a tag; its digest is what it becomes")


class LayoutTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="oci"):
    """An OCI image layout directory of the node, made or added to."""

    path: str
    reference: str | None = None  # what the image is called there; None: the environment's name
    compression: Compression = Compression.GZIP

    def __post_init__(self) -> None:
        _check_target(self.path, self.reference)


class ArchiveTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="docker-archive"):
    """A tar file of the node, as `docker save` makes them and `docker load` takes them; replaced if it is there."""

    path: str
    reference: str | None = None  # NAME:TAG that it gets when it is loaded; None: the environment's name

    def __post_init__(self) -> None:
        _check_target(self.path, self.reference)


ExportTarget = RegistryTarget | LayoutTarget | ArchiveTarget


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an environment is to become an image."""

    target: ExportTarget


class ExportRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Make the environment `name` an image somewhere else; again: success."""

    name: str
    target: ExportTarget

    def __post_init__(self) -> None:
        parse_reference(self.name)


class ExportedImage(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment has become."""

    reference: str  # HOST/PATH@DIGEST of a registry; the path of a file or directory
    digest: str  # of the image's manifest
    size_bytes: int  # of its blobs
    sent_bytes: int = 0  # of these, what was not there


def _check_target(path: str, reference: str | None) -> None:
    check_path(path)
    if not path.startswith("/") or path.rstrip("/").rpartition("/")[2] in ("", ".", ".."):
        raise InvalidArgumentError(f"the path of an image must be absolute, and is {path[:80]!r}")
    if reference is not None and (not 0 < len(reference) <= _NAME_CHARS_MAX or not reference.isprintable()):
        raise InvalidArgumentError(f"{reference[:80]!r} is not what an image can be called")
