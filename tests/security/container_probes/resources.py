"""Attempts at the files that show a sandbox its share of the machine, and at what shows it the rest."""

# ruff: noqa: PTH208
from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from .kit import FACTS, REFUSED, BlockedError, call, group, probe

_SHOWN: Final = (
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/stat",
    "/proc/loadavg",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/cpu/possible",
    "/sys/devices/system/cpu/present",
)
_OF_THE_HOST: Final = ("cmdline", "locks", "partitions", "diskstats", "sys/fs/file-nr")
_CASES: Final = [(path.strip("/").replace("/", "_"), path) for path in _SHOWN]
_DETACH: Final = 2


@group("uncover", _CASES)
def _(path: str) -> str:
    call(166, path.encode(), _DETACH)
    return f"{path} is the kernel's own again"


@group("change", _CASES)
def _(path: str) -> str:
    return f"descriptor {os.open(path, os.O_WRONLY)}"


@group("change_mode_of", _CASES)
def _(path: str) -> str:
    Path(path).chmod(0o666)
    return "anybody may write it"


@group("replace", _CASES, *REFUSED, errno.EBUSY, errno.EXDEV)
def _(path: str) -> str:
    Path("/tmp/other").write_text("0-63\n")
    Path("/tmp/other").rename(path)
    return "another file is there"


@group("climb_from", _CASES, errno.ENOTDIR)
def _(path: str) -> str:
    return f"{os.listdir(f'{path}/..')}"


@group("read", [(f"proc_{name.replace('/', '_')}", f"/proc/{name}") for name in _OF_THE_HOST], *REFUSED, errno.ENOENT)
def _(path: str) -> str:
    if not (text := Path(path).read_text()):
        raise BlockedError("empty")
    return text[:80]


@probe()
def file_systems_of_the_host() -> str:
    if not (names := os.listdir("/proc/fs")):
        raise BlockedError("empty")
    return f"{names}"


@probe()
def memory_of_the_host() -> str:
    total = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")
    )
    if total * 1024 == FACTS["memory_bytes"]:
        raise BlockedError("the sandbox's own limit")
    return f"{total} KiB"


@probe()
def processors_of_the_host() -> str:
    counts = {
        "online": os.sysconf("SC_NPROCESSORS_ONLN"),
        "configured": os.sysconf("SC_NPROCESSORS_CONF"),
        "described": Path("/proc/cpuinfo").read_text().count("processor\t:"),
        "counted": Path("/proc/stat").read_text().count("\ncpu"),
        "usable": len(os.sched_getaffinity(0)),
    }
    if set(counts.values()) == {FACTS["cpus"]}:
        raise BlockedError("the sandbox's own share")
    return f"{counts}"


@probe(errno.EACCES, errno.EPERM)
def score_below_that_of_the_agent() -> str:
    agent = int(Path("/proc/1/oom_score_adj").read_text())
    Path("/proc/self/oom_score_adj").write_text(str(agent - 1))
    return "the agent goes first"


@probe(errno.EACCES, errno.EPERM)
def score_of_the_agent() -> str:
    Path("/proc/1/oom_score_adj").write_text("1000")
    return "the agent goes first"


@probe(errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS)
def other_files_of_the_server_by_handle() -> str:
    handle = ctypes.create_string_buffer(8 + 128)
    ctypes.memmove(handle, (128).to_bytes(4, "little"), 4)
    mount_id = ctypes.c_int()
    call(303, -100, b"/proc/meminfo", ctypes.addressof(handle), ctypes.addressof(mount_id), 0)
    descriptor = os.open("/proc/meminfo", os.O_RDONLY)
    return f"descriptor {call(304, descriptor, ctypes.addressof(handle), os.O_RDONLY)}"
