"""Pushing: blobs of an image into a repository, each once, and what is there already not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsec.core.errors import NotFoundError
from dsec.core.limits import MIB
from dsec.image.registry.client import Registry
from dsec.image.registry.web import BrokenError

_WHOLE_BYTES_MAX: Final = 8 * MIB  # in one request; larger ones go in pieces, and go on where they broke
_PIECE_BYTES: Final = 32 * MIB

Progress = Callable[[int], None]


def is_there(registry: Registry, digest: str, places: tuple[str, ...]) -> bool:
    """Whether the repository has a blob, if need be by taking it over from another of `places` (HOST/PATH)."""
    if registry.has_blob(digest):
        return True
    for place in places:
        host, _, path = place.partition("/")
        if host != registry.image.host or path == registry.image.path:
            continue
        try:
            url = registry.mount(digest, path)
        except NotFoundError:
            continue
        if url is None:
            return True
        registry.cancel(url)
    return False


def upload(registry: Registry, digest: str, content: bytes | Path, progress: Progress = lambda _: None) -> None:
    """Put a blob into the repository. What broke off goes on where it did, if the registry has kept it."""
    patience = registry.patience()
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    url: str | None = None
    at = 0
    try:
        while True:
            try:
                if url is None:
                    url, at = registry.open_upload(), 0
                if size <= _WHOLE_BYTES_MAX:
                    registry.commit(url, digest, _piece(content, 0, size), size)
                    return
                while at < size:
                    piece = _piece(content, at, _PIECE_BYTES)
                    url = registry.append(url, at, piece)
                    at += len(piece)
                    patience.progressed()
                    progress(at)
                registry.commit(url, digest)
                return
            except (BrokenError, NotFoundError) as error:
                patience.wait(error if isinstance(error, BrokenError) else BrokenError(error.message))
                if registry.has_blob(digest):
                    return  # it was the answer that got lost
                url, at = _where(registry, url, size)
    except BaseException:
        if url is not None:
            registry.cancel(url)
        raise


def _where(registry: Registry, url: str | None, size: int) -> tuple[str | None, int]:
    """Where an upload that broke goes on; None: from the beginning."""
    if url is None or size <= _WHOLE_BYTES_MAX:
        return None, 0
    try:
        url, at = registry.uploaded(url)
    except NotFoundError:
        return None, 0
    return (url, at) if at <= size else (None, 0)


def _piece(content: bytes | Path, at: int, most: int) -> bytes:
    if isinstance(content, bytes):
        return content[at : at + most]
    with content.open("rb") as file:
        file.seek(at)
        return file.read(most)
