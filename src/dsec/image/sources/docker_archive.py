"""A tar file with images, of `docker save` or `skopeo copy … oci-archive:`, taken apart into an OCI image layout."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.image_names import TAG_DEFAULT, parse_image_name
from dsec.image.archive import ArchivedFile, files_of
from dsec.image.recipes import RECIPE_VERSION
from dsec.image.registry.images import OCI_CONFIG, OCI_LAYER, OCI_MANIFEST, Descriptor
from dsec.image.registry.pull import write_layout
from dsec.image.sources.tarball import open_file
from dsec.image.stage import Content
from dsec.storage.space import require_free
from dsec.wire import codec
from dsec.wire.environments import DockerArchiveSource, OciSource

_PIECE_BYTES: Final = 1 << 20
_SPACE_CHECK_BYTES: Final = 64 << 20
_BLOB: Final = re.compile(r"blobs/(sha256/[0-9a-f]{64}|sha512/[0-9a-f]{128})\Z")
_LAYOUT_FILES: Final = ("index.json", "oci-layout")
_FILES_MAX: Final = 16 * limits.IMAGE_LAYERS_MAX  # members that are looked at: an archive may hold several images
_LINKS_MAX: Final = 8  # that stand for each other


class _Saved(msgspec.Struct, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class _Contents:
    """What a first look at the archive finds."""

    def __init__(self) -> None:
        self.saved: list[_Saved] | None = None
        self.links: dict[str, str] = {}
        self.names: set[str] = set()

    def place_of(self, name: str) -> str:
        """The file that a name of the list stands for."""
        place = posixpath.normpath(name)
        for _ in range(_LINKS_MAX):
            if place in self.names:
                return place
            if place not in self.links:
                break
            place = self.links[place]
        raise InvalidArgumentError(f"the archive has no file {name[:200]!r}, which its list of images names")


def build_key(source: DockerArchiveSource) -> str:
    """Names the file's bytes, and which of its images is meant."""
    with open_file(source.path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    words = f"docker-archive {RECIPE_VERSION} {source.owner} {digest} {source.reference or ''}"
    return hashlib.sha256(words.encode()).hexdigest()


def to_layout(source: DockerArchiveSource, layout: Path) -> OciSource:
    """Make the directory `layout` an image layout with the image that is meant; what is built instead.

    Raises InvalidArgumentError or LimitError for a file that is no such archive.
    """
    for algorithm in ("sha256", "sha512"):
        (layout / "blobs" / algorithm).mkdir(parents=True)
    with open_file(source.path) as file:
        contents = _look(file)
        file.seek(0)
        if contents.saved is None:
            _unpack_layout(file, layout, contents)
            return OciSource(os.fspath(layout), source.reference, source.owner)
        _unpack_image(file, layout, contents, _select(contents.saved, source.reference))
    return OciSource(os.fspath(layout), None, source.owner)


def _look(file: Any) -> _Contents:
    found = _Contents()
    for member in _bounded(file):
        if member.target is not None:
            found.links[member.name] = member.target
            continue
        found.names.add(member.name)
        if member.name == "manifest.json":
            found.saved = _decode(_small(member), list[_Saved])
    return found


def _bounded(file: Any) -> Iterator[ArchivedFile]:
    for number, member in enumerate(files_of(file)):
        if number >= _FILES_MAX:
            raise LimitError(f"an archive of images has at most {_FILES_MAX} files", hint="is it one?")
        yield member


def _select(images: list[_Saved], reference: str | None) -> _Saved:
    names = sorted({name for image in images for name in image.repo_tags or ()})
    hint = f"it holds: {', '.join(names)[:500]}" if names else None
    if reference is not None:
        wanted = _full(reference)
        images = [image for image in images if wanted in map(_full, image.repo_tags or ())]
        if not images:
            raise InvalidArgumentError(f"the archive has no image {reference[:200]!r}", hint=hint)
    if len(images) != 1:
        raise InvalidArgumentError(
            f"the archive holds {len(images)} images", hint=f"name one by its reference; {hint or 'none has one'}"
        )
    image = images[0]
    if len(image.layers) > limits.IMAGE_LAYERS_MAX:
        raise LimitError(f"the image has {len(image.layers)} layers; the most is {limits.IMAGE_LAYERS_MAX}")
    return image


def _full(name: str) -> str:
    """However short somebody has written it."""
    try:
        image = parse_image_name(name)
    except InvalidArgumentError:
        return name
    return f"{image.repository}:{image.tag or TAG_DEFAULT}"


def _unpack_image(file: Any, layout: Path, contents: _Contents, image: _Saved) -> None:
    config = contents.place_of(image.config)
    layers = [contents.place_of(name) for name in image.layers]
    blobs: dict[str, Descriptor] = {}
    left = limits.IMAGE_BYTES_MAX
    for member in _bounded(file):
        if member.target is None and member.name in (config, *layers):
            most = limits.IMAGE_MANIFEST_BYTES_MAX if member.name == config else left
            blobs[member.name] = _store(member.content, layout, most)
            left -= blobs[member.name].size
    manifest = codec.to_json(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": _typed(blobs[config], OCI_CONFIG),
            "layers": [_typed(blobs[name], OCI_LAYER) for name in layers],
        }
    )
    write_layout(layout, manifest, f"sha256:{hashlib.sha256(manifest).hexdigest()}", OCI_MANIFEST)


def _unpack_layout(file: Any, layout: Path, contents: _Contents) -> None:
    if not contents.names.issuperset(_LAYOUT_FILES):
        raise InvalidArgumentError(
            "the file holds no list of images", hint="it is taken as `docker save` makes it; for a tree use --tar"
        )
    left = limits.IMAGE_BYTES_MAX
    for member in _bounded(file):
        if member.target is not None:
            continue
        if member.name in _LAYOUT_FILES:
            (layout / member.name).write_bytes(_small(member))
        elif match := _BLOB.match(member.name):
            blob = _store(member.content, layout, left, name=match[1])
            left -= blob.size


def _store(content: Content, layout: Path, most: int, *, name: str | None = None) -> Descriptor:
    """A blob by what it hashes to; or by the name that it has, which is checked when it is used."""
    draft = layout / "draft"
    digest = hashlib.sha256()
    size = 0
    with draft.open("wb") as file:
        while piece := content.read(_PIECE_BYTES):
            if size // _SPACE_CHECK_BYTES != (size + len(piece)) // _SPACE_CHECK_BYTES:
                require_free(layout)
            size += len(piece)
            if size > most:
                raise LimitError(f"the archive holds more than {most} bytes where no more are taken")
            digest.update(piece)
            file.write(piece)
    draft.replace(layout / "blobs" / (name or f"sha256/{digest.hexdigest()}"))
    return Descriptor(digest=f"sha256:{digest.hexdigest()}", size=size)


def _typed(blob: Descriptor, media_type: str) -> Descriptor:
    return msgspec.structs.replace(blob, media_type=media_type)


def _small(member: ArchivedFile) -> bytes:
    if member.size > limits.IMAGE_MANIFEST_BYTES_MAX:
        raise LimitError(f"{member.name} of the archive has more than {limits.IMAGE_MANIFEST_BYTES_MAX} bytes")
    content = b""
    while piece := member.content.read(_PIECE_BYTES):
        content += piece
    return content


def _decode(content: bytes, kind: Any) -> Any:
    try:
        return codec.from_json(content, kind)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"the archive's list of images is not what it should be: {error.message}") from error
