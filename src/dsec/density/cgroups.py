"""Control groups on v2, v1 and hybrid hosts (cgroups(7), Documentation/admin-guide/cgroup-v2.rst).

One cgroup2 directory per sandbox everywhere: freezing, killing, pressure and CPU time work there even without
controllers. On hosts whose controllers are on v1, directories in those hierarchies carry the limits.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from dsec.core.errors import HostError, UnsupportedError

LIMIT_CONTROLLERS = ("memory", "cpu", "pids")
_CPU_PERIOD_US = 100_000
_READ_BYTES_MAX = 64 * 1024
_CPUSET = "cpuset"
_IDLE = "cpu.idle"
_V1_CPU_TIME = "cpuacct"  # looked at where no cgroup2 counts it
_OURS = "trusted.dsec.made"  # an attribute of directories that the operator has not made
_V1_SWAP = "memory.memsw.limit_in_bytes"  # memory and swap together; not below memory alone, and so written after it
_V1_SOCKETS = "memory.kmem.tcp.limit_in_bytes"  # of UDP as well, whatever its name says


@dataclass(frozen=True, slots=True)
class CgroupHost:
    """Where the hierarchies are, and which controllers each has."""

    v2: Path | None
    v2_controllers: frozenset[str] = frozenset()
    v1: dict[str, Path] = field(default_factory=dict)  # controller → mount point
    swap: bool = True  # this kernel can swap: only then v2 has files about it
    v1_sockets: bool = False  # v1 can bound the memory of sockets; v2 counts it as any other
    v1_swap: bool = False  # v1 counts swap
    cpuset: Path | None = None  # hierarchy that says on which processors; only those who ask for some are in it
    cpuset_v2: bool = False  # that hierarchy is cgroup2
    cpuset_memories: str = "0"  # all memory nodes of the machine, which v1 wants to be told
    cpu_idle: bool = False  # this kernel knows cgroups that run when nobody else wants to (5.15 on)

    @property
    def mode(self) -> str:
        if not self.v1:
            return "v2" if self.v2 else "none"
        return "hybrid" if self.v2 else "v1"

    def limits(self, controller: str) -> str | None:
        """Which hierarchy limits it: "v2", "v1" or None."""
        if controller in self.v2_controllers:
            return "v2"
        return "v1" if controller in self.v1 else None


def detect(mountinfo: Path = Path("/proc/self/mountinfo")) -> CgroupHost:
    """Reads mounts, not names of files: the unified tree may be at /sys/fs/cgroup or below it."""
    v2: Path | None = None
    v1: dict[str, Path] = {}
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or len(tail) < 3 or fields[3] != "/":
            continue
        mount = Path(fields[4])
        if tail[0] == "cgroup2" and v2 is None:
            v2 = mount
        elif tail[0] == "cgroup":
            for option in tail[2].split(","):
                if option in (*LIMIT_CONTROLLERS, _V1_CPU_TIME, _CPUSET):
                    v1.setdefault(option, mount)
    controllers: frozenset[str] = frozenset()
    cpuset = v1.pop(_CPUSET, None)
    cpuset_v2 = False
    if v2 is not None:
        offered = frozenset((v2 / "cgroup.controllers").read_text().split())
        controllers = offered & frozenset(LIMIT_CONTROLLERS)
        cpuset_v2 = _CPUSET in offered
    if v2 is not None or v1.get(_V1_CPU_TIME) == v1.get("cpu"):
        v1.pop(_V1_CPU_TIME, None)  # mounted with the limit of the processor it is in one directory with that
    memory = v1.get("memory")
    return CgroupHost(
        v2,
        controllers,
        v1,
        swap=Path("/proc/swaps").exists(),
        v1_sockets=memory is not None and (memory / _V1_SOCKETS).exists(),
        v1_swap=memory is not None and (memory / _V1_SWAP).exists(),
        cpuset=v2 if cpuset_v2 else cpuset,
        cpuset_v2=cpuset_v2,
        cpuset_memories=_read(cpuset / "cpuset.mems").strip() or "0" if cpuset is not None else "0",
        cpu_idle=_knows_idle(v2 if "cpu" in controllers else v1.get("cpu")),
    )


def _knows_idle(hierarchy: Path | None) -> bool:
    """The root of a hierarchy need not have the file: any cgroup below has."""
    if hierarchy is None or not hierarchy.is_dir():
        return False
    below = next((entry for entry in hierarchy.iterdir() if (entry / "cpu.stat").exists()), hierarchy)
    return (hierarchy / _IDLE).exists() or (below / _IDLE).exists()


@dataclass(frozen=True, slots=True)
class CgroupPlan:
    """Directories for one sandbox and what is written into them."""

    cgroup2: str | None
    cgroup2_files: dict[str, str]
    cgroup1: dict[str, str]  # controller → directory
    cgroup1_files: dict[str, dict[str, str]]


def plan_cgroups(
    host: CgroupHost,
    parent: str,
    name: str,
    *,
    cpu: float,
    memory_bytes: int,
    pids: int,
    background: bool = False,
    cpus: str | None = None,
) -> CgroupPlan:
    """Pure. `parent` is the path of the node's directory below each hierarchy's root. `background`: it runs when no
    other sandbox of the node wants the processor; `cpus`: on these processors alone.

    Raises UnsupportedError for processors on a host that cannot keep to them.
    """
    quota = max(1_000, round(cpu * _CPU_PERIOD_US))  # the kernel refuses less than 1 ms
    files2: dict[str, str] = {}
    files1: dict[str, dict[str, str]] = {}
    # On v1 buffers of IP sockets are counted for nobody until they have a bound of their own, beside the memory's.
    sockets1 = {_V1_SOCKETS: str(memory_bytes // 4)} if host.v1_sockets else {}
    swap1 = {_V1_SWAP: str(memory_bytes)} if host.v1_swap else {}
    wanted: dict[str, tuple[dict[str, str], dict[str, str]]] = {
        "memory": (
            # No swap: a sandbox at its limit is told so (OOM) instead of thrashing the node's disk.
            {"memory.max": str(memory_bytes), **({"memory.swap.max": "0"} if host.swap else {})},
            {"memory.limit_in_bytes": str(memory_bytes), **swap1, **sockets1},
        ),
        "cpu": (
            {"cpu.max": f"{quota} {_CPU_PERIOD_US}", **_class_files(host, background, "cpu.weight", "1")},
            # Not the period, which is this one from the start: each write looks at every cgroup of the machine.
            {"cpu.cfs_quota_us": str(quota), **_class_files(host, background, "cpu.shares", "2")},
        ),
        "pids": ({"pids.max": str(pids)}, {"pids.max": str(pids)}),
    }
    for controller, (v2_files, v1_files) in wanted.items():
        where = host.limits(controller)
        if where == "v2":
            files2.update(v2_files)
        elif where == "v1":
            files1[controller] = v1_files
    if _V1_CPU_TIME in host.v1:
        files1[_V1_CPU_TIME] = {}
    # As text: paths are put together for each create, and as objects that was most of its plan.
    directories1 = {controller: f"{host.v1[controller]}/{parent}/{name}" for controller in files1}
    if cpus is not None:
        if host.cpuset is None:
            raise UnsupportedError(
                "this host cannot keep a sandbox to some processors", hint="it has no cpuset cgroups"
            )
        if host.cpuset_v2:
            files2["cpuset.cpus"] = cpus
        else:
            # Of a new directory both are empty, and nothing can be in it until they are not.
            files1[_CPUSET] = {"cpuset.cpus": cpus, "cpuset.mems": host.cpuset_memories}
            directories1[_CPUSET] = f"{host.cpuset}/{parent}/{name}"
    return CgroupPlan(
        cgroup2=f"{host.v2}/{parent}/{name}" if host.v2 else None,
        cgroup2_files=files2,
        cgroup1=directories1,
        cgroup1_files=files1,
    )


def _class_files(host: CgroupHost, background: bool, weight: str, least: str) -> dict[str, str]:
    """Idle is more than a small weight: one that is woken takes the processor from it at once."""
    if not background:
        return {}
    return {_IDLE: "1"} if host.cpu_idle else {weight: least}


def memory_for_all(total_bytes: int, kept_for_host_bytes: int) -> int:
    """What all sandboxes together may use, whatever each is promised. A small host keeps a quarter of itself."""
    return total_bytes - min(kept_for_host_bytes, total_bytes // 4)


def prepare_parent(host: CgroupHost, parent: str, *, pids_max: int, memory_max: int | None = None) -> None:
    """Make the node's own directory in each hierarchy: all sandboxes together get at most `pids_max` processes and
    `memory_max` bytes, so that what they are promised beyond is theirs to fight for, and never the host's.

    Raises HostError naming what the host refused.
    """
    hint = "run as root, or in a unit with Delegate=yes"
    with contextlib.suppress(HostError):
        # Another node that ends may remove what is empty, while we make ours in it: then all is made again.
        return _prepare(host, parent, pids_max, memory_max, hint)
    return _prepare(host, parent, pids_max, memory_max, hint)


def _prepare(host: CgroupHost, parent: str, pids_max: int, memory_max: int | None, hint: str) -> None:
    try:
        if host.v2 is not None:
            _prepare_v2(host.v2, parent, host.v2_controllers, pids_max, memory_max)
        for controller, mount in host.v1.items():
            if host.limits(controller) == "v1":
                directory = mount
                for part in Path(parent).parts:
                    directory = directory / part
                    _make(directory)
                if controller == "pids":
                    (directory / "pids.max").write_text(str(pids_max))
                elif controller == "memory" and memory_max is not None:
                    _set_memory(directory / "memory.limit_in_bytes", memory_max)
    except OSError as error:
        if error.errno == errno.EBUSY:
            hint = "processes are in a cgroup above it, which then hands nothing down; move them to one beside it"
        raise HostError(f"cannot make the cgroup {parent!r}: {error}", hint=hint) from error


def prepare_cpuset(host: CgroupHost, parent: str) -> None:
    """As `prepare_parent`, for sandboxes that are kept to some processors: the node's directory has all of them."""
    if host.cpuset is None:
        return
    try:
        if host.cpuset_v2:
            _prepare_v2(host.cpuset, parent, frozenset({_CPUSET}), 0, None)
            return
        directory = host.cpuset
        for part in Path(parent).parts:
            above, directory = directory, directory / part
            _make(directory)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if not (directory / name).read_text().strip():
                    (directory / name).write_text((above / name).read_text())
    except OSError as error:
        raise HostError(f"cannot make the cgroup {parent!r} of processors: {error}") from error


