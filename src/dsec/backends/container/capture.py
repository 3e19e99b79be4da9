"""A snapshot of a container's disk: where its writable layer is, and which files are mapped for writing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.backends.base import CapturedLayer
from dsec.backends.container.record import ContainerRecord
from dsec.core.errors import GoneError, HostError, StorageError
from dsec.image.capture import CaptureProcess
from dsec.storage.mirror import Mapped
from dsec.storage.syscalls import is_in_memory

_DISK: Final = "disk"  # as native/launch/src/steps/state.rs has it: a file system of its own, for a limit
_LITTLE_BYTES: Final = 16 << 20  # copied in some ten milliseconds while the sandbox stands still
_LITTLE_FILES: Final = 500
_OWN_PATHS: Final = (b"/dev/", b"/proc/", b"/sys/")  # never in the writable layer


class ContainerCapture:
    def __init__(self, record: ContainerRecord, process: CaptureProcess) -> None:
        self._record = record
        self._process = process

    @classmethod
    async def begin(cls, record: ContainerRecord, *, state: Path, launcher_pid: int) -> ContainerCapture:
        source = await asyncio.to_thread(_open_upper, record, launcher_pid)
        try:
            process = await CaptureProcess.start(state, source, trust_times=not is_in_memory(source))
        finally:
            os.close(source)
        return cls(record, process)

    async def look(self) -> bool:
        mapped = await asyncio.to_thread(mapped_files, self._record.cgroup2)
        done = await self._process.look(mapped)
        return done.copied_bytes <= _LITTLE_BYTES and done.copied_files <= _LITTLE_FILES

    async def take(self, *, within_s: float) -> int:
        return (await self._process.take(within_s=within_s)).copied_bytes

    async def keep(self, run: tuple[str, ...] = ()) -> CapturedLayer:
        made = await self._process.keep(run)
        return CapturedLayer(made.digest, made.size_bytes, made.entries, made.notes, made.merged)

    async def close(self) -> None:
        await self._process.close()


def _open_upper(record: ContainerRecord, launcher_pid: int) -> int:
    """Through the launcher's mount namespace, where the file systems of sandboxes with a limit are mounted.

    Raises GoneError when there is none any more, StorageError.
    """
    directory = Path(f"/proc/{launcher_pid}/root{record.directory}")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for place in (directory / _DISK / "upper", directory / "upper"):
        try:
            return os.open(place, flags)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError(f"the files of {record.sandbox} cannot be read: {error.strerror}") from error
    raise GoneError(f"the files of {record.sandbox} are gone", sandbox=record.sandbox)


def mapped_files(cgroup: str | None) -> Mapped:
    """Files that a process of the sandbox may write to without a trace in their times, by their paths inside."""
    if cgroup is None:
        raise HostError("without cgroup2 the processes of a sandbox are not known")
    paths: set[bytes] = set()
    sure = True
    for pid in _pids(Path(cgroup)):
        try:
            with Path(f"/proc/{pid}/maps").open("rb") as lines:
                for line in lines:
                    found = _writable_file(line)
                    if found is None:
                        continue
                    span, path = found
                    links = _links(pid, span)
                    if links is None:
                        sure = False
                    elif links > 0:
                        paths.add(path)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            sure = False
    return Mapped(paths, sure)


def _writable_file(line: bytes) -> tuple[bytes, bytes] | None:
    """(addresses, path) of a line of /proc/PID/maps, for a shared mapping of a file that may be written to."""
    fields = line.rstrip(b"\n").split(None, 5)
    if len(fields) < 6 or fields[1][1:2] != b"w" or fields[1][3:4] != b"s" or not fields[5].startswith(b"/"):
        return None
    if fields[5].startswith(_OWN_PATHS):
        return None
    return fields[0], fields[5].replace(b"\\012", b"\n")


def _links(pid: int, span: bytes) -> int | None:
    """How many names the mapped file has; None: cannot be told. A removed file (or memory of no file) has none."""
    begin, _, end = span.partition(b"-")
    try:
        return Path(f"/proc/{pid}/map_files/{int(begin, 16):x}-{int(end, 16):x}").stat().st_nlink
    except (FileNotFoundError, ProcessLookupError):
        return 0  # unmapped since
    except OSError:
        return None


def _pids(cgroup: Path) -> Iterator[int]:
    for directory, _, _ in os.walk(cgroup):
        try:
            yield from map(int, (Path(directory) / "cgroup.procs").read_text().split())
        except OSError:
            continue  # removed meanwhile
