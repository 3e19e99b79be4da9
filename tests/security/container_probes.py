"""Attempts to get out of a container, or at what is not its own, made from inside as root with a full Python.

Runs in the sandbox (`python3 container_probes.py [name ...] < facts.json`) and prints one JSON object: name → verdict,
detail. Every probe is a function in a child of its own, harmless when it succeeds. It returns what it has reached (then
the verdict is "allowed"), or raises: an OSError of the errors that it declares is "blocked", anything else "broken":
a probe that fails for another reason than the expected one proves nothing.
"""

# ruff: noqa: PTH101, PTH115, PTH116, PTH121, PTH208
# Functions of os say best which system call is tried.
from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

Probe = Callable[[], Any]

_REFUSED: Final = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS)
_PROBE_S: Final = 20.0

FACTS: dict[str, Any] = {}  # of the host, as the test sees it: pids, ports, names


class BlockedError(Exception):
    """Not reached, in a way that no errno tells."""


class Known:
    """One probe, with the ways in which it may be refused."""

    def __init__(self, run: Probe, errnos: tuple[int, ...], signals: tuple[int, ...]) -> None:
        self.run = run
        self.errnos = errnos
        self.signals = signals


PROBES: dict[str, Known] = {}


def probe(*errnos: int, signals: tuple[int, ...] = (), name: str = "") -> Callable[[Probe], Probe]:
    def register(run: Probe) -> Probe:
        PROBES[name or run.__name__] = Known(run, errnos or _REFUSED, signals)
        return run

    return register


