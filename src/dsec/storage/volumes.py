"""Named directories that outlive sandboxes.

    <state>/volumes/<key>/volume.json     what it is; the key is a digest of project and name
                          data/           its content, where it has no limit or the file system counts
                          disk.img        its content, where a file system of its own keeps the limit
    <state>/volumes/.making-<random>      until it has its name
    <state>/volumes/.removed-<random>     on its way out

Ids on the disk are those that sandboxes see. All of it is closed to other users of the host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import (
    ConflictError,
    InvalidArgumentError,
    LimitError,
    StorageError,
    UnsupportedError,
    VolumeNotFoundError,
)
from dsec.core.limits import VOLUMES_MAX
from dsec.storage.layers import sync, write_synced
from dsec.storage.quota.choose import Found, Mechanism, find_mechanism
from dsec.storage.quota.image import IMAGE_NAME, attach, make_image, mounted
from dsec.storage.quota.project import lift_limit, limit_directory, used_below
from dsec.storage.space import require_free
from dsec.storage.trees import remove_tree, tree_size
from dsec.wire import codec

RECORD_NAME: Final = "volume.json"
DATA_NAME: Final = "data"
MAKING: Final = ".making-"
REMOVED: Final = ".removed-"
UNLIMITED: Final = "directory"


class VolumeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Stored beside the content; readers ignore fields that they do not know."""

    version: int = 1
    project: str
    name: str
    mechanism: str  # directory | project | image
    size_bytes: int | None
    created_at: float
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class VolumePlace:
    """Where the content of a volume lies: a directory, or in the file system of an image."""

    source: str
    image: str | None = None
    inode: int = 0


