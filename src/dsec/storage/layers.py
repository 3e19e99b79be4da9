"""Immutable layers by content, on the local disk.

    <state>/layers/<digest>/layer.json                      what it is
                            meta.erofs, data.blob           kind "erofs"
                            meta.erofs, chunks.index        kind "erofs", its data in a store
                            meta.erofs, one of these two    kind "disk", of a machine: what it is, and its file
                            tree/                           kind "directory"
    <state>/staging/<random>/                               being made; its owner holds a lock on it
    <state>/locks/<name>                                    between processes

A layer appears whole by one rename, or not at all. All of it is closed to other users: it holds set-user-id programs.
"""

from __future__ import annotations

import enum
import os
import re
import secrets
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from dsec.core.errors import ConflictError, InvalidArgumentError, NotFoundError, StorageError
from dsec.storage.locks import file_lock, is_same, sweep_lock, try_lock
from dsec.storage.syscalls import syncfs
from dsec.storage.trees import remove_tree
from dsec.wire import codec

META_NAME: Final = "meta.erofs"
BLOB_NAME: Final = "data.blob"
INDEX_NAME: Final = "chunks.index"
TREE_NAME: Final = "tree"
_RECORD_NAME: Final = "layer.json"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z")


class LayerKind(enum.StrEnum):
    EROFS = "erofs"
    DIRECTORY = "directory"
    DISK = "disk"


class RemoteBlob(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a layer that is loaded on demand."""

    store: str  # URL
    size: int
    chunk_size: int
    stored: int  # bytes in the store, compressed


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Stored beside the layer; readers ignore fields that they do not know."""

    version: int = 1
    digest: str
    kind: LayerKind
    size_bytes: int  # on this disk
    entries: int
    created_at: float
    remote: RemoteBlob | None = None
    origin: str | None = None  # URL of the store that it came from; None: made here


@dataclass(frozen=True, slots=True)
class LayerLocation:
    """Where a layer lies: what a launcher needs to mount it."""

    digest: str
    kind: LayerKind
    meta: Path  # image file, or the directory
    blob: Path | None = None  # data device file of an EROFS image
    remote: RemoteBlob | None = None  # then the loader makes the device file, from `index`
    index: Path | None = None


class Lease:
    """Keeps layers from being removed, in this process and for all others. Release it once, or leave its `with`."""

    def __init__(self, store: LayerStore, digests: tuple[str, ...]) -> None:
        self._store = store
        self._held = digests

    @property
    def digests(self) -> tuple[str, ...]:
        return self._held

    def release(self) -> None:
        held, self._held = self._held, ()
        self._store._release(held)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True)
class _Held:
    fd: int
    count: int