def _make(directory: Path) -> None:
    try:
        directory.mkdir()
    except FileExistsError:
        return
    with contextlib.suppress(OSError):  # then it is nobody's, and stays
        os.setxattr(directory, _OURS, b"")


def _set_memory(file: Path, memory_max: int) -> None:
    try:
        file.write_text(str(memory_max))
    except OSError as error:
        # Sandboxes of before use more than that, as when the host has less than it had: the bound of then stays.
        if error.errno != errno.EBUSY:
            raise


def _prepare_v2(mount: Path, parent: str, controllers: frozenset[str], pids_max: int, memory_max: int | None) -> None:
    directory = mount
    for part in Path(parent).parts:
        _hand_down(directory, controllers)
        directory = directory / part
        _make(directory)
    _hand_down(directory, controllers)
    if "pids" in controllers:
        (directory / "pids.max").write_text(str(pids_max))
    if "memory" in controllers and memory_max is not None:
        _set_memory(directory / "memory.max", memory_max)


def _hand_down(directory: Path, controllers: frozenset[str]) -> None:
    """A directory hands controllers to its children only once it names them itself.

    One that does already may be another's to write, above what is delegated to us.
    """
    file = directory / "cgroup.subtree_control"
    missing = controllers - set(file.read_text().split() if file.exists() else ())
    if missing:
        file.write_text(" ".join(f"+{controller}" for controller in sorted(missing)))


