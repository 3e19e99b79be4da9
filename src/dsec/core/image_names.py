"""Names of images in registries: `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`, as docker and podman write them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from dsec.core.errors import InvalidArgumentError

DOCKER_HUB: Final = "docker.io"  # what a name without a host means, to everybody
_HUB_NAMES: Final = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
_HUB_OWN: Final = "library"  # where the hub keeps images whose name has one part
TAG_DEFAULT: Final = "latest"
_NAME_CHARS_MAX: Final = 1_024
_PATH_CHARS_MAX: Final = 255  # host and path together, in the distribution's grammar

_LABEL: Final = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]{0,61}[a-zA-Z0-9])"
_HOST: Final = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:.]{{2,45}}\])(?::[0-9]{{1,5}})?\Z")
_PATH: Final = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*\Z")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}\Z|sha512:[0-9a-f]{128}\Z")
_SHAPE: Final = "such as debian:12, registry.example.org/team/tools:1.4 or registry.example.org/tools@sha256:…"


@dataclass(frozen=True, slots=True)
class ImageName:
    """One image of a registry. With a digest it is that one; the tag is then for people."""

    host: str  # with its port, if it has one
    path: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"

    @property
    def repository(self) -> str:
        return f"{self.host}/{self.path}"

    @property
    def reference(self) -> str:
        """What the registry is asked for."""
        return self.digest or self.tag or TAG_DEFAULT

    def pinned(self, digest: str) -> ImageName:
        return replace(self, digest=digest)


def parse_image_name(text: str) -> ImageName:
    """Raises InvalidArgumentError for what is not the name of an image."""
    if len(text) > _NAME_CHARS_MAX or "://" in text:
        raise _wrong(text)
    rest, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise _wrong(text)
    head, slash, last = rest.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and not _TAG.match(tag):
        raise _wrong(text)
    host, path = _split(head + slash + last)
    if not _HOST.match(host) or not _PATH.match(path) or len(host) + len(path) >= _PATH_CHARS_MAX:
        raise _wrong(text)
    if host in _HUB_NAMES:
        host, path = DOCKER_HUB, path if "/" in path else f"{_HUB_OWN}/{path}"
    return ImageName(host, path, tag or None, digest or None)


def parse_registry(text: str) -> str:
    """The host of a registry, with its port, as it stands in names of images. Raises InvalidArgumentError."""
    if not _HOST.match(text) or len(text) >= _PATH_CHARS_MAX:
        raise InvalidArgumentError(f"{text[:80]!r} is not a registry", hint="HOST or HOST:PORT")
    return DOCKER_HUB if text in _HUB_NAMES else text


def is_digest(text: str) -> bool:
    return _DIGEST.match(text) is not None


def _split(name: str) -> tuple[str, str]:
    """Host and path: the first part is a host when it looks like one, which no part of a path does."""
    first, slash, rest = name.partition("/")
    if slash and (first == "localhost" or any(mark in first for mark in ".:[") or first != first.lower()):
        return first, rest
    return DOCKER_HUB, name


def _wrong(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{text[:80]!r} is not the name of an image", hint=_SHAPE)