class VolumeStore:
    """The volumes below one state directory. One process at a time changes them: the node that has the directory."""

    def __init__(self, state: Path, *, find: Found | None = None) -> None:
        self._state = state
        self._volumes = state / "volumes"
        self._found = find
        self._mutex = threading.Lock()

    def clean(self) -> int:
        """Remove what a process that was killed has left; how many."""
        with self._mutex:  # what is being made just now is nothing left
            if not self._volumes.is_dir():
                return 0
            left = [*self._volumes.glob(f"{MAKING}*"), *self._volumes.glob(f"{REMOVED}*")]
            for path in left:
                remove_tree(path)
            return len(left)

    # ---- changing -----------------------------------------------------------------------------

    def create(self, record: VolumeRecord) -> VolumeRecord:
        """A new, empty volume, on the disk when this returns; `record.mechanism` is chosen here.

        The same again is success. Raises ConflictError for another one of that name, UnsupportedError for a size that
        cannot be kept here, LimitError, CapacityError or StorageError.
        """
        with self._mutex:
            target = self._directory(record.project, record.name)
            if target.exists():
                return self._same(record)
            require_free(self._state)
            try:
                self._volumes.mkdir(mode=0o700, exist_ok=True)
                if sum(1 for _ in self._volumes.iterdir()) >= VOLUMES_MAX:
                    raise LimitError(f"a node has at most {VOLUMES_MAX} volumes")
                made = msgspec.structs.replace(record, mechanism=self._mechanism(record))
                staged = self._volumes / f"{MAKING}{secrets.token_hex(8)}"
                try:
                    self._make(staged, made)
                    os.rename(staged, target)  # noqa: PTH104 - rename(2), and nothing more clever
                finally:
                    remove_tree(staged)
                sync(self._volumes)
            except OSError as error:
                raise StorageError(f"volume {record.name!r} cannot be made: {error.strerror}") from error
            return made

    def _same(self, wanted: VolumeRecord) -> VolumeRecord:
        found = self.get(wanted.project, wanted.name)
        if (found.size_bytes, found.uid, found.gid) == (wanted.size_bytes, wanted.uid, wanted.gid):
            return found
        raise ConflictError(
            f"there is a volume {wanted.name!r} of another size or owner", hint="remove it first, or take another name"
        )

    def _mechanism(self, record: VolumeRecord) -> str:
        if record.size_bytes is None:
            return UNLIMITED
        found = self.found()
        if found.mechanism is None:
            raise UnsupportedError(
                f"this node cannot keep a volume to a size: {found.reason}",
                hint="leave the size out, or see `dsec doctor`",
            )
        return str(found.mechanism)

    def _make(self, staged: Path, record: VolumeRecord) -> None:
        staged.mkdir(mode=0o700)
        if record.mechanism == Mechanism.IMAGE and record.size_bytes is not None:
            image = staged / IMAGE_NAME
            make_image(image, record.size_bytes, journal=True, uid=record.uid, gid=record.gid)
            with attach(image) as device, mounted(device) as top:
                os.rmdir("lost+found", dir_fd=top)
                os.fchmod(top, 0o755)
                os.fsync(top)
            sync(image)
        else:
            data = staged / DATA_NAME
            data.mkdir(mode=0o755)
            data.chmod(0o755)
            os.chown(data, record.uid, record.gid)
            if record.size_bytes is not None:
                limit_directory(data, record.size_bytes)
            sync(data)
        write_synced(staged / RECORD_NAME, codec.to_json(record))
        sync(staged)

    def remove(self, project: str, name: str) -> Path:
        """The name is free when this returns, and at once: no thread is needed. What is left to do is `finish` with
        what is returned. Raises VolumeNotFoundError. That nobody uses it is the caller's to know."""
        self.get(project, name)
        target = self._directory(project, name)
        doomed = self._volumes / f"{REMOVED}{secrets.token_hex(8)}"
        try:
            target.rename(doomed)
        except OSError as error:
            raise StorageError(f"volume {name!r} cannot be removed: {error.strerror}") from error
        return doomed

    def finish(self, doomed: Path) -> None:
        """Remove the content. Raises StorageError; the next start goes on with it."""
        data = doomed / DATA_NAME
        project = None
        with contextlib.suppress(StorageError):
            used = used_below(data) if data.is_dir() else None
            project = None if used is None else used.project
        remove_tree(doomed)
        if project is not None:
            with contextlib.suppress(OSError):
                lift_limit(self._volumes, project)

    # ---- reading ------------------------------------------------------------------------------

    def get(self, project: str, name: str) -> VolumeRecord:
        """Raises VolumeNotFoundError, or StorageError when it is there and broken."""
        record = self._read(self._directory(project, name))
        if record is None:
            raise VolumeNotFoundError(f"no volume {name!r} in this project", hint="`dsec volume ls` shows all")
        return record

    def list(self) -> list[VolumeRecord]:
        """Of all projects, by name. Broken ones are left out."""
        found = []
        try:
            paths = [path for path in self._volumes.iterdir() if not path.name.startswith(".")]
        except FileNotFoundError:
            return []
        for path in paths:
            with contextlib.suppress(StorageError):
                record = self._read(path)
                if record is not None:
                    found.append(record)
        return sorted(found, key=lambda record: (record.name, record.project))

    def place(self, project: str, name: str) -> VolumePlace:
        """Raises VolumeNotFoundError or StorageError."""
        record = self.get(project, name)
        directory = self._directory(project, name)
        content = directory / (IMAGE_NAME if record.mechanism == Mechanism.IMAGE else DATA_NAME)
        try:
            info = content.lstat()
        except OSError as error:
            raise StorageError(f"volume {name!r} has lost its content: {error.strerror}") from error
        if record.mechanism == Mechanism.IMAGE:
            return VolumePlace(str(directory), image=str(content))
        return VolumePlace(str(content), inode=info.st_ino)

    def used_bytes(self, record: VolumeRecord, *, walk: bool = False) -> int | None:
        """What it takes of the disk. Without a limit nobody counts, and only a `walk` of the whole tree tells."""
        directory = self._directory(record.project, record.name)
        try:
            if record.mechanism == Mechanism.IMAGE:
                return (directory / IMAGE_NAME).stat().st_blocks * 512
            if record.mechanism == Mechanism.PROJECT:
                used = used_below(directory / DATA_NAME)
                return None if used is None else used.used_bytes
            return tree_size(directory / DATA_NAME).disk_bytes if walk else None
        except (OSError, StorageError):
            return None

    def found(self) -> Found:
        """By what sizes are kept here. Tried once, which takes some 50 ms."""
        if self._found is None:
            self._found = find_mechanism(self._state)
        return self._found

    def _read(self, directory: Path) -> VolumeRecord | None:
        try:
            record = codec.from_json((directory / RECORD_NAME).read_bytes(), VolumeRecord)
        except FileNotFoundError:
            return None
        except (OSError, InvalidArgumentError) as error:
            raise StorageError(f"the volume at {directory} cannot be read: {error}") from error
        if directory.name != _key(record.project, record.name):
            raise StorageError(f"the volume at {directory} says that it is {record.name!r}")
        return record

    def _directory(self, project: str, name: str) -> Path:
        return self._volumes / _key(project, name)


def _key(project: str, name: str) -> str:
    """Neither has a NUL; a project is a path, which is no file name."""
    return hashlib.sha256(f"{project}\0{name}".encode()).hexdigest()[:40]


def find_dataset(name: str, path: Path) -> VolumePlace:
    """Raises StorageError when the directory of the configuration is not there."""
    try:
        real = path.resolve(strict=True)
        if not real.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return VolumePlace(str(real), inode=real.stat().st_ino)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"dataset {name!r} is not there: {error}", hint="its directory is that of [node.datasets] on the node"
        ) from error
