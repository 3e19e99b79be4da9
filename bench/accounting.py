"""All memory and processor time that sandboxes cost: read from the kernel, by where it is.

What belongs to a process or a file system of a sandbox is read there. What the kernel has no owner for (slab, memory
for each processor) is what the machine has more of than before: it must be otherwise quiet. Beside the sum of these
parts stands what the machine has less free, as a check.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_KIB: Final = 1024
_STACK_BYTES: Final = 16 * _KIB  # of each thread in the kernel, on x86-64
_ROOT_BYTES: Final = 4 * _KIB  # of page tables: what they hang from is not counted with them
TABLES: Final = "slab, tables of memory cgroups"
# So many file systems have their places in 1 KiB of a memory cgroup's table: `shrinker_info_unit` of the kernel.
_FILE_SYSTEMS_PER_KIB: Final = 64
_MEMORY: Final = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
_TRIED: Final = 64  # empty memory cgroups that are made to see what one takes


@dataclass(frozen=True, slots=True)
class Fleet:
    """Whose memory and time it is."""

    service: int
    launcher: int
    cgroup: Path  # cgroup2 directory of the node: each sandbox has one in it

    def agents(self) -> list[int]:
        """Every process of a sandbox, other than what its commands started."""
        return [int(pid) for file in self.cgroup.glob("*/agent/cgroup.procs") for pid in _text(file).split()]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at one moment."""

    machine: int  # all but what is free, and files that could be read again
    parts: dict[str, int] = field(default_factory=dict)

    def per(self, before: Memory, count: int) -> dict[str, float]:
        """KiB that each of `count` sandboxes has added: by part, their sum, and what the machine has less."""
        grown = {name: self.parts[name] - before.parts[name] for name in self.parts}
        grown["sum"] = sum(grown.values())
        grown["machine"] = self.machine - before.machine
        return {name: round(value / count / _KIB, 1) for name, value in grown.items()}


def memory_of(fleet: Fleet) -> Memory:
    info = dict(_meminfo())
    tables = _slab_cache_bytes("kmalloc-1k")
    agents = fleet.agents()
    return Memory(
        machine=info["MemTotal"] - info["MemFree"] - info["Buffers"] - info["Cached"] + info["Shmem"],
        parts={
            "agents": sum(map(private_bytes, agents)),
            "agents' page tables": sum(_page_table_bytes(pid) + _ROOT_BYTES for pid in agents),
            "agents' kernel stacks": _STACK_BYTES * sum(len(list(_tasks(pid))) for pid in agents),
            "files in memory": sum(map(_memory_file_bytes, agents)),
            # Nearly all of it the table that each memory cgroup has of all file systems: kept apart because it does not
            # shrink before a reboot, so that it says how many sandboxes there have ever been at once.
            TABLES: tables,
            "slab": info["SUnreclaim"] - tables,
            "slab, reclaimable": info["SReclaimable"],
            "for each processor": info["Percpu"],
            # Nearly all of it the agents' filters.
            "mapped by the kernel": info["VmallocUsed"] - info["KernelStack"],
            "service": private_bytes(fleet.service),
            "launcher": private_bytes(fleet.launcher),
        },
    )


def table_kib() -> float | None:
    """Of a memory cgroup in which there is nothing: the table of all file systems that there are, or ever were at once.

    None where memory is not counted by cgroups of which one can be made.
    """
    found = [root for root in _MEMORY if (root / "cgroup.procs").exists() and _counts_memory(root)]
    if not found:
        return None
    before = _slab_cache_bytes("kmalloc-1k", used=True)
    with _empty_cgroups(found[0], _TRIED):
        after = _slab_cache_bytes("kmalloc-1k", used=True)
    return round((after - before) / _TRIED / _KIB, 1)


def table_kib_of(count: int) -> float:
    """What that table takes for so many file systems, on a machine that never had more."""
    return round(count / _FILE_SYSTEMS_PER_KIB, 1)


def file_systems(pids: Iterable[int]) -> int:
    """Different ones that all of these processes together see mounted."""
    return len({device for pid in pids for device in _devices(pid)})


def _devices(pid: int) -> set[str]:
    return {line.split()[2] for line in _text(Path(f"/proc/{pid}/mountinfo")).splitlines()}


