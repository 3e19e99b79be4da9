"""Machines that were started once, stopped before anybody used them, and are cloned ever since.

A template is a directory that never changes: `ram.img` (the memory, which clones map privately), `state.mig` (of the
devices), `disk.raw` (what clones' disks begin as) and `manifest.json`. Running clones hold its files open, and those
that are being started hold the directory (a shared lock): it may be dropped at any time, is found by nobody from then
on, and goes with the last of these. The next create makes another.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import ConflictError, DsecError, HostError, LaunchError, StorageError
from dsec.core.faults import fault_point
from dsec.observe.logs import get_logger
from dsec.wire.codec import from_json, to_json

log = get_logger(__name__)

RAM: Final = "ram.img"
STATE: Final = "state.mig"
DISK: Final = "disk.raw"
CONSOLE: Final = "console.log"
_MANIFEST: Final = "manifest.json"
_TRIES: Final = 2  # a kernel that boots on a busy host sometimes does not
_UNFINISHED: Final = "new-"
_BEGUN_S: Final = 5.0
_HOLDS: Final = 500  # tries to hold one that comes and goes
_POLL_S: Final = 0.02
_LET_GO_S: Final = 60.0  # until those that are being started from a dropped one have been


class Manifest(msgspec.Struct, frozen=True):
    """What a template was made of, and how its files can be told from damaged ones."""

    key: str
    ram_bytes: int
    ram_allocated_bytes: int
    ram_mtime_ns: int
    state_sha256: str
    made_of: dict[str, str]


@dataclass(frozen=True, slots=True)
class Template:
    """What machines are begun from: one that was stopped before anybody used it, or (`saved`) in the middle of its
    life."""

    key: str
    directory: Path
    overlays: tuple[str, ...] = ()  # files of its disk above what that began as, lowest first
    bare: bool = False  # the file of its devices' state has nothing else in it

    @property
    def state_bytes(self) -> int:
        return (self.directory / STATE).stat().st_size


class Templates:
    """Of one node. Build is called at most once at a time for a key, also by several nodes on one directory."""

    def __init__(self, directory: Path, *, kept_max: int, disk: str = DISK) -> None:
        self.directory = directory
        self._disk = disk
        self._kept_max = kept_max
        self._building: dict[str, asyncio.Lock] = {}
        self._checked: set[str] = set()

    async def get(self, key: str, made_of: dict[str, str], build: Callable[[Path], Awaitable[None]]) -> Template:
        """The template of this key; `build` fills a directory when there is none. Raises what `build` raises."""
        async with self._building.setdefault(key, asyncio.Lock()):
            if (found := await asyncio.to_thread(self._find, key)) is not None:
                return found
            await self._make(key, made_of, build)
        return Template(key, self.directory / key)

    @asynccontextmanager
    async def held(self, find: Callable[[], Awaitable[Template]]) -> AsyncIterator[Template]:
        """The template that `find` gets: its files stay while the block runs, whoever drops it meanwhile."""
        for _ in range(_HOLDS):
            template = await find()
            fd = _hold(template.directory)
            if fd is not None:
                try:
                    yield template
                finally:
                    _let_go(fd, template.directory)
                return
            await asyncio.sleep(_POLL_S)
        raise LaunchError("its template comes and goes", step="template")

    def find(self, key: str) -> Template:
        """One that a machine was cloned from. Raises ConflictError when it is there no more."""
        if not (self.directory / key / _MANIFEST).exists():
            raise ConflictError(
                "the template that the machine was cloned from has been removed", hint="use one that was made later"
            )
        return Template(key, self.directory / key)

    def made_of(self, key: str) -> dict[str, str]:
        """Raises StorageError."""
        try:
            return self._manifest(key).made_of
        except (OSError, DsecError) as error:
            raise StorageError(f"the template {key} cannot be read: {error}") from error

    def drop(self, key: str) -> None:
        """It does not work: the next `get` makes another. Clones that are being started from it are not disturbed."""
        self._checked.discard(key)
        directory = self.directory / key
        (directory / _MANIFEST).unlink(missing_ok=True)
        _remove_unheld(directory)

    def keys(self) -> list[str]:
        """Last used first."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if (path / _MANIFEST).exists()]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]

    def sweep(self) -> None:
        """Removes what was never finished, and the templates that were not used for longest."""
        for path in list(self.directory.iterdir()) if self.directory.is_dir() else []:
            with contextlib.suppress(OSError):  # somebody else has removed it
                # One that has just begun is not held yet.
                if not (path / _MANIFEST).exists() and time.time() - path.stat().st_mtime > _BEGUN_S:
                    _remove_unheld(path)
        for key in self.keys()[self._kept_max :]:
            self.drop(key)

    def drop_made_of(self, keep: Callable[[dict[str, str]], bool]) -> None:
        """Removes those whose origin is gone."""
        for key in self.keys():
            with contextlib.suppress(OSError, DsecError):
                if not keep(self._manifest(key).made_of):
                    self.drop(key)

    # ---- inside ----------------------------------------------------------------------------------

    async def _make(self, key: str, made_of: dict[str, str], build: Callable[[Path], Awaitable[None]]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for attempt in range(_TRIES):
            work = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=_UNFINISHED, dir=self.directory))
            try:
                with _held(work):
                    await build(work)
                    await self._until_let_go(self.directory / key)
                    await asyncio.to_thread(self._finish, work, key, made_of)
                return
            except LaunchError as error:
                if attempt + 1 == _TRIES:
                    raise
                log.warning("a template could not be made and is tried again", key=key, error=error.message)
            finally:
                await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    async def _until_let_go(self, target: Path) -> None:
        """One of this name that was dropped is gone when this returns."""
        until = asyncio.get_running_loop().time() + _LET_GO_S
        while target.exists() and not (target / _MANIFEST).exists():
            if not await asyncio.to_thread(_remove_unheld, target):
                if asyncio.get_running_loop().time() > until:
                    raise LaunchError("clones of the template of before do not come up", step="template")
                await asyncio.sleep(_POLL_S)

    def _finish(self, work: Path, key: str, made_of: dict[str, str]) -> None:
        fault_point("vm.template.finish")
        found = (work / RAM).stat()
        manifest = Manifest(
            key=key,
            ram_bytes=found.st_size,
            ram_allocated_bytes=found.st_blocks * 512,
            ram_mtime_ns=found.st_mtime_ns,
            state_sha256=_digest(work / STATE),
            made_of=made_of,
        )
        (work / _MANIFEST).write_bytes(to_json(manifest))
        target = self.directory / key
        try:
            work.rename(target)
        except OSError:  # another node on this directory was faster
            if not (target / _MANIFEST).exists():
                raise
        self._checked.add(key)
        self.sweep()

    def _find(self, key: str) -> Template | None:
        directory = self.directory / key
        try:
            if key not in self._checked:
                self._check(key)
                self._checked.add(key)
            os.utime(directory)
        except FileNotFoundError:
            self._checked.discard(key)
            return None
        except (OSError, DsecError) as error:
            log.warning("a template is damaged and is made anew", key=key, error=str(error))
            self.drop(key)
            return None
        return Template(key, directory)

    def _check(self, key: str) -> None:
        """Once in the life of this process: that nobody has written into it since it was made."""
        directory, manifest = self.directory / key, self._manifest(key)
        found = (directory / RAM).stat()
        if (found.st_size, found.st_mtime_ns) != (manifest.ram_bytes, manifest.ram_mtime_ns):
            raise HostError("its memory was written after it was made")
        if found.st_blocks * 512 < manifest.ram_allocated_bytes:
            raise HostError("its memory has holes that it did not have")
        if _digest(directory / STATE) != manifest.state_sha256 or not (directory / self._disk).exists():
            raise HostError("its state is not what was written")

    def _manifest(self, key: str) -> Manifest:
        return from_json((self.directory / key / _MANIFEST).read_bytes(), Manifest)


def template_key(made_of: dict[str, str]) -> str:
    text = "".join(f"{name}={value}\n" for name, value in sorted(made_of.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hold(directory: Path) -> int | None:
    """None: it was dropped, or somebody is just making it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.stat(_MANIFEST, dir_fd=fd)
    except OSError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _let_go(fd: int, directory: Path) -> None:
    os.close(fd)
    if not (directory / _MANIFEST).exists():
        _remove_unheld(directory)


def _remove_unheld(directory: Path) -> bool:
    """Whether it is gone; not while somebody makes it, or starts clones from it."""
    with _held(directory) as alone:
        if alone and not (directory / _MANIFEST).exists():
            shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


@contextmanager
def _held(directory: Path) -> Iterator[bool]:
    """Whether nobody else works in it; for as long as the block runs nobody else does."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)