def remove_unknown(host: CgroupHost, parent: str, known: Collection[str]) -> None:
    """Empty cgroups of sandboxes below `parent` that are none of `known`. One in which something runs stays."""
    for root in {*host.v1.values(), *([host.v2] if host.v2 else [])}:
        try:
            there = [path for path in (root / parent).iterdir() if path.is_dir() and path.name not in known]
        except OSError:
            continue
        for directory in there:
            for below in (directory / "agent", directory / "work", directory):
                with contextlib.suppress(OSError):
                    below.rmdir()


def set_memory_limit(v2: str | None, v1: str | None, memory_bytes: int) -> None:
    """Of one sandbox that runs, in these directories. Raises OSError; UnsupportedError where memory is not limited.

    On v1 memory with swap is never below memory alone, so the order depends on the direction; and what is used already
    cannot be cut off: then the limit is set where the use is.
    """
    if v2 is not None and Path(v2, "memory.max").exists():
        Path(v2, "memory.max").write_text(str(memory_bytes))
        return
    if v1 is None:
        raise UnsupportedError("this host does not limit memory", hint="see `dsec doctor`")
    files = [file for name in ("memory.limit_in_bytes", _V1_SWAP) if (file := Path(v1, name)).exists()]
    if (read_number(files[0]) or 0) < memory_bytes:
        files.reverse()
    for file in files:
        try:
            file.write_text(str(memory_bytes))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            used = read_number(Path(v1, "memory.usage_in_bytes")) or memory_bytes
            file.write_text(str(max(used + used // 8, memory_bytes)))


def remove_parent(host: CgroupHost, parent: str) -> None:
    """Remove the node's directories where they are empty, and those above which a node has made and none uses."""
    for mount in {*([host.v2] if host.v2 else []), *([host.cpuset] if host.cpuset else []), *host.v1.values()}:
        with contextlib.suppress(OSError):
            (mount / parent).rmdir()
            for above in Path(parent).parents[:-1]:
                os.getxattr(mount / above, _OURS)
                (mount / above).rmdir()


# ---- reading -------------------------------------------------------------------------------------


def read_number(path: Path | str) -> int | None:
    """None when the file is absent, unreadable, or says "max"."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def read_keyed(path: Path | str) -> dict[str, int]:
    """Files of `key value` lines; empty when absent."""
    pairs = [line.split() for line in _read(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def read_pressure_s(path: Path | str) -> float | None:
    """Seconds in which some task waited, from a PSI file (Documentation/accounting/psi.rst)."""
    for line in _read(path).splitlines():
        if line.startswith("some "):
            return int(line.rsplit("total=", 1)[1]) / 1e6
    return None


def _read(path: Path | str) -> str:
    """All of a file of the kernel, which fits one read; empty when it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(file, _READ_BYTES_MAX).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(file)