def group(prefix: str, cases: Iterable[tuple[str, Any]], *errnos: int) -> Callable[[Callable[[Any], Any]], Any]:
    """One probe for each case: `run` is given its value."""

    def register(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        for word, value in cases:
            PROBES[f"{prefix}_{word}"] = Known(lambda value=value: run(value), errnos or _REFUSED, ())
        return run

    return register


# ---- system calls --------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(number: int, *arguments: Any) -> int:
    """Raises OSError. Integers are widened: the upper half of a register would be garbage otherwise."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = _libc.syscall(ctypes.c_long(number), *wide, *[ctypes.c_long(0)] * (6 - len(wide)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def mount(source: str, target: str, kind: str | None, flags: int = 0) -> str:
    encoded = None if kind is None else kind.encode()
    call(165, source.encode(), target.encode(), encoded, flags, None)
    return f"mounted {kind or 'again'} at {target}"


def new_directory() -> str:
    path = f"/tmp/probe-{os.getpid()}"
    Path(path).mkdir()
    return path


# ---- mounts --------------------------------------------------------------------------------------

MS_NODEV, MS_REMOUNT, MS_BIND, MNT_DETACH = 4, 32, 4096, 2


@group("mount", [(kind, kind) for kind in ("tmpfs", "proc", "sysfs", "cgroup2", "devpts", "mqueue", "ramfs", "bpf")])
def _(kind: str) -> str:
    return mount(kind, new_directory(), kind)


@probe()
def mount_overlay() -> str:
    base = new_directory()
    for name in ("lower", "upper", "work", "merged"):
        Path(base, name).mkdir()
    options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work,userxattr"
    call(165, b"overlay", f"{base}/merged".encode(), b"overlay", 0, options.encode())
    return "an overlay"


@probe()
def mount_bind() -> str:
    return mount("/root", new_directory(), None, MS_BIND)


@probe()
def remount_root_with_devices() -> str:
    return mount("none", "/", None, MS_REMOUNT | MS_BIND)


@probe()
def remount_proc_sys_writable() -> str:
    return mount("none", "/proc/sys", None, MS_REMOUNT | MS_BIND)


@probe()
def remount_sys_writable() -> str:
    return mount("none", "/sys", None, MS_REMOUNT)


@group(
    "unmount",
    [(path.strip("/").replace("/", "_"), path) for path in ("/sys/firmware", "/proc/sys", "/dev", "/etc/hosts")],
)
def _(path: str) -> str:
    call(166, path.encode(), MNT_DETACH)
    return f"unmounted {path}"


@group(
    "mount_api", [("fsopen", (430, b"tmpfs", 0)), ("fspick", (433, -100, b"/", 0)), ("open_tree", (428, -100, b"/", 1))]
)
def _(arguments: tuple[Any, ...]) -> str:
    return f"descriptor {call(*arguments)}"


@probe()
def mount_api_setattr() -> str:
    attributes = struct.pack("QQQQ", 0, 4, 0, 0)  # clear nodev
    call(442, -100, b"/", 0, attributes, len(attributes))
    return "the root allows devices"


@probe()
def mount_api_move() -> str:
    call(429, -100, b"/etc", -100, new_directory().encode(), 0)
    return "moved a mount"


@probe(*_REFUSED, errno.EINVAL)
def pivot_root() -> str:
    place = new_directory()
    call(155, place.encode(), place.encode())
    return "another root"


@probe()
def chroot() -> str:
    os.chroot("/tmp")
    return "another root"


@probe()
def open_by_handle() -> str:
    handle = bytearray(struct.pack("Ii", 128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    buffer = (ctypes.c_char * len(handle)).from_buffer(handle)
    try:
        call(303, -100, b"/etc", buffer, ctypes.byref(mount_id), 0)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        buffer[0:8] = struct.pack("Ii", 8, 1)  # what no overlay would give away, guessed: inode 2 of the host's disk
        buffer[8:16] = struct.pack("II", 2, 0)
    root = os.open("/", os.O_RDONLY)
    return f"descriptor {call(304, root, buffer, 0)}"


# ---- namespaces ----------------------------------------------------------------------------------

_NAMESPACES: Final = {
    "time": 0x80,
    "mount": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "network": 0x40000000,
}


@group("unshare", _NAMESPACES.items())
def _(flag: int) -> str:
    call(272, flag)
    return "a namespace of its own"


@group("clone", _NAMESPACES.items(), *_REFUSED, errno.EINVAL)
def _(flag: int) -> str:
    # Not with a time namespace: its bit is part of the exit signal there, and the kernel says EINVAL.
    child = call(56, flag | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "a child in a namespace of its own"


@probe(errno.ENOSYS)
def clone3_user_namespace() -> str:
    arguments = struct.pack("11Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    child = call(435, arguments, len(arguments))
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "a child in a user namespace of its own"


@group("setns", [(kind, kind) for kind in ("mnt", "uts", "net", "user", "pid", "cgroup")])
def _(kind: str) -> str:
    call(308, os.open(f"/proc/self/ns/{kind}", os.O_RDONLY), 0)
    return f"entered a {kind} namespace"


@group("namespaces_of_agent", [(kind, kind) for kind in ("mnt", "user", "net")], errno.EACCES, errno.EPERM)
def _(kind: str) -> str:
    return f"descriptor {os.open(f'/proc/1/ns/{kind}', os.O_RDONLY)}"


@probe()
def change_host_name() -> str:
    socket.sethostname("owned")
    return "the host name is changed"


@probe()
def change_domain_name() -> str:
    call(171, b"owned", 5)
    return "the domain name is changed"


# ---- devices -------------------------------------------------------------------------------------


@group(
    "mknod",
    [
        ("zero", (stat.S_IFCHR, 1, 5)),
        ("memory", (stat.S_IFCHR, 1, 1)),
        ("disk", (stat.S_IFBLK, 8, 0)),
        ("fuse", (stat.S_IFCHR, 10, 229)),
    ],
)
def _(device: tuple[int, int, int]) -> str:
    kind, major, minor = device
    path = f"/tmp/device-{os.getpid()}"
    os.mknod(path, kind | 0o666, os.makedev(major, minor))
    return f"a node, and descriptor {os.open(path, os.O_RDONLY | os.O_NONBLOCK)}"


@group(
    "device",
    [
        (name, f"/dev/{name}")
        for name in ("mem", "kmsg", "kvm", "fuse", "port", "sda", "vda", "loop-control", "net/tun")
    ],
    errno.ENOENT,
)
def _(path: str) -> str:
    return f"descriptor {os.open(path, os.O_RDONLY | os.O_NONBLOCK)}"


@probe()
def devices_are_only_the_harmless_ones() -> str:
    harmless = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}
    found = []
    for directory, _, names in os.walk("/dev"):
        for name in names:
            info = Path(directory, name).lstat()
            numbers = (os.major(info.st_rdev), os.minor(info.st_rdev))
            if stat.S_ISBLK(info.st_mode) or (
                stat.S_ISCHR(info.st_mode) and numbers not in harmless and numbers[0] not in range(136, 144)
            ):
                found.append(f"{directory}/{name} {numbers}")
    return nothing_of(found)


# ---- /proc and /sys ------------------------------------------------------------------------------

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


@group("write", [(path.strip("/").replace("/", "_"), path) for path in _WRITES], *_REFUSED, errno.ENOENT)
def _(path: str) -> str:
    # A masked file is /dev/null: whoever writes to it has reached nothing.
    if Path(path).exists() and os.path.samefile(path, "/dev/null"):
        raise BlockedError("masked")
    return f"descriptor {os.open(path, os.O_WRONLY)}"


@group("read", [(f"proc_{name}", f"/proc/{name}") for name in _HIDDEN_FILES], *_REFUSED, errno.ENOENT)
def _(path: str) -> str:
    data = os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 64)
    if not data:
        raise BlockedError("empty")
    return f"{data!r}"


@group("list", [(path.strip("/").replace("/", "_"), path) for path in _HIDDEN_DIRECTORIES], *_REFUSED, errno.ENOENT)
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
            for path in ("/proc/self/root/../..", "/proc/1/cwd/..", "/proc/self/cwd/../../../..")
            if Path(f"{path}{FACTS['directory']}").exists()
        ]
    )


# ---- the agent -----------------------------------------------------------------------------------

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


@group("agent_file", [(name.replace("/", "_"), name) for name in _AGENT_FILES], *_REFUSED, errno.ENOENT, errno.ESRCH)
def _(name: str) -> str:
    descriptor = os.open(f"/proc/1/{name}", os.O_WRONLY if name == "clear_refs" else os.O_RDONLY)
    if name != "clear_refs" and not os.read(descriptor, 1):
        raise BlockedError("empty")
    return f"/proc/1/{name} is open"


@group("agent_place", [(name, name) for name in ("fd", "fdinfo", "map_files", "root", "cwd")], *_REFUSED, errno.ENOENT)
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
        if number == REPORT:
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


# ---- calls that have no business here --------------------------------------------------------------

_ATTRIBUTES: Final = struct.pack("II", 1, 128) + bytes(120)  # of perf_event_open: a software event
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "bpf": (321, 0, bytes(128), 128),
    "io_uring_setup": (425, 1, ctypes.create_string_buffer(120)),
    "io_uring_enter": (426, -1, 0, 0, 0, None, 0),
    "io_uring_register": (427, -1, 0, None, 0),
    "userfaultfd": (323, 1),
    "perf_event_open": (298, _ATTRIBUTES, 0, -1, -1, 0),
    "add_key": (248, b"user", b"probe", b"x", 1, -3),
    "keyctl": (250, 0, -3, 1),
    "request_key": (249, b"user", b"probe", None, 0),
    "kexec_load": (246, 0, 0, None, 0),
    "kexec_file_load": (320, -1, -1, 0, b"", 0),
    "init_module": (175, b"", 0, b""),
    "finit_module": (313, 0, b"", 0),
    "delete_module": (176, b"probe", 0),
    "iopl": (172, 3),
    "ioperm": (173, 0x80, 1, 1),
    "swapon": (167, b"/tmp/none", 0),
    "swapoff": (168, b"/tmp/none"),
    "reboot": (169, 0xFEE1DEAD, 672274793, 0),  # ctrl-alt-del off: says whether it can be reached
    "settimeofday": (164, struct.pack("qq", 0, 0), None),
    "clock_settime": (227, 0, struct.pack("qq", 0, 0)),
    "clock_adjtime": (305, 0, ctypes.create_string_buffer(256)),
    "adjtimex": (159, ctypes.create_string_buffer(256)),
    "acct": (163, b"/tmp/none"),
    "quotactl": (179, 0x80000100, b"/dev/none", 0, None),
    "syslog": (103, 3, ctypes.create_string_buffer(64), 64),
    "fanotify_init": (300, 0x200, 0),
    "fanotify_mark": (301, -1, 1, 2, -100, b"/"),
    "move_pages": (279, 0, 0, None, None, None, 0),
    "mbind": (237, 0, 0, 0, None, 0, 0),
    "set_mempolicy": (238, 0, None, 0),
    "migrate_pages": (256, 0, 0, None, None),
    "process_madvise": (440, -1, None, 0, 0, 0),
    "process_mrelease": (448, -1, 0),
    "vhangup": (153,),
}


@group("call", _CALLS.items(), errno.EPERM)
def _(arguments: tuple[Any, ...]) -> str:
    return f"answered {call(*arguments)}"


@group("call_unknown", [("number_600", 600), ("number_1000", 1000), ("removed_uselib", 134)], errno.ENOSYS, errno.EPERM)
def _(number: int) -> str:
    return f"answered {call(number)}"


@probe(errno.EPERM)
def personality_without_randomisation() -> str:
    call(135, 0x0040000)
    return "addresses are not random"


@probe(signals=(signal.SIGSYS, signal.SIGSEGV))
def call_of_x32() -> str:
    return f"answered {call(0x40000000 | 39)}"


@probe(signals=(signal.SIGSYS, signal.SIGSEGV))
def call_of_i386() -> str:
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    return f"answered {ctypes.CFUNCTYPE(ctypes.c_int)(address)()}"


# ---- terminals and ioctls -------------------------------------------------------------------------


@group(
    "terminal",
    [("TIOCSTI", 0x5412), ("TIOCLINUX", 0x541C), ("TIOCCONS", 0x541D), ("TIOCSETD", 0x5423)],
    errno.EPERM,
    errno.ENOSYS,
)
def _(request: int) -> str:
    main, side = os.openpty()
    os.setsid()
    fcntl.ioctl(side, 0x540E, 0)
    fcntl.ioctl(side, request, struct.pack("i", 2))
    return f"descriptor {main} took it"


@group(
    "file_request",
    [("set_flags", 0x40086602), ("freeze", 0xC0045877), ("swap_boot", 0x6611), ("set_version", 0x40087602)],
    errno.EPERM,
    errno.ENOSYS,
)
def _(request: int) -> str:
    fcntl.ioctl(os.open(f"/tmp/file-{os.getpid()}", os.O_RDWR | os.O_CREAT), request, struct.pack("Q", 0))
    return "the request was taken"


# ---- sockets and the network -----------------------------------------------------------------------

_FAMILIES: Final = {
    "packet": (17, socket.SOCK_RAW, 0),
    "vsock": (40, socket.SOCK_STREAM, 0),
    "alg": (38, socket.SOCK_SEQPACKET, 0),
    "xdp": (44, socket.SOCK_RAW, 0),
    "can": (29, socket.SOCK_RAW, 1),
    "bluetooth": (31, socket.SOCK_RAW, 1),
    "tipc": (30, socket.SOCK_SEQPACKET, 0),
    "rds": (21, socket.SOCK_SEQPACKET, 0),
    "key": (15, socket.SOCK_RAW, 2),
    "netlink_netfilter": (16, socket.SOCK_RAW, 12),
    "netlink_uevent": (16, socket.SOCK_RAW, 15),
    "netlink_generic": (16, socket.SOCK_RAW, 16),
    "netlink_audit": (16, socket.SOCK_RAW, 9),
    "netlink_xfrm": (16, socket.SOCK_RAW, 6),
    "netlink_diagnosis": (16, socket.SOCK_RAW, 4),
    "raw_icmp": (2, socket.SOCK_RAW, 1),
    "raw_ipv6": (10, socket.SOCK_RAW, 58),
}


@group("socket", _FAMILIES.items(), errno.EPERM, errno.EACCES)
def _(arguments: tuple[int, int, int]) -> str:
    return f"descriptor {call(41, *arguments)}"


@probe(errno.EPERM, errno.EACCES)
def socket_pair_of_another_family() -> str:
    return f"{call(53, 30, socket.SOCK_SEQPACKET, 0, ctypes.create_string_buffer(8))}"


@probe(errno.EPERM, errno.EACCES)
def make_a_network_interface() -> str:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    name = b"\x0a\x00\x03\x00probe0\x00\x00"
    kind = b"\x0a\x00\x01\x00dummy\x00\x00\x00"
    info = struct.pack("HH", 4 + len(kind), 18) + kind
    body = struct.pack("BxHiII", 0, 0, 0, 1, 0xFFFFFFFF) + name + info
    link.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
    answer = link.recv(4096)
    code = -struct.unpack_from("i", answer, 16)[0]
    if code:
        raise OSError(code, os.strerror(code))
    return "an interface"


@probe()
def network_interfaces_besides_loopback() -> str:
    return nothing_of([name for _, name in socket.if_nameindex() if name != "lo"])


_ADDRESSES: Final = {
    "metadata": "169.254.169.254",
    "public": "1.1.1.1",
    "private": "10.0.0.1",
    "docker": "172.17.0.1",
    "home": "192.168.0.1",
    "ipv6_public": "2606:4700:4700::1111",
    "ipv6_link_local": "fe80::1",
    "ipv6_metadata": "fd00:ec2::254",
}


@group("connect", _ADDRESSES.items(), errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL)
def _(address: str) -> str:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as link:
        link.settimeout(5)
        link.connect((address, 80))
    return f"connected to {address}"


@probe(errno.ENETUNREACH, errno.EHOSTUNREACH)
def datagram_to_a_name_server() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.sendto(b"x", ("8.8.8.8", 53))
    return "sent"


@probe(errno.ECONNREFUSED)
def abstract_socket_of_the_host() -> str:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect("\0" + FACTS["abstract"])
    return "connected"


@probe(errno.ECONNREFUSED)
def loopback_port_of_the_host() -> str:
    with socket.socket() as link:
        link.connect(("127.0.0.1", FACTS["port"]))
    return "connected"


@probe(errno.ENOENT, errno.EACCES)
def shared_memory_of_the_host() -> str:
    return f"segment {call(29, FACTS['shm_key'], 0, 0)}"


@probe(errno.ENOENT)
def files_of_the_host() -> str:
    return f"{os.stat(FACTS['file'])}"


# ---- privileges ------------------------------------------------------------------------------------

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


@probe(*_REFUSED)
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


def become(uid: int) -> None:
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def run_as_user(command: list[str]) -> bytes:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        become(1000)
        os.execv(command[0], command)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return data


def nothing_of(found: Iterable[str]) -> str:
    words = list(found)
    if not words:
        raise BlockedError("nothing is there")
    return "; ".join(words[:20])


# ---- running ---------------------------------------------------------------------------------------

REPORT = -1  # the descriptor on which a child tells


def run(name: str) -> dict[str, str]:
    known = PROBES[name]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        globals()["REPORT"] = writing
        os.write(writing, json.dumps(_attempt(known)).encode()[: select.PIPE_BUF])
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], _PROBE_S)
    data = os.read(reading, 65_536) if ready else b""
    os.close(reading)
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if data:
        verdict: dict[str, str] = json.loads(data)
        return verdict
    if not ready:
        return {"verdict": "broken", "detail": "did not end"}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in known.signals:
        return {"verdict": "blocked", "detail": f"killed by {signal.Signals(os.WTERMSIG(status)).name}"}
    return {"verdict": "broken", "detail": f"ended with {os.waitstatus_to_exitcode(status)}"}


def _attempt(known: Known) -> dict[str, str]:
    try:
        return {"verdict": "allowed", "detail": str(known.run())[:500]}
    except BlockedError as blocked:
        return {"verdict": "blocked", "detail": str(blocked)}
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        if error.errno in known.errnos:
            return {"verdict": "blocked", "detail": name}
        return {"verdict": "broken", "detail": f"{name}: {error}"}
    except BaseException:
        return {"verdict": "broken", "detail": traceback.format_exc()[-800:]}


def main() -> None:
    FACTS.update(json.load(sys.stdin))
    os.close(0)
    os.open("/dev/null", os.O_RDONLY)
    print(json.dumps({name: run(name) for name in sys.argv[1:] or PROBES}))


if __name__ == "__main__":
    main()
