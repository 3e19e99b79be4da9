"""Blobs of images on this disk: what a pull has got stays for a while, so that the next one, or the same again, has it.

    <state>/oci/blobs/sha256/<hexadecimal>       whole and checked; its time is that of the last use
    <state>/oci/partial/<algorithm>-<hexadecimal>  being fetched, by who holds a lock on it; or where it broke
    <state>/oci/packed/<layer>.<compression>     which blob a layer becomes when it is pushed

It is a cache: all of it may be removed at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from dsec.core.errors import InvalidArgumentError, StorageError
from dsec.core.image_names import is_digest
from dsec.image.registry.client import Registry
from dsec.image.registry.web import Answer, BrokenError, host_of
from dsec.storage.layers import sync
from dsec.storage.locks import is_same, try_lock
from dsec.storage.space import FULL, require_free, store_full
from dsec.wire import codec

_PIECE_BYTES: Final = 1 << 20
_SPACE_CHECK_BYTES: Final = 64 << 20
_UNUSED_S_MAX: Final = 7 * 24 * 3_600.0
_STALE_PARTIAL_S: Final = 24 * 3_600.0
_SLOW_S: Final = 60.0  # a download that gets less than _SLOW_BYTES in it is begun anew where it is
_SLOW_BYTES: Final = 32 * 1_024
_SPOILT_MAX: Final = 2  # times that a blob may arrive whole and be another

_PROGRESS_BYTES: Final = 65_536  # that give a download all its tries back

Progress = Callable[[int], None]


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """The blob that a layer has become. Packing it again gives the same bytes."""

    version: int = 1
    digest: str
    size: int
    diff_id: str  # of the tar inside
    media_type: str
    places: tuple[str, ...] = ()  # HOST/PATH of repositories that have it, the last one first


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    size: int
    used_at: float


class BlobCache:
    """The blobs below one state directory. Safe for use by many processes and threads at once."""

    def __init__(self, state: Path) -> None:
        self.root = state / "oci"
        self._partial = self.root / "partial"
        self._packed = self.root / "packed"
        try:
            for directory in (self.root, self._partial, self._packed, *map(self._directory, ("sha256", "sha512"))):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make the cache of images {self.root}: {error.strerror}") from error

    # ---- getting ------------------------------------------------------------------------------

    def link(self, digest: str, size: int, target: Path) -> bool:
        """Make `target` that blob, if it is here: it stays there whatever is collected. Same file system."""
        path = self.path(digest)
        try:
            if path.stat().st_size != size:
                path.unlink()  # of a disk that has lost something
                return False
            os.utime(path)
            os.link(path, target)
        except FileNotFoundError:
            return False
        return True

    def fetch(
        self, registry: Registry, digest: str, size: int, target: Path, progress: Progress = lambda _: None
    ) -> None:
        """Make `target` that blob, from here or from the registry; `progress` hears how many of its bytes are here.

        What another process is fetching is waited for. What has come before an error stays for the next try.
        Raises StorageError for content that is not what the digest says, CapacityError, and what the registry raises.
        """
        if not is_digest(digest):
            raise InvalidArgumentError(f"{digest[:80]!r} is not the digest of a blob")
        while not self.link(digest, size, target):
            with self._fetching(digest) as file:
                if not self.path(digest).exists():  # by who held the lock before us
                    _fetch(registry, digest, size, file, self.root, progress)
                    self._keep(file, digest)

    def adopt(self, file: Path, digest: str) -> None:
        """Keep a blob that was made here. `file` (same file system) stays where it is."""
        with suppress(FileExistsError):
            os.link(file, self.path(digest))

    def path(self, digest: str) -> Path:
        algorithm, _, name = digest.partition(":")
        return self._directory(algorithm) / name

    def _directory(self, algorithm: str) -> Path:
        return self.root / "blobs" / algorithm

    @contextmanager
    def _fetching(self, digest: str) -> Iterator[IO[bytes]]:
        """The partial file, to read and write, for us alone."""
        path = self._partial / digest.replace(":", "-")
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "r+b", buffering=0) as file:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if is_same(fd, path):
                    yield file
                    return

    def _keep(self, file: IO[bytes], digest: str) -> None:
        os.fsync(file.fileno())
        target = self.path(digest)
        (self._partial / digest.replace(":", "-")).replace(target)
        sync(target.parent)

    # ---- what layers become -------------------------------------------------------------------

    def packed(self, layer: str, compression: str) -> Packed | None:
        try:
            return codec.from_json((self._packed / f"{layer}.{compression}").read_bytes(), Packed)
        except (FileNotFoundError, InvalidArgumentError):
            return None

    def note(self, layer: str, compression: str, packed: Packed) -> None:
        path = self._packed / f"{layer}.{compression}"
        draft = path.with_name(f".{path.name}-{os.getpid()}")
        draft.write_bytes(codec.to_json(packed))
        draft.replace(path)

    # ---- bounds -------------------------------------------------------------------------------

    def collect(self, bytes_max: int) -> int:
        """Remove what nobody has used for long, and the least used over `bytes_max`; how many bytes."""
        removed = 0
        now = time.time()
        for path in list(self._partial.iterdir()):
            removed += _remove_partial(path, now)
        files = sorted(self._files(), key=lambda file: file.used_at)
        total = sum(file.size for file in files)
        for file in files:
            if total <= bytes_max and now - file.used_at < _UNUSED_S_MAX:
                continue
            file.path.unlink(missing_ok=True)
            total -= file.size
            removed += file.size
        for path in list(self._packed.iterdir()):
            with suppress(FileNotFoundError):
                if now - path.stat().st_mtime > _UNUSED_S_MAX:
                    path.unlink()
        return removed

    def _files(self) -> Iterator[_File]:
        for directory in (self.root / "blobs").iterdir():
            for path in directory.iterdir():
                with suppress(FileNotFoundError):
                    info = path.stat()
                    yield _File(path, info.st_size, info.st_mtime)


def _fetch(registry: Registry, digest: str, size: int, file: IO[bytes], root: Path, progress: Progress) -> None:
    """All of a blob into `file`, which may hold the beginning of it."""
    patience = registry.patience()
    spoilt = most = 0
    while True:
        have, found = _hashed(file, digest, size)
        progress(have)
        if have == size and found == digest:
            return
        if have == size:
            file.truncate(0)
            spoilt += 1
            if spoilt >= _SPOILT_MAX:
                raise StorageError(f"the blob {digest[:19]}… of {registry.image.repository} is not what its name says")
            have = 0
        require_free(root, size - have)
        try:
            _download(registry, digest, size, file, root, progress)
        except BrokenError as error:
            # More than ever before, and not by single bytes: otherwise it would go on for ever.
            if (now := os.fstat(file.fileno()).st_size) >= most + _PROGRESS_BYTES:
                most = now
                patience.progressed()
            patience.wait(error)


def _hashed(file: IO[bytes], digest: str, size: int) -> tuple[int, str]:
    """How many bytes are here, and their digest. More than there should be is nothing."""
    algorithm = digest.partition(":")[0]
    hashed = hashlib.new(algorithm)
    if os.fstat(file.fileno()).st_size > size:
        file.truncate(0)
    file.seek(0)
    have = 0
    while piece := file.read(_PIECE_BYTES):
        hashed.update(piece)
        have += len(piece)
    return have, f"{algorithm}:{hashed.hexdigest()}"


def _download(registry: Registry, digest: str, size: int, file: IO[bytes], root: Path, progress: Progress) -> None:
    """What is missing at the end of `file`, in one try. Raises BrokenError, with what came kept."""
    have = os.fstat(file.fileno()).st_size
    with registry.blob(digest, start=have) as answer:
        if answer.status == 416:  # it is shorter there
            file.truncate(0)
            raise BrokenError(f"{host_of(answer.url)} has not so much of {digest[:19]}…")
        if answer.status != 206:  # all of it again: there are registries that know no ranges
            have = 0
        elif not answer.header("Content-Range").startswith(f"bytes {have}-"):
            raise StorageError(f"{host_of(answer.url)} gives another part of a blob than was asked for")
        file.truncate(have)
        file.seek(have)
        _copy(answer, file, have, size, root, progress)


def _copy(answer: Answer, file: IO[bytes], at: int, size: int, root: Path, progress: Progress) -> None:
    unchecked = 0
    mark, mark_at = time.monotonic(), at
    # What goes on after `size` is not read: the digest tells whether it is the blob.
    while at < size and (piece := answer.read(min(_PIECE_BYTES, size - at))):
        _write_all(file, piece)
        at += len(piece)
        progress(at)
        unchecked += len(piece)
        if unchecked >= _SPACE_CHECK_BYTES:
            unchecked = 0
            require_free(root)
        if (now := time.monotonic()) - mark > _SLOW_S:
            if at - mark_at < _SLOW_BYTES:
                raise BrokenError(f"{host_of(answer.url)} gives almost nothing")
            mark, mark_at = now, at
    if at < size:
        raise BrokenError(f"{host_of(answer.url)} gives {at} of the {size} bytes of a blob")


def _write_all(file: IO[bytes], piece: bytes) -> None:
    left = memoryview(piece)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        if error.errno in FULL:
            raise store_full() from error
        raise


def _remove_partial(path: Path, now: float) -> int:
    """What broke off long ago, and is not being fetched."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        info = os.fstat(fd)
        if now - info.st_mtime < _STALE_PARTIAL_S or not try_lock(fd) or not is_same(fd, path):
            return 0
        path.unlink()
        return info.st_size
    finally:
        os.close(fd)