class LayerStore:
    """The layers below one state directory. Safe for use by many processes and threads at once."""

    def __init__(self, state: str | os.PathLike[str]) -> None:
        """Makes the directories. Call `clean` once at start to remove what dead builders left."""
        self.state = Path(state).absolute()
        self._layers = self.state / "layers"
        self._staging = self.state / "staging"
        self._locks = self.state / "locks"
        self._mutex = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._known: dict[str, LayerLocation] = {}
        try:
            self.state.mkdir(parents=True, exist_ok=True, mode=0o755)
            for directory in (self._layers, self._staging, self._locks):
                directory.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageError(f"cannot make the store {self.state}: {error.strerror}") from error

    # ---- making -------------------------------------------------------------------------------

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh directory for the time of the `with`. If this process dies, the next `clean` removes it."""
        path, fd = self._new_staging()
        try:
            yield path
        finally:
            try:
                remove_tree(path)
            finally:
                os.close(fd)

    def _new_staging(self) -> tuple[Path, int]:
        while True:
            path = self._staging / secrets.token_hex(8)
            path.mkdir(mode=0o700)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            # A cleaner may have come between mkdir and lock; then this one is dead and the next is tried.
            if try_lock(fd) and is_same(fd, path):
                return path, fd
            os.close(fd)

    def publish(self, staged: Path, record: LayerRecord) -> LayerLocation:
        """Make the finished content of `staged` (below a staging directory) the layer `record.digest`.

        A layer of that digest that is there already wins, and `staged` is left alone. On disk before it has the name.
        """
        target = self._directory(record.digest)
        if not target.exists():
            try:
                write_synced(staged / _RECORD_NAME, codec.to_json(record))
                _sync_content(staged, record.kind)
                os.rename(staged, target)  # noqa: PTH104 - rename(2), and nothing more clever
                sync(self._layers)
            except FileExistsError:
                pass
            except OSError as error:
                if not target.exists():
                    raise StorageError(f"cannot publish layer {record.digest[:12]}: {error.strerror}") from error
        return self.get(record.digest)

    @contextmanager
    def single_flight(self, key: str) -> Iterator[None]:
        """One holder per key on this machine; others wait. Look again for the result once inside."""
        with file_lock(self._locks / f"build-{key}"):
            yield

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Between publishing a layer and recording who uses it, nothing is collected."""
        with file_lock(self._locks / "collect", shared=True):
            yield

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """The other side of `publishing`: nobody publishes while references are read and layers removed."""
        with file_lock(self._locks / "collect"):
            yield

    # ---- reading ------------------------------------------------------------------------------

    def get(self, digest: str) -> LayerLocation:
        """Raises NotFoundError, or StorageError when the layer is there and broken."""
        known = self._known.get(digest)
        if known is None:
            known = _location(self._directory(digest), self.record(digest))
        if not known.meta.exists() or (known.blob is not None and not known.blob.exists()):
            self._known.pop(digest, None)
            raise NotFoundError(f"layer {digest[:12]} is not on this node")
        self._known[digest] = known
        return known

    def record(self, digest: str) -> LayerRecord:
        """Raises NotFoundError or StorageError, as `get` does."""
        try:
            record = codec.from_json((self._directory(digest) / _RECORD_NAME).read_bytes(), LayerRecord)
        except FileNotFoundError:
            raise NotFoundError(f"layer {digest[:12]} is not on this node") from None
        except (OSError, InvalidArgumentError) as error:
            raise StorageError(f"layer {digest[:12]} cannot be read: {error}") from error
        if record.digest != digest:
            raise StorageError(f"layer {digest[:12]} says that it is {record.digest[:12]}")
        return record

    def has(self, digest: str) -> bool:
        try:
            self.get(digest)
        except NotFoundError:
            return False
        return True

    def digests(self) -> list[str]:
        return sorted(entry.name for entry in self._layers.iterdir() if _DIGEST.match(entry.name))

    # ---- holding and removing -----------------------------------------------------------------

    def lease(self, digests: Iterable[str]) -> Lease:
        """Hold layers, each once. Raises NotFoundError, and then holds none of them."""
        held: list[str] = []
        try:
            for digest in dict.fromkeys(digests):
                self._hold(digest)
                held.append(digest)
        except BaseException:
            self._release(tuple(held))
            raise
        return Lease(self, tuple(held))

    def leased(self) -> frozenset[str]:
        """What this process holds."""
        with self._mutex:
            return frozenset(self._held)

    def remove(self, digest: str, *, live: Collection[str] = ()) -> None:
        """Remove a layer; a missing one is fine. Raises ConflictError while it is leased, or listed in `live`.

        `live` is what a node's journal says is in use: sandboxes outlive the process that held their leases.
        """
        if digest in live:
            raise ConflictError(f"layer {digest[:12]} is in use by a sandbox", hint="destroy the sandbox first")
        path = self._directory(digest)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if not try_lock(fd):
                raise ConflictError(f"layer {digest[:12]} is in use", hint="destroy the sandboxes that use it first")
            self._known.pop(digest, None)
            doomed = self._staging / f"removed-{secrets.token_hex(8)}"
            path.rename(doomed)
            remove_tree(doomed)
        except FileNotFoundError:
            return
        finally:
            os.close(fd)

    def clean(self) -> int:
        """Remove what dead builders and removers left; how many. Never touches the work of the living."""
        removed = 0
        for path in list(self._staging.iterdir()):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                if try_lock(fd):
                    remove_tree(path)
                    removed += 1
            finally:
                os.close(fd)
        for path in list(self._locks.glob("build-*")):
            sweep_lock(path)
        return removed

    def _hold(self, digest: str) -> None:
        with self._mutex:
            held = self._held.get(digest)
            if held is not None:
                held.count += 1
                return
            path = self._directory(digest)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise NotFoundError(f"layer {digest[:12]} is not on this node") from None
            if not try_lock(fd, shared=True) or not is_same(fd, path):
                os.close(fd)
                raise NotFoundError(f"layer {digest[:12]} is being removed")
            self._held[digest] = _Held(fd, 1)

    def _release(self, digests: Iterable[str]) -> None:
        with self._mutex:
            for digest in digests:
                held = self._held[digest]
                held.count -= 1
                if held.count == 0:
                    del self._held[digest]
                    os.close(held.fd)

    def _directory(self, digest: str) -> Path:
        if not _DIGEST.match(digest):
            raise InvalidArgumentError(f"{digest[:80]!r} is not a layer digest", hint="64 hexadecimal digits")
        return self._layers / digest


def _location(directory: Path, record: LayerRecord) -> LayerLocation:
    if record.kind is LayerKind.DIRECTORY:
        return LayerLocation(record.digest, record.kind, directory / TREE_NAME)
    if record.remote is not None:
        meta, index = directory / META_NAME, directory / INDEX_NAME
        return LayerLocation(record.digest, record.kind, meta, remote=record.remote, index=index)
    blob = directory / BLOB_NAME
    return LayerLocation(record.digest, record.kind, directory / META_NAME, blob if blob.exists() else None)


def _sync_content(staged: Path, kind: LayerKind) -> None:
    if kind is LayerKind.DIRECTORY:
        fd = os.open(staged, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            syncfs(fd)  # one call for a tree of any size
        finally:
            os.close(fd)
        return
    for name in (META_NAME, BLOB_NAME, INDEX_NAME):
        if (staged / name).exists():
            sync(staged / name)
    sync(staged)


def write_synced(path: Path, data: bytes) -> None:
    """A new file, on the disk when this returns; its name is not yet (`sync` its directory for that)."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """A file's content, or a directory's names, are on the disk when this returns."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