def _counts_memory(root: Path) -> bool:
    return root.name == "memory" or "memory" in _text(root / "cgroup.subtree_control").split()


@contextmanager
def _empty_cgroups(root: Path, count: int) -> Iterator[None]:
    made: list[Path] = []
    try:
        for number in range(count):
            directory = root / f"dsec-bench-{os.getpid()}-{number}"
            directory.mkdir()
            made.append(directory)
        yield
    finally:
        for directory in made:
            directory.rmdir()


def private_bytes(pid: int) -> int:
    """Anonymous memory of one process."""
    return _keyed_kib(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon:")


def resident_bytes(pid: int) -> int:
    return _keyed_kib(Path(f"/proc/{pid}/status"), "VmRSS:")


def started_at(pid: int) -> int:
    """In ticks since boot; 0 when it has gone meanwhile."""
    return int((_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split() or ["0"] * 20)[19])


def _page_table_bytes(pid: int) -> int:
    return _keyed_kib(Path(f"/proc/{pid}/status"), "VmPTE:")


def _memory_file_bytes(pid: int) -> int:
    """Of the file systems in memory that the sandbox of this agent has."""
    devices: dict[int, int] = {}
    for place in ("dev", "dev/shm", "run"):
        try:
            path = f"/proc/{pid}/root/{place}"
            facts = os.statvfs(path)
            if not facts.f_flag & os.ST_RDONLY and _is_tmpfs(pid, place):
                devices[Path(path).stat().st_dev] = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        except OSError:
            continue
    return sum(devices.values())


def _is_tmpfs(pid: int, place: str) -> bool:
    return f" /{place} " in _text(Path(f"/proc/{pid}/mountinfo"))


def _keyed_kib(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * _KIB
    return 0


@dataclass(frozen=True, slots=True)
class Time:
    """Processor seconds since boot, by who spent them."""

    seconds: dict[str, float]

    def since(self, before: Time) -> dict[str, float]:
        spent = {name: value - before.seconds[name] for name, value in self.seconds.items()}
        return {**spent, "all": sum(spent.values())}


def time_of(fleet: Fleet) -> Time:
    return Time(
        {
            "service": _run_s(fleet.service),
            "launcher": _run_s(fleet.launcher) + _reaped_s(fleet.launcher),
            "sandboxes": _keyed(fleet.cgroup / "cpu.stat").get("usage_usec", 0) / 1e6,
        }
    )


def turns(pids: Iterable[int]) -> int:
    """How often all of these processes together were given a processor."""
    return sum(_turns(pid) for pid in pids)


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def at_rest(read: Callable[[], int], *, readings: int = 5, pause_s: float = 0.1, readings_max: int = 100) -> int:
    """What is read once that stays as it is: what is made ahead or removed late is under way after the last answer."""
    last, same = read(), 1
    for _ in range(readings_max):
        if same == readings:
            break
        time.sleep(pause_s)
        now = read()
        last, same = now, same + 1 if now == last else 1
    return last


def mounts(pid: int) -> int:
    return _text(Path(f"/proc/{pid}/mountinfo")).count("\n")


def slab_bytes() -> int:
    return dict(_meminfo())["Slab"]


def _slab_cache_bytes(name: str, *, used: bool = False) -> int:
    """`used`: of what is taken, without what is free in the same pages."""
    for line in _text(Path("/proc/slabinfo")).splitlines():
        fields = line.split()
        if fields and fields[0] == name:
            if used:
                return int(fields[1]) * int(fields[3])
            return int(fields[14]) * int(fields[5]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _run_s(pid: int) -> float:
    """Of all its threads, to the nanosecond."""
    return sum(int(_text(task / "schedstat").split()[0] or 0) for task in _tasks(pid)) / 1e9


def _reaped_s(pid: int) -> float:
    """Of its children that have ended; in ticks."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def _turns(pid: int) -> int:
    return sum(int((_text(task / "schedstat").split() or ["0", "0", "0"])[2]) for task in _tasks(pid))


def _tasks(pid: int) -> Iterable[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return ()


def _meminfo() -> Iterator[tuple[str, int]]:
    for line in _text(Path("/proc/meminfo")).splitlines():
        name, value = line.split()[:2]
        yield name.rstrip(":"), int(value) * _KIB


def _keyed(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in _text(path).splitlines())}


def _text(path: Path) -> str:
    """Empty when it has gone meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""
