"""What a test leaves on the machine: a look before, a look after, and the difference in words."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.testing.processes import all_processes, command_line, descendants

DEADLINE_S: Final = 60.0
_POLL_S: Final = 0.02
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_NAMESPACES: Final = ("net", "user", "mnt", "pid", "ipc", "uts", "cgroup")


@dataclass(frozen=True, slots=True)
class Watched:
    """Where to look. The machine is shared: only what belongs to the test is looked at.

    Of the mounts in our own namespace, which is everybody's, those that name a marker or a directory.
    """

    roots: frozenset[int] = field(default_factory=lambda: frozenset({os.getpid()}))  # their descendants count
    markers: tuple[bytes, ...] = ()  # processes with this in their command line count too: daemons have no parent
    cgroups: tuple[str, ...] = ()  # relative to the root of every hierarchy, such as "dsec-test-1"
    directories: tuple[Path, ...] = ()  # every path below counts
    lock_directories: tuple[Path, ...] = ()  # locks that anybody holds on files in them, such as id ranges
    mounts_of: tuple[int, ...] = ()  # processes whose mount namespaces are looked at, besides our own
    descriptors: bool = True  # of this process


Snapshot = dict[str, frozenset[str]]
"""Kind of thing → each such thing, in words that tell it from any other."""


def take_snapshot(watched: Watched) -> Snapshot:
    pids = _processes(watched)
    return {
        "processes": frozenset(pids.values()),
        "namespaces": frozenset(_namespaces(pids, watched)),
        "mounts": frozenset(_mounts(watched)),
        "cgroups": frozenset(_cgroups(watched.cgroups)),
        "locks": frozenset(_locks(watched.lock_directories)),
        "files": frozenset(_files(watched.directories)),
        "descriptors": frozenset(_descriptors() if watched.descriptors else ()),
    }


def leaks_between(before: Snapshot, after: Snapshot) -> list[str]:
    """What is there now and was not, sorted; what has gone is no leak."""
    return sorted(f"{kind}: {thing}" for kind, things in after.items() for thing in things - before[kind])


def wait_for_no_leaks(watched: Watched, before: Snapshot, *, deadline_s: float = DEADLINE_S) -> list[str]:
    """The leaks that are still there at the deadline; returns as soon as there are none.

    Some things go late by themselves: v1 cgroups, exiting processes, lazily closed descriptors.
    """
    until_s = time.monotonic() + deadline_s
    while leaks := leaks_between(before, take_snapshot(watched)):
        if time.monotonic() >= until_s:
            break
        time.sleep(_POLL_S)
    return leaks


@contextmanager
def no_leaks(watched: Watched | None = None, *, deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Raises AssertionError with the list when the block has left something. An error of the block goes first."""
    watched = watched or Watched()
    before = take_snapshot(watched)
    yield
    leaks = wait_for_no_leaks(watched, before, deadline_s=deadline_s)
    assert not leaks, _report(leaks)


@asynccontextmanager
async def no_leaks_async(watched: Watched | None = None, *, deadline_s: float = DEADLINE_S) -> AsyncIterator[None]:
    """As `no_leaks`; the event loop runs on while it waits, so that closing transports close."""
    watched = watched or Watched()
    await asyncio.sleep(0)  # the loop opens its own descriptors at its first turn
    before = take_snapshot(watched)
    yield
    until_s = time.monotonic() + deadline_s
    # Nothing in the kernel says when the last of them is gone.
    while (leaks := leaks_between(before, take_snapshot(watched))) and time.monotonic() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    assert not leaks, _report(leaks)


def _report(leaks: list[str]) -> str:
    return f"{len(leaks)} left behind:\n  " + "\n  ".join(leaks[:100])


def _processes(watched: Watched) -> dict[int, str]:
    found = descendants(watched.roots)
    if watched.markers:
        for pid, info in all_processes().items():
            line = command_line(pid)
            if pid not in watched.roots and any(marker in line for marker in watched.markers):
                found[pid] = info
    words = {pid: str(info) for pid, info in found.items()}
    for path in _cgroup_directories(watched.cgroups):
        with suppress(OSError, ValueError):
            for pid in map(int, (path / "cgroup.procs").read_text().split()):
                words.setdefault(pid, f"process {pid} in {path}")
    return words


def _namespaces(pids: Iterable[int], watched: Watched) -> Iterator[str]:
    """Those of watched processes, of our own descriptors, and those that a mount keeps."""
    own = {_link(f"/proc/self/ns/{kind}") for kind in _NAMESPACES}
    for pid in pids:
        for kind in _NAMESPACES:
            link = _link(f"/proc/{pid}/ns/{kind}")
            if link and link not in own:
                yield link
    for _, target in _own_descriptors():
        if target.split(":")[0] in _NAMESPACES and target.endswith("]"):
            yield target
    for fields in _own_mounts(watched):
        if fields[fields.index("-") + 1] == "nsfs":
            yield fields[3]


def _mounts(watched: Watched) -> Iterator[str]:
    mounts = {"self": _own_mounts(watched)} | {str(pid): _mountinfo(pid) for pid in watched.mounts_of}
    for owner, found in mounts.items():
        for fields in found:
            yield f"{fields[4]} (mount {fields[0]}, {fields[fields.index('-') + 1]}) of {owner}"


def _own_mounts(watched: Watched) -> list[list[str]]:
    names = [os.fsdecode(marker) for marker in watched.markers] + [str(path) for path in watched.directories]
    return [fields for fields in _mountinfo("self") if any(name in " ".join(fields) for name in names)]


def _mountinfo(owner: int | str) -> list[list[str]]:
    try:
        text = Path(f"/proc/{owner}/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return []
    return [line.split(" ") for line in text.splitlines()]


def _cgroups(names: Iterable[str]) -> Iterator[str]:
    return (str(path) for path in _cgroup_directories(names))


def _cgroup_directories(names: Iterable[str]) -> list[Path]:
    """Ours in every hierarchy: v2 alone, or each v1 controller and the unified tree beside them."""
    if (_CGROUP_ROOT / "cgroup.controllers").exists():
        hierarchies = [_CGROUP_ROOT]
    else:
        hierarchies = [path for path in _CGROUP_ROOT.iterdir() if path.is_dir()] if _CGROUP_ROOT.is_dir() else []
    found: list[Path] = []
    for hierarchy in hierarchies:
        for name in names:
            for directory, _, _ in os.walk(hierarchy / name):
                found.append(Path(directory))
    return found


def _locks(directories: Iterable[Path]) -> Iterator[str]:
    files: dict[str, Path] = {}
    for directory in directories:
        for path in _paths_below(directory):
            with suppress(OSError):
                stat = path.lstat()
                files[f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"] = path
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[5] in files:
            yield f"{fields[1]} lock on {files[fields[5]]}, bytes {fields[6]} to {fields[7]}"


def _files(directories: Iterable[Path]) -> Iterator[str]:
    return (str(path) for directory in directories for path in _paths_below(directory))


def _paths_below(directory: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(directory):
        for name in (*folders, *files):
            yield Path(parent) / name


def _descriptors() -> Iterator[str]:
    return (f"descriptor {number} → {target}" for number, target in _own_descriptors())


def _own_descriptors() -> Iterator[tuple[str, str]]:
    # All names first: the listing has a descriptor of its own, which is closed when they are looked at.
    for path in list(Path("/proc/self/fd").iterdir()):
        target = _link(str(path))
        if target:
            yield path.name, target


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
