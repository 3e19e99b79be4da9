"""What this machine can do, found by trying where that is cheap and harms nothing. Lines for `dsec doctor`."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from dsec.binaries import find_binary
from dsec.core.errors import HostError
from dsec.core.units import format_size
from dsec.image.erofs import maker
from dsec.image.sources.dockerfile import buildah_program, buildah_version
from dsec.node.admission import memory_promised_max
from dsec.node.config import NodeConfig
from dsec.node.host import memory_total_bytes
from dsec.storage.loader import has_pre_content_events, why_no_block_devices
from dsec.storage.space import free_bytes
from dsec.wire.api import STATE_DIR_ROOT
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
# What all sandboxes take from one pool of the kernel: for each of them at least, and left to the host.
_SHARED: Final = (
    ("kernel.pid_max", 4, 4_096),  # the agent, a shell and two commands
    ("kernel.threads-max", 4, 4_096),
    ("kernel.pty.max", 1, 1_024),  # kernel.pty.reserve is the host's alone
    ("fs.file-max", 64, 65_536),
)
_CONTROLLERS_HINT: Final = "echo '+cpu +memory +pids' > /sys/fs/cgroup/cgroup.subtree_control, as root"
_DISK_HINT: Final = "`dsec env ls` and `dsec env rm` free layers, `dsec rm` sandboxes; --state-dir names another disk"
_DEBIAN_HINT: Final = "a Debian or Ubuntu machine has them; elsewhere build from an OCI image layout or a tar file"
_KERNEL_GOOD: Final = (6, 12)  # EROFS mounts straight from files


def fingerprint(config: NodeConfig) -> list[Finding]:
    """Blocking; some tens of milliseconds. A probe that fails in an unforeseen way is a finding too."""
    findings: list[Finding] = []
    for what, probe in _probes(config):
        try:
            found = probe()
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            found = Finding(what=what, status=DEGRADED, detail=f"could not be found out: {error}")
        need, cost = _MEANING[what]
        of_lack = None if found.status == OK else found.cost or cost
        findings.append(msgspec.structs.replace(found, need=need, cost=of_lack))
    return findings


# How much each is needed, and what its lack costs who uses the machine.
_MEANING: Final = {
    "root": ("needed", "no container can be made: namespaces of many ids, cgroups and layers need it"),
    "programs": ("needed", "no container can be made"),
    "kernel": ("needed", "layers are kept as directories, or no container can be made"),
    "cgroups": ("needed", "sandboxes can be neither held to limits nor ended as a whole"),
    "user namespaces": ("needed", "no container can be made"),
    "overlayfs": ("needed", "no container can be made"),
    "seccomp": ("needed", "no container can be made: system calls would not be filtered"),
    "memory": ("needed", "creates are refused"),
    "disk": ("needed", "creates and builds are refused, or soon will be"),
    "EROFS": ("advised", "layers are kept as directories, which take more room, files and memory"),
    "descriptors": ("advised", "fewer sandboxes at once: each takes about four"),
    "host limits": ("advised", "the last sandboxes find nothing left of what all share, long before the node is full"),
    "core dumps": ("advised", "root of a sandbox can trace a command of it that is being started"),
    "Landlock": ("optional", "nothing of ours: programs inside cannot confine themselves with it"),
    "erofs-utils": ("advised", "layers are kept as directories: more files on the disk, and nothing to push to stores"),
    "stores": ("optional", "`dsec env build --store` does not work: nothing is loaded on demand"),
    "block devices": ("optional", "nothing: disks of machines from stores are read by the same front end as the rest"),
    "Debian packages": ("optional", "`dsec env build --debian` does not work; tar, directory and OCI do"),
    "Dockerfiles": ("optional", "`dsec env build --dockerfile` does not work; images of registries and archives do"),
    "KVM": ("optional", "virtual machines are emulated, which is slow and a lesser boundary"),
}


def _probes(config: NodeConfig) -> Iterator[tuple[str, Callable[[], Finding]]]:
    yield "root", _root
    yield "programs", _programs
    yield "kernel", _kernel
    yield "cgroups", hierarchies
    yield "user namespaces", _user_namespaces
    yield "overlayfs", lambda: _filesystem("overlay", "roots of sandboxes cannot be made")
    yield "EROFS", lambda: _filesystem("erofs", "layers are kept as directories")
    yield "erofs-utils", erofs_utils
    yield "seccomp", _seccomp
    yield "core dumps", core_dumps
    yield "Landlock", _landlock
    yield "memory", lambda: _memory(config)
    yield "disk", lambda: _disk(config)
    yield "descriptors", _descriptors
    yield "host limits", lambda: host_limits(config.sandboxes_max)
    yield "stores", stores
    yield "block devices", block_devices
    yield "Debian packages", _debian
    yield "Dockerfiles", dockerfiles
    yield "KVM", _kvm


def _root() -> Finding:
    uid = os.geteuid()
    if uid == 0:
        return Finding(what="root", status=OK, detail="yes")
    return Finding(
        what="root", status=MISSING, detail=f"uid {uid}", hint="run the service as root: sudo dsec up --detach"
    )


FANOTIFY_COST: Final = (
    "who kills all three processes of dsec-loader within a second lets sandboxes read zeros of layers "
    "that are not whole yet; by FUSE they read errors"
)


def _programs() -> Finding:
    try:
        places = {find_binary(name).parent for name in ("dsec-launch", "dsec-agent", "dsec-call")}
    except HostError as error:
        return Finding(what="programs", status=MISSING, detail=error.message, hint=error.hint)
    return Finding(what="programs", status=OK, detail=f"in {', '.join(map(str, places))}")


def stores(fuse: Path = Path("/dev/fuse"), state_root: Path = Path(STATE_DIR_ROOT)) -> Finding:
    """Whether layers can be loaded from stores as they are read, and by which front ends."""
    try:
        loader = find_binary("dsec-loader")
    except HostError as error:
        return Finding(what="stores", status=MISSING, detail=error.message, hint=error.hint)
    fronts = ["FUSE"] if fuse.exists() else []
    fronts += ["fanotify"] if has_pre_content_events(loader, state_root) else []
    if not fronts:
        detail = f"no {fuse}, and no pre-content events (Linux 6.14)"
        return Finding(what="stores", status=MISSING, detail=detail, hint="modprobe fuse")
    detail = f"layers are loaded as they are read, by {' or '.join(fronts)}"
    if fronts == ["fanotify"]:
        return Finding(what="stores", status=DEGRADED, detail=detail, hint="modprobe fuse", cost=FANOTIFY_COST)
    return Finding(what="stores", status=OK, detail=detail)


def block_devices() -> Finding:
    """Whether disks of machines from stores can be block devices."""
    what, hint = "block devices", "modprobe ublk_drv, on Linux 6.5 or newer with CONFIG_BLK_DEV_UBLK and io_uring"
    try:
        loader = find_binary("dsec-loader")
    except HostError as error:
        return Finding(what=what, status=MISSING, detail=error.message, hint=error.hint)
    if why := why_no_block_devices(loader):
        return Finding(what=what, status=MISSING, detail=why, hint=hint)
    return Finding(what=what, status=OK, detail="disks of machines from stores are served by ublk")


def erofs_utils() -> Finding:
    """What makes images of layers: its version, and what it can make."""
    what, hint = "erofs-utils", "apt install erofs-utils (1.8 or newer), or tools/setup, which builds 1.9"
    found = maker()
    if found is None:
        return Finding(what=what, status=MISSING, detail="mkfs.erofs is not installed", hint=hint)
    modes = "images with their data in a file of its own" if found.images else "no such images: layers are directories"
    times = "" if not found.images else ", times exact" if found.exact_times else ", times by SOURCE_DATE_EPOCH"
    detail = f"{found.version} ({found.program}): {modes}{times}"
    return Finding(
        what=what, status=OK if found.images else DEGRADED, detail=detail, hint=None if found.images else hint
    )


def _debian() -> Finding:
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if not missing:
        return Finding(what="Debian packages", status=OK, detail="apt and dpkg are there")
    return Finding(what="Debian packages", status=DEGRADED, detail=f"no {' and no '.join(missing)}", hint=_DEBIAN_HINT)


def _kernel() -> Finding:
    release = platform.release()
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in release.split(".")[:2])
    if platform.machine() != "x86_64":
        return Finding(
            what="kernel", status=MISSING, detail=f"{release} on {platform.machine()}; only x86-64 is supported"
        )
    if numbers < _KERNEL_GOOD:
        return Finding(
            what="kernel",
            status=DEGRADED,
            detail=release,
            hint="6.12 or newer mounts layers straight from files; older is not tested",
        )
    return Finding(what="kernel", status=OK, detail=release)


def hierarchies(root: Path = Path("/sys/fs/cgroup")) -> Finding:
    if (root / "cgroup.controllers").exists():
        controllers = (root / "cgroup.controllers").read_text().split()
        missing = {"cpu", "memory", "pids"} - set(controllers)
        if missing:
            return Finding(
                what="cgroups",
                status=DEGRADED,
                detail=f"v2 without {', '.join(sorted(missing))}",
                hint=_CONTROLLERS_HINT,
            )
        return Finding(what="cgroups", status=OK, detail=f"v2: {' '.join(controllers)}")
    v1 = sorted(
        path.name for path in root.iterdir() if path.is_dir() and path.name in ("cpu", "memory", "pids", "freezer")
    )
    if (root / "unified" / "cgroup.procs").exists():
        return Finding(what="cgroups", status=OK, detail=f"hybrid: v1 {' '.join(v1)}, v2 without controllers")
    return Finding(
        what="cgroups",
        status=DEGRADED,
        detail=f"v1 only: {' '.join(v1)}",
        cost="sandboxes cannot be paused, and what a command has started is found by walking its processes",
        hint="mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified",
    )


def _user_namespaces() -> Finding:
    if shutil.which("unshare") is None:
        return Finding(what="user namespaces", status=DEGRADED, detail="not tried", hint="apt install util-linux")
    # In a process of its own: entering one is not undone, and would change us.
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "true"], capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    if done.returncode == 0:
        return Finding(what="user namespaces", status=OK, detail="made one")
    detail = done.stderr.decode("utf-8", "replace").strip()[:200]
    return Finding(what="user namespaces", status=MISSING, detail=detail, hint=_userns_hint())


def _userns_hint() -> str:
    for name, good in (("user.max_user_namespaces", 65_536), ("kernel.unprivileged_userns_clone", 1)):
        path = Path("/proc/sys", *name.split("."))
        if path.exists() and int(path.read_text()) == 0:
            return f"sysctl -w {name}={good}"
    if Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").exists() and os.geteuid() != 0:
        return "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run as root"
    return "a container or a security module around us refuses them: run dsec outside of it"


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


def core_dumps(mode: Path = Path("/proc/sys/fs/suid_dumpable")) -> Finding:
    """Of programs that have changed who they are: in the kernel's mode for debugging they can be traced as well."""
    found = mode.read_text().strip()
    if found != "1":
        return Finding(what="core dumps", status=OK, detail=f"fs.suid_dumpable is {found}")
    hint = "sysctl -w fs.suid_dumpable=2"
    return Finding(what="core dumps", status=DEGRADED, detail="fs.suid_dumpable is 1, for debugging", hint=hint)


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
    place = next(path for path in (config.state_dir, *config.state_dir.parents) if path.is_dir())
    free = free_bytes(place)
    detail = f"{format_size(free)} free at {config.state_dir}"
    if free < config.disk_free_bytes_min:
        return Finding(what="disk", status=MISSING, detail=detail, hint=_DISK_HINT)
    low = free < 4 * config.disk_free_bytes_min
    return Finding(what="disk", status=DEGRADED if low else OK, detail=detail, hint=_DISK_HINT if low else None)


