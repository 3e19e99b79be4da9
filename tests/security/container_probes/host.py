"""Attempts at the host, and at what the agent has of it."""

# ruff: noqa: PTH115, PTH121, PTH208
# Functions of os say best which system call is tried.
from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import stat
import struct
from pathlib import Path
from typing import Final

from .kit import (
    FACTS,
    REFUSED,
    BlockedError,
    become,
    call,
    group,
    nothing_of,
    probe,
)

_WRITES: Final = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/drop_caches",
    "/proc/sys/fs/binfmt_misc/register",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/kernel/hostname",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/user/max_user_namespaces",
    "/proc/sysrq-trigger",
    "/proc/irq/default_smp_affinity",
    "/proc/bus/pci/devices",
    "/sys/kernel/uevent_helper",
    "/sys/power/state",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/kernel/profiling",
)
_HIDDEN_FILES: Final = (
    "kcore",
    "kallsyms",
    "keys",
    "key-users",
    "kmsg",
    "timer_list",
    "interrupts",
    "iomem",
    "ioports",
    "modules",
    "slabinfo",
    "swaps",
    "config.gz",
    "vmallocinfo",
    "kpagecount",
    "kpageflags",
    "kpagecgroup",
    "sched_debug",
    "latency_stats",
)
_HIDDEN_DIRECTORIES: Final = (
    "/sys/firmware",
    "/sys/fs/cgroup",
    "/sys/kernel/debug",
    "/sys/kernel/security",
    "/sys/kernel/tracing",
    "/sys/fs/bpf",
    "/sys/kernel/mm/damon",
    "/sys/kernel/slab",
    "/sys/devices/virtual/powercap",
    "/proc/scsi",
    "/proc/acpi",
    "/proc/asound",
    "/proc/driver",
)


@group("write", [(path.strip("/").replace("/", "_"), path) for path in _WRITES], *REFUSED, errno.ENOENT)
def _(path: str) -> str:
    # A masked file is /dev/null: whoever writes to it has reached nothing.
    if Path(path).exists() and os.path.samefile(path, "/dev/null"):
        raise BlockedError("masked")
    return f"descriptor {os.open(path, os.O_WRONLY)}"


@group("read", [(f"proc_{name}", f"/proc/{name}") for name in _HIDDEN_FILES], *REFUSED, errno.ENOENT)
def _(path: str) -> str:
    data = os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 64)
    if not data:
        raise BlockedError("empty")
    return f"{data!r}"


@group("list", [(path.strip("/").replace("/", "_"), path) for path in _HIDDEN_DIRECTORIES], *REFUSED, errno.ENOENT)
def _(path: str) -> str:
    return nothing_of(os.listdir(path))


@probe()
def anything_writable_in_sys() -> str:
    return nothing_of(writable_below("/sys"))


@probe()
def anything_writable_in_proc_outside_processes() -> str:
    return nothing_of(writable_below("/proc"))


def writable_below(top: str) -> list[str]:
    found = []
    null = Path("/dev/null").stat()
    for directory, directories, names in os.walk(top):
        if directory == "/proc":
            directories[:] = [
                name for name in directories if not name.isdigit() and name not in ("self", "thread-self")
            ]
        for name in names:
            path = f"{directory}/{name}"
            try:
                info = os.lstat(path)
                if not stat.S_ISREG(info.st_mode) or os.path.samestat(info, null):
                    continue
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
            except OSError:
                continue
            found.append(path)
    return found


@probe(errno.EACCES, errno.EPERM)
def less_oom_score_than_given() -> str:
    Path("/proc/self/oom_score_adj").write_text("-1000")
    return "never killed for memory"


@probe()
def host_processes_in_proc() -> str:
    seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    names = {pid: Path(f"/proc/{pid}/status").read_text().split()[1] for pid in seen if pid != os.getpid()}
    return nothing_of(
        [f"{pid} {name}" for pid, name in names.items() if name not in ("memfd:dsec-agen", "dsec-agent", "python3")]
    )


@group("host_process", [("signal", 0), ("ptrace", 1), ("memory", 2), ("scheduling", 3)], errno.ESRCH, errno.ENOENT)
def _(how: int) -> str:
    pid = FACTS["host_pid"]
    if how == 0:
        os.kill(pid, 0)
    elif how == 1:
        call(101, 0x4206, pid, 0, 0)  # PTRACE_SEIZE
    elif how == 2:
        os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    else:
        os.sched_getaffinity(pid)
    return f"reached process {pid} of the host"


