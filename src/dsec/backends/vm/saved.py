"""Machines that were stopped in the middle of their lives and written down whole: their memory, the state of their
devices, their disks. Snapshots, forks and deep pauses are made of them.

`<state>/…/saved/<id>/` appears by a rename and never changes. It needs nothing beside itself but the layers that the
machine reads: what it has in common with a template, an image, or the one that it was made from, are further names of
the same files. So each may be removed by itself, and can be copied to another node.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.backends.vm.copying import digest_of, sync_file
from dsec.backends.vm.templates import RAM, STATE, Template
from dsec.core.errors import DsecError, StorageError, UnsupportedError
from dsec.core.faults import fault_point
from dsec.core.ids import new_snapshot_id, parse_name
from dsec.observe.logs import get_logger
from dsec.wire.codec import from_json, to_json

log = get_logger(__name__)

OVERLAY: Final = "over-{}.qcow2"  # of a disk, above what it began as; 1 is the lowest
_MANIFEST: Final = "manifest.json"
_UNFINISHED: Final = "new-"
_DIGESTS_MAX: Final = 1_000


class SavedFile(msgspec.Struct, frozen=True):
    size_bytes: int
    digest: str


class SavedManifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    sandbox: str  # whom the agent in its memory serves
    needs: dict[str, str]  # what must be the same for it to go on: the monitor above all
    shape: dict[str, Any]  # as its backend has it
    more: dict[str, Any] = {}  # what else its backend wants to know
    overlays: int = 0  # of its disk
    merged: str = ""  # digest of those that the lowest of them was made of
    files: dict[str, SavedFile] = {}


@dataclass(frozen=True, slots=True)
class SavedMachine:
    id: str
    directory: Path
    manifest: SavedManifest

    @property
    def template(self) -> Template:
        """As what it can be gone on with."""
        overlays = tuple(OVERLAY.format(number) for number in range(1, self.manifest.overlays + 1))
        return Template(self.id, self.directory, overlays=overlays, bare=True)


class SavedMachines:
    """Of one backend on one node. All methods but `hold` and `let_go` block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._checked: dict[str, tuple[tuple[str, int, int], ...]] = {}
        self._held: Counter[str] = Counter()
        self._turn = threading.Lock()
        self._digests: dict[tuple[int, int, int, int], str] = {}  # last used last

    # ---- making ------------------------------------------------------------------------------------

    def begin(self) -> tuple[Path, int]:
        """An empty directory, and a descriptor that says for as long as it is open that somebody works there."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.directory))
        fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return work, fd

    def finish(self, work: Path, manifest: SavedManifest) -> SavedMachine:
        """Held once, by the caller. Raises StorageError."""
        id = new_snapshot_id()
        try:
            fault_point("vm.saved.finish")
            files = {
                path.name: SavedFile(path.stat().st_size, self.digest_of(path))
                for path in sorted(work.iterdir())
                if path.name != _MANIFEST
            }
            manifest = msgspec.structs.replace(manifest, files=files)
            (work / _MANIFEST).write_bytes(to_json(manifest))
            work.chmod(0o711)
            saved = SavedMachine(id, self.directory / id, manifest)
            self._checked[id] = _stamps(work, manifest)
            self.hold(id)
            work.rename(saved.directory)
        except OSError as error:
            self._checked.pop(id, None)
            raise StorageError(f"a machine cannot be kept: {error.strerror}", hint="is the disk full?") from error
        return saved

    def digest_of(self, path: Path) -> str:
        """Of a file that has more names it was computed before, unless it has been written since."""
        info = path.stat(follow_symlinks=False)
        key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        with self._turn:
            digest = self._digests.pop(key, None)
        digest = digest or digest_of(path)
        with self._turn:
            self._digests[key] = digest
            while len(self._digests) > _DIGESTS_MAX:
                del self._digests[next(iter(self._digests))]
        return digest

    def sync(self, id: str) -> None:
        """It survives a loss of power from here on. Raises StorageError."""
        directory = self.directory / id
        try:
            for path in sorted(directory.iterdir()):
                sync_file(path)
            sync_file(directory)
            sync_file(self.directory)
        except OSError as error:
            raise StorageError(f"a machine cannot be kept: {error.strerror}") from error

    @contextmanager
    def held(self, id: str) -> Iterator[None]:
        """Not removed within the block. "" is none."""
        if not id:
            yield
            return
        self.hold(id)
        try:
            yield
        finally:
            self.let_go(id)

    def hold(self, id: str) -> None:
        """It is not removed before as many calls of `let_go`."""
        self._held[id] += 1

    def let_go(self, id: str) -> None:
        self._held[id] -= 1
        if self._held[id] <= 0:
            del self._held[id]

    # ---- using -------------------------------------------------------------------------------------

    def get(self, id: str, needs: dict[str, str], *, whole: bool = True) -> SavedMachine:
        """All of it is as it was written, which is looked at whole at its first use in the life of this process. Not
        `whole`: what there is of it, for its disks alone.

        Raises StorageError (lost or damaged), UnsupportedError (it was made by another monitor).
        """
        saved = SavedMachine(id, self.directory / parse_name(id, "machine"), self._manifest(id))
        for name, value in saved.manifest.needs.items():
            if whole and needs.get(name) != value:
                raise UnsupportedError(
                    f"the saved machine {id} goes on only with {name} {value!r}, and here is {needs.get(name)!r}",
                    hint="a machine's state is for the very program that has written it",
                )
        if whole:
            with self._turn:
                self._check(saved)
        return saved

    def merged(self, digest: str) -> Iterator[tuple[Path, str]]:
        """Overlays that were made of the same ones, of machines that are there or were a moment ago, and what their
        own digests should be."""
        try:
            ids = [path.name for path in self.directory.iterdir() if not path.name.startswith(_UNFINISHED)]
        except OSError:
            return
        for id in ids:
            with suppress(DsecError):
                manifest, name = self._manifest(id), OVERLAY.format(1)
                if manifest.merged == digest and name in manifest.files:
                    yield self.directory / id / name, manifest.files[name].digest

    def _manifest(self, id: str) -> SavedManifest:
        try:
            manifest = from_json((self.directory / id / _MANIFEST).read_bytes(), SavedManifest)
        except FileNotFoundError as error:
            raise StorageError(f"the saved machine {id} is not on this node") from error
        except (OSError, DsecError) as error:
            raise StorageError(f"the saved machine {id} is damaged: {error}") from error
        if manifest.version > 1:
            raise UnsupportedError(f"the saved machine {id} is of version {manifest.version}, newer than this program")
        return manifest

    def _check(self, saved: SavedMachine) -> None:
        try:
            stamps = _stamps(saved.directory, saved.manifest)
            if self._checked.get(saved.id) == stamps:
                return
            for name, file in saved.manifest.files.items():
                path = saved.directory / parse_name(name, "file")
                if path.is_symlink() or path.stat().st_size != file.size_bytes or digest_of(path) != file.digest:
                    raise StorageError(f"the saved machine {saved.id} is damaged: {name} is not what was written")
        except OSError as error:
            raise StorageError(f"the saved machine {saved.id} is damaged: {error}") from error
        if not {RAM, STATE} <= saved.manifest.files.keys():
            raise StorageError(f"the saved machine {saved.id} is damaged: it has no memory, or no state")
        self._checked[saved.id] = stamps

    # ---- removing ----------------------------------------------------------------------------------

    def keep(self, ids: Collection[str]) -> None:
        """Removes all others, and what nobody has finished; not what is held."""
        try:
            found = list(self.directory.iterdir())
        except OSError:
            return  # there has been none
        for path in found:
            if path.name.startswith(_UNFINISHED):
                remove_unheld(path)
            elif path.name not in ids and path.name not in self._held:
                self.remove(path.name)

    def remove(self, id: str) -> None:
        """Machines of it run on."""
        self._checked.pop(id, None)
        path = self.directory / id
        with suppress(OSError):
            (path / _MANIFEST).unlink()  # a half of it is never taken for the whole
        shutil.rmtree(path, ignore_errors=True)


def remove_unheld(path: Path) -> None:
    """Nothing is done to a directory in which somebody works."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(fd)


def _stamps(directory: Path, manifest: SavedManifest) -> tuple[tuple[str, int, int], ...]:
    """What changes when a file is written. Not the time of a change of its names: links come and go."""
    found = ((name, (directory / name).stat(follow_symlinks=False)) for name in sorted(manifest.files))
    return tuple((name, info.st_size, info.st_mtime_ns) for name, info in found)