def host_limits(sandboxes_max: int, root: Path = Path("/proc/sys")) -> Finding:
    """Whether the kernel's pools that nothing divides among sandboxes suffice for as many as the node may hold."""
    low = []
    for name, each, kept in _SHARED:
        path = root.joinpath(*name.split("."))
        needed = each * sandboxes_max + kept
        if path.exists() and (found := int(path.read_text())) < needed:
            low.append((name, found, needed))
    if not low:
        return Finding(what="host limits", status=OK, detail=f"suffice for {sandboxes_max} sandboxes")
    return Finding(
        what="host limits",
        status=DEGRADED,
        detail=f"for {sandboxes_max} sandboxes: " + ", ".join(f"{name} is {found}" for name, found, _ in low),
        hint="; ".join(f"sysctl -w {name}={needed}" for name, _, needed in low) + "; or a lower sandboxes_max",
    )


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status = OK if soft >= _NOFILE_GOOD else DEGRADED
    hint = None if status == OK else f"LimitNOFILE={_NOFILE_GOOD} for the node's service"
    return Finding(what="descriptors", status=status, detail=f"{soft} (hard {hard})", hint=hint)


def dockerfiles() -> Finding:
    program = buildah_program()
    if program is None:
        return Finding(what="Dockerfiles", status=MISSING, detail="no buildah", hint="apt install buildah")
    version = buildah_version(program)
    if version is None:
        return Finding(what="Dockerfiles", status=MISSING, detail=f"{program} does not run")
    return Finding(what="Dockerfiles", status=OK, detail=f"buildah {version}")


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
    return Finding(what="KVM", status=OK, detail=f"API {version}; whether guests run on it is tried by the substrates")