@probe()
def cgroup_paths_of_the_host() -> str:
    lines = Path("/proc/self/cgroup").read_text().split()
    return nothing_of([line for line in lines if ".." in line or FACTS["cgroup_parent"] in line])


@probe()
def mounts_of_the_host() -> str:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return nothing_of([line for line in lines if FACTS["directory"] in line or " ext4 " in line or " xfs " in line])


@probe()
def directory_of_the_host_through_proc_self_root() -> str:
    return nothing_of(
        [
            path
            for path in ("self/root", "1/cwd", "self/cwd")
            if Path(f"/proc/{path}/../../../..{FACTS['directory']}").exists()
        ]
    )


_AGENT_FILES: Final = (
    "mem",
    "maps",
    "environ",
    "exe",
    "auxv",
    "syscall",
    "stack",
    "smaps",
    "pagemap",
    "task/1/mem",
    "clear_refs",
    "io",
)


@group("agent_file", [(name.replace("/", "_"), name) for name in _AGENT_FILES], *REFUSED, errno.ENOENT, errno.ESRCH)
def _(name: str) -> str:
    descriptor = os.open(f"/proc/1/{name}", os.O_WRONLY if name == "clear_refs" else os.O_RDONLY)
    if name != "clear_refs" and not os.read(descriptor, 1):
        raise BlockedError("empty")
    return f"/proc/1/{name} is open"


@group("agent_place", [(name, name) for name in ("fd", "fdinfo", "map_files", "root", "cwd")], *REFUSED, errno.ENOENT)
def _(name: str) -> str:
    return nothing_of(os.listdir(f"/proc/1/{name}"))


@probe(errno.EACCES, errno.EPERM, errno.ETXTBSY)
def overwrite_the_agent() -> str:
    return f"descriptor {os.open('/proc/1/exe', os.O_WRONLY)}"


@group("ptrace_agent", [("attach", 16), ("seize", 0x4206)], errno.EPERM, errno.EACCES)
def _(request: int) -> str:
    call(101, request, 1, 0, 0)
    return "traces the agent"


@group("memory_of_agent", [("read", 310), ("write", 311)], errno.EPERM, errno.EACCES)
def _(number: int) -> str:
    buffer = ctypes.create_string_buffer(8)
    here = struct.pack("QQ", ctypes.addressof(buffer), 8)
    there = struct.pack("QQ", 0x400000, 8)
    return f"{call(number, 1, here, 1, there, 1, 0)} bytes of the agent"


@probe(errno.EPERM)
def descriptors_of_the_agent() -> str:
    return f"descriptor {call(438, os.pidfd_open(1), 3, 0)}"


@probe(errno.EPERM)
def kcmp_with_the_agent() -> str:
    return f"{call(312, os.getpid(), 1, 0, 0, 0)}"


@group("limits_of_agent", [("as_root", 0), ("as_its_user", 65_535)], errno.EPERM, errno.EACCES)
def _(uid: int) -> str:
    become(uid)
    soft, hard = resource.prlimit(1, resource.RLIMIT_NOFILE)
    resource.prlimit(1, resource.RLIMIT_NOFILE, (soft, hard))
    return f"limits of the agent: {soft}, {hard}"


@group("scheduling_of_agent", [("as_root", 0), ("as_its_user", 65_535)], errno.EPERM, errno.EACCES)
def _(uid: int) -> str:
    become(uid)
    os.sched_setaffinity(1, os.sched_getaffinity(0))
    return "the agent is pinned"


@probe(errno.EPERM, errno.EACCES)
def trace_the_agent_as_its_user() -> str:
    become(65_535)
    call(101, 0x4206, 1, 0, 0)
    return "traces the agent"


@probe()
def socket_of_the_agent() -> str:
    found = [line for line in Path("/proc/net/unix").read_text().splitlines() if "agent.sock" in line or "dsec" in line]
    for directory, directories, names in os.walk("/"):
        directories[:] = [name for name in directories if f"{directory}{name}" not in ("/proc", "/sys")]
        found += [f"{directory}/{name}" for name in names if stat.S_ISSOCK(os.lstat(f"{directory}/{name}").st_mode)]
    return nothing_of(found)


@probe()
def leaked_descriptors() -> str:
    found = []
    for number in range(3, min(65_536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])):
        if number == FACTS["report"]:
            continue
        try:
            fcntl.fcntl(number, fcntl.F_GETFD)
        except OSError:
            continue
        found.append(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    for number in range(3):
        if stat.S_ISDIR(os.fstat(number).st_mode) or stat.S_ISSOCK(os.fstat(number).st_mode):
            found.append(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return nothing_of(found)
