"""What this machine can do, found by trying where that is cheap and harms nothing. Lines for `dsec doctor`."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dsec.core.units import format_size
from dsec.node.admission import memory_promised_max
from dsec.node.config import NodeConfig
from dsec.node.host import memory_total_bytes
from dsec.storage.space import free_bytes
from dsec.wire.records import Finding

OK: Final = "ok"
DEGRADED: Final = "degraded"
MISSING: Final = "missing"

_SYS_LANDLOCK_CREATE_RULESET: Final = 444  # x86-64 and arm64 alike
_LANDLOCK_VERSION: Final = 1
_KVM_GET_API_VERSION: Final = 0xAE00
_KVM_CREATE_VM: Final = 0xAE01
_NOFILE_GOOD: Final = 16_384  # four descriptors for each of 4,000 sandboxes
_PROBE_TIMEOUT_S: Final = 10.0
_KERNEL_GOOD: Final = (6, 12)  # EROFS mounts straight from files


def fingerprint(config: NodeConfig) -> list[Finding]:
    """Blocking; some tens of milliseconds. A probe that fails in an unforeseen way is a finding too."""
    findings: list[Finding] = []
    for what, probe in _probes(config):
        try:
            findings.append(probe())
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            findings.append(Finding(what=what, status=DEGRADED, detail=f"could not be found out: {error}"))
    return findings


def _probes(config: NodeConfig) -> Iterator[tuple[str, Callable[[], Finding]]]:
    yield "kernel", _kernel
    yield "cgroups", _cgroups
    yield "user namespaces", _user_namespaces
    yield "overlayfs", lambda: _filesystem("overlay", "roots of sandboxes cannot be made")
    yield "EROFS", lambda: _filesystem("erofs", "layers are kept as directories")
    yield "seccomp", _seccomp
    yield "Landlock", _landlock
    yield "memory", lambda: _memory(config)
    yield "disk", lambda: _disk(config)
    yield "descriptors", _descriptors
    yield "KVM", _kvm


def _kernel() -> Finding:
    release = platform.release()
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in release.split(".")[:2])
    if platform.machine() != "x86_64":
        return Finding(
            what="kernel", status=MISSING, detail=f"{release} on {platform.machine()}; only x86-64 is supported"
        )
    if numbers < _KERNEL_GOOD:
        return Finding(
            what="kernel", status=DEGRADED, detail=release, hint="6.12 or newer mounts layers without loop devices"
        )
    return Finding(what="kernel", status=OK, detail=release)


def _cgroups() -> Finding:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        controllers = (root / "cgroup.controllers").read_text().split()
        missing = {"cpu", "memory", "pids"} - set(controllers)
        if missing:
            return Finding(what="cgroups", status=DEGRADED, detail=f"v2 without {', '.join(sorted(missing))}")
        return Finding(what="cgroups", status=OK, detail=f"v2: {' '.join(controllers)}")
    v1 = sorted(
        path.name for path in root.iterdir() if path.is_dir() and path.name in ("cpu", "memory", "pids", "freezer")
    )
    if (root / "unified" / "cgroup.procs").exists():
        return Finding(what="cgroups", status=OK, detail=f"hybrid: v1 {' '.join(v1)}, v2 without controllers")
    return Finding(
        what="cgroups",
        status=MISSING,
        detail=f"v1 only: {' '.join(v1)}",
        hint="mount a cgroup2 hierarchy; sandboxes are frozen and killed through it",
    )


def _user_namespaces() -> Finding:
    # In a process of its own: entering one is not undone, and would change us.
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "true"], capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    if done.returncode == 0:
        return Finding(what="user namespaces", status=OK, detail="made one")
    detail = done.stderr.decode("utf-8", "replace").strip()[:200]
    return Finding(what="user namespaces", status=MISSING, detail=detail, hint="sysctl user.max_user_namespaces")


def _filesystem(name: str, otherwise: str) -> Finding:
    lines = Path("/proc/filesystems").read_text().split()
    if name in lines:
        return Finding(what=_SHOWN.get(name, name), status=OK, detail="known to the kernel")
    return Finding(what=_SHOWN.get(name, name), status=MISSING, detail=otherwise, hint=f"modprobe {name}")


_SHOWN: Final = {"overlay": "overlayfs", "erofs": "EROFS"}


def _seccomp() -> Finding:
    path = Path("/proc/sys/kernel/seccomp/actions_avail")
    if not path.exists():
        return Finding(what="seccomp", status=MISSING, detail="filters are not in this kernel")
    actions = path.read_text().split()
    return Finding(what="seccomp", status=OK if "errno" in actions else MISSING, detail=" ".join(actions))


def _landlock() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    if version > 0:
        return Finding(what="Landlock", status=OK, detail=f"ABI {version}")
    return Finding(what="Landlock", status=DEGRADED, detail=errno.errorcode.get(ctypes.get_errno(), "refused"))


def _memory(config: NodeConfig) -> Finding:
    total = memory_total_bytes()
    promised = memory_promised_max(total, config.memory_overcommit)
    return Finding(
        what="memory", status=OK, detail=f"{format_size(total)}; sandboxes are promised {format_size(promised)}"
    )


def _disk(config: NodeConfig) -> Finding:
    free = free_bytes(config.state_dir)
    detail = f"{format_size(free)} free at {config.state_dir}"
    if free < config.disk_free_bytes_min:
        return Finding(what="disk", status=MISSING, detail=detail, hint="creates are refused until there is room")
    low = free < 4 * config.disk_free_bytes_min
    return Finding(what="disk", status=DEGRADED if low else OK, detail=detail)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status = OK if soft >= _NOFILE_GOOD else DEGRADED
    hint = None if status == OK else f"LimitNOFILE={_NOFILE_GOOD} for the node's service"
    return Finding(what="descriptors", status=status, detail=f"{soft} (hard {hard})", hint=hint)


def _kvm() -> Finding:
    """Opening it proves nothing: a machine is made and thrown away. That one really runs is for the backend to try."""
    try:
        kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return Finding(
            what="KVM", status=DEGRADED, detail=f"/dev/kvm: {error.strerror}; needed by virtual machines only"
        )
    try:
        version = fcntl.ioctl(kvm, _KVM_GET_API_VERSION, 0)
        os.close(fcntl.ioctl(kvm, _KVM_CREATE_VM, 0))
    except OSError as error:
        return Finding(what="KVM", status=DEGRADED, detail=f"it opens but does not work: {error.strerror}")
    finally:
        os.close(kvm)
    return Finding(what="KVM", status=OK, detail=f"API {version}; a machine could be made, not yet run")
