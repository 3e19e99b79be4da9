"""Attempts to be more than one was made."""

# ruff: noqa: PTH101
# Functions of os say best which system call is tried.
from __future__ import annotations

import errno
import os
import resource
import struct
from pathlib import Path
from typing import Any, Final

from .kit import (
    FACTS,
    REFUSED,
    BlockedError,
    call,
    group,
    new_directory,
    nothing_of,
    probe,
    run_as_user,
)

# Those with which a process leaves its place or reaches the kernel, and more than any command needs.
_DANGEROUS: Final = (
    2,
    9,
    12,
    13,
    14,
    15,
    16,
    17,
    18,
    19,
    20,
    21,
    22,
    23,
    24,
    25,
    26,
    27,
    29,
    30,
    32,
    33,
    34,
    35,
    36,
    37,
    38,
    39,
    40,
)


@group("capabilities", [(kind, kind) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")])
def _(kind: str) -> str:
    text = Path("/proc/self/status").read_text()
    mask = int(text.partition(f"Cap{kind}:")[2].split()[0], 16)
    return nothing_of([str(bit) for bit in _DANGEROUS if mask >> bit & 1])


@probe(errno.EPERM)
def raise_capabilities() -> str:
    header = struct.pack("Ii", 0x20080522, 0)
    call(126, header, struct.pack("6I", *[0xFFFFFFFF] * 6))
    return "every capability"


@probe()
def rise_by_a_set_user_id_program() -> str:
    path = f"/tmp/id-{os.getpid()}"
    Path(path).write_bytes(Path("/bin/id").read_bytes())
    os.chmod(path, 0o4755)
    shown = run_as_user([path, "-u"])
    if shown != b"0\n":
        raise BlockedError(f"runs as {shown!r}")
    return "runs as root"


@probe(*REFUSED)
def rise_by_file_capabilities() -> str:
    path = f"/tmp/cat-{os.getpid()}"
    Path(path).write_bytes(Path("/bin/cat").read_bytes())
    os.chmod(path, 0o755)
    os.setxattr(path, "security.capability", struct.pack("5I", 0x02000001, 0xC1, 0, 0, 0))  # chown, kill, setuid
    shown = run_as_user([path, "/proc/self/status"]).decode()
    mask = int(shown.partition("CapEff:")[2].split()[0], 16)
    if not mask:
        raise BlockedError("runs without capabilities")
    return f"runs with {mask:x}"


@probe()
def no_new_privileges_is_off() -> str:
    state = Path("/proc/self/status").read_text().partition("NoNewPrivs:")[2].split()[0]
    return nothing_of([] if state == "1" else [f"NoNewPrivs {state}"])


@probe(errno.EINVAL, errno.EPERM)
def take_back_no_new_privileges() -> str:
    call(157, 38, 0, 0, 0, 0)
    return "taken back"


@group(
    "prctl",
    [("securebits", (157, 28, 0x2F)), ("memory_map", (157, 35, 6, 0x10000)), ("bounding_set", (157, 24, 21))],
    errno.EPERM,
    errno.EINVAL,
)
def _(arguments: tuple[int, ...]) -> str:
    return f"answered {call(*arguments)}"


@group(
    "identity",
    [("beyond_the_range", 65_536), ("of_the_host", FACTS), ("nobody_of_the_kernel", 0xFFFFFFFE)],
    errno.EINVAL,
    errno.EPERM,
)
def _(uid: Any) -> str:
    wanted = FACTS["id_base"] if uid is FACTS else uid
    call(105, wanted)
    return f"became {wanted}"


@group(
    "limit",
    [("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC), ("core", resource.RLIMIT_CORE)],
    errno.EPERM,
    errno.EACCES,
)
def _(which: int) -> str:
    hard = resource.getrlimit(which)[1]
    if hard == resource.RLIM_INFINITY:
        raise BlockedError("has no limit of its own; the cgroup bounds it")
    call(160, which, struct.pack("QQ", hard + 1, hard + 1))
    if resource.getrlimit(which)[1] == hard:
        raise BlockedError("the limit is as it was")
    return f"a hard limit above {hard}"


@probe(errno.EPERM)
def real_time_scheduling() -> str:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return "real time"


@probe(errno.EPERM, errno.EACCES)
def more_priority_than_given() -> str:
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    return "nice -20"


@probe(errno.EPERM, errno.EACCES)
def real_time_disk_priority() -> str:
    call(251, 1, 0, 1 << 13)
    return "real time"


@group(
    "xattr",
    [("trusted", b"trusted.overlay.redirect"), ("opaque", b"trusted.overlay.opaque"), ("security", b"security.probe")],
    errno.EPERM,
    errno.EACCES,
    errno.EOPNOTSUPP,
)
def _(name: bytes) -> str:
    path = new_directory()
    os.setxattr(path, name, b"/etc")
    return f"{name!r} is set"
