"""Attempts at the kernel: mounts, namespaces, devices, calls that have no business in a sandbox."""

# Functions of os say best which system call is tried.
from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import stat
import struct
from pathlib import Path
from typing import Any, Final

from .kit import (
    REFUSED,
    call,
    group,
    mount,
    new_directory,
    nothing_of,
    probe,
)

MS_NODEV, MS_REMOUNT, MS_BIND, MNT_DETACH = 4, 32, 4096, 2
_OF_PROC = 2 | 4 | 8  # nosuid, nodev, noexec: nobody who lacks rights outside may clear these


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
    return mount("none", "/proc/sys", None, MS_REMOUNT | MS_BIND | _OF_PROC)


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


@probe(*REFUSED, errno.EINVAL)
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


@group("clone", _NAMESPACES.items(), *REFUSED, errno.EINVAL)
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


@probe(errno.EPERM)
def lease_on_a_program() -> str:
    descriptor = os.open(f"/tmp/program-{os.getpid()}", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return "whoever executes it waits, and the agent with it"


@probe(errno.ENOSYS)
def contexts_of_asynchronous_io() -> str:
    call(206, 1, ctypes.create_string_buffer(8))
    return "one less for the host, which has few"


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
