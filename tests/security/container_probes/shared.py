"""Attempts at what the whole machine shares: pools without an owner, settings behind socket options, helpers."""

# Functions of os say best which system call is tried.
from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from .kit import REFUSED, BlockedError, call, group, nothing_of, probe

_HUGE_MMAP: Final = 0x40000


@group(
    "huge_pages",
    [
        ("mapped", (9, (0, 2 << 20, 3, 0x22 | _HUGE_MMAP, -1, 0))),
        ("mapped_1_gib", (9, (0, 1 << 30, 3, 0x22 | _HUGE_MMAP | 30 << 26, -1, 0))),
        ("in_memory_file", (319, (b"probe", 4))),
        ("in_segment", (29, (0, 2 << 20, 0o4000 | 0o1600))),
    ],
    errno.EPERM,
)
def _(attempt: tuple[int, tuple[Any, ...]]) -> str:
    """Of a pool that the operator keeps for a data base or for machines; no memory limit counts it."""
    number, arguments = attempt
    return f"answered {call(number, *arguments)}"


@group("crash_handler", [("setrlimit", 160), ("prlimit", 302)], errno.EPERM)
def _(number: int) -> str:
    """At a core limit of anything but 1 a crash runs the pipe of the host's core_pattern: as the host's root, on the
    host, outside every limit of the sandbox, and with what the sandbox wrote into its own memory."""
    zero = struct.pack("QQ", 0, 0)
    call(number, resource.RLIMIT_CORE, zero) if number == 160 else call(number, 0, resource.RLIMIT_CORE, zero, None)
    now = resource.getrlimit(resource.RLIMIT_CORE)
    if now == (1, 1):
        raise BlockedError("the limit is as it was")
    return f"the limit of core files is {now}"


@probe(errno.EPERM)
def crash_handler_by_the_high_half_of_an_argument() -> str:
    """The kernel looks at the low half of a resource's number."""
    call(302, 0, resource.RLIMIT_CORE | 1 << 32, struct.pack("QQ", 0, 0), None)
    now = resource.getrlimit(resource.RLIMIT_CORE)
    if now == (1, 1):
        raise BlockedError("the limit is as it was")
    return f"the limit of core files is {now}"


@probe(errno.EPERM)
def crash_handler_of_a_crash() -> str:
    """As the first process of a crash sees it: one that has just been started."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    _, status = os.waitpid(child, 0)
    return nothing_of(["a core was written"] if os.WCOREDUMP(status) else [])


def _option(level: int, name: int, value: bytes, family: int = socket.AF_INET) -> Callable[[], str]:
    def run() -> str:
        with socket.socket(family, socket.SOCK_STREAM) as link:
            link.setsockopt(level, name, value)
        return f"option {name} of {level} is set"

    return run


_ONE: Final = struct.pack("i", 1)
_TABLE: Final = bytes(96)  # struct ipt_replace and its like, empty
_OPTIONS: Final = {
    "receive_buffer_by_force": _option(socket.SOL_SOCKET, 33, struct.pack("i", 1 << 28)),
    "send_buffer_by_force": _option(socket.SOL_SOCKET, 32, struct.pack("i", 1 << 28)),
    "mark": _option(socket.SOL_SOCKET, 36, _ONE),
    "debug": _option(socket.SOL_SOCKET, 1, _ONE),
    "high_priority": _option(socket.SOL_SOCKET, 12, struct.pack("i", 7)),
    "transparent": _option(socket.SOL_IP, 19, _ONE),
    "repair": _option(socket.SOL_TCP, 19, _ONE),
    "packet_filter_table": _option(socket.SOL_IP, 64, _TABLE),
    "arp_filter_table": _option(socket.SOL_IP, 96, _TABLE),
    "bridge_filter_table": _option(socket.SOL_IP, 128, _TABLE),
    "packet_filter_table_ipv6": _option(41, 64, _TABLE, socket.AF_INET6),
    "congestion_module": _option(socket.SOL_TCP, 13, b"lp"),
}


@group("socket_option", _OPTIONS.items(), errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENOPROTOOPT)
def _(run: Callable[[], str]) -> str:
    return run()


_FAMILIES: Final = {
    "ax25": 3, "ipx": 4, "appletalk": 5, "netrom": 6, "x25": 9, "rose": 11, "security": 14, "ash": 18, "atm": 20,
    "pppox": 24, "llc": 26, "mpls": 28, "rxrpc": 33, "isdn": 34, "phonet": 35, "ieee802154": 36, "caif": 37, "nfc": 39,
    "kcm": 41, "qipcrtr": 42, "smc": 43, "mctp": 45,
}  # fmt: skip


@group("socket", [(name, number) for name, number in _FAMILIES.items()], errno.EPERM)
def _(family: int) -> str:
    """Families whose very first socket loads a module into the host's kernel."""
    return f"descriptor {call(41, family, socket.SOCK_DGRAM, 0)}"


_NETLINK: Final = {
    "selinux": 7, "iscsi": 8, "fib": 10, "connector": 11, "dnrt": 14, "scsi": 18, "ecryptfs": 19, "rdma": 20,
    "crypto": 21, "smc": 22,
}  # fmt: skip


@group("socket_netlink", _NETLINK.items(), errno.EPERM)
def _(kind: int) -> str:
    return f"descriptor {call(41, 16, socket.SOCK_RAW, kind)}"


@group(
    "host_time",
    [("offsets_of_a_namespace", "/proc/self/timens_offsets"), ("real_time_clock", "/dev/rtc0"), ("pps", "/dev/pps0")],
    *REFUSED,
    errno.ENOENT,
)
def _(path: str) -> str:
    os.write(os.open(path, os.O_WRONLY), b"monotonic 86400 0\n")
    return f"{path} is written"


@group("alarm_clock", [("real", 8), ("boot", 9)], errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP)
def _(clock: int) -> str:
    """Timers that would wake the machine from its sleep."""
    timer = ctypes.c_int()
    call(222, clock, None, ctypes.byref(timer))
    return f"timer {timer.value}"


@probe(errno.EPERM, errno.EACCES, errno.EINVAL)
def deadline_scheduling() -> str:
    """Time that no other sandbox gets."""
    call(314, 0, struct.pack("IIQiIQQQ", 48, 6, 0, 0, 0, 900_000, 1_000_000, 1_000_000), 0)
    return "deadlines"


@probe(errno.EPERM, errno.ENOMEM, errno.EAGAIN)
def memory_that_cannot_be_taken_back() -> str:
    """More locked memory than the limit lets anybody have who is not privileged on the host."""
    size = 64 << 20
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] >= size:
        raise BlockedError("the cgroup bounds it")
    address = call(9, 0, size, 3, 0x22, -1, 0)
    call(149, ctypes.c_void_p(address), size)
    return f"{size} bytes are locked"


@group(
    "event_source", [("tracing", "/sys/kernel/tracing/trace_marker"), ("msr", "/dev/cpu/0/msr")], *REFUSED, errno.ENOENT
)
def _(path: str) -> str:
    return f"descriptor {os.open(path, os.O_WRONLY)}"


_IDENTITY: Final = ("/sys/class/dmi/id/product_uuid", "/sys/class/dmi/id/product_serial", "/sys/class/net/eth0/address")


@group("identity_of_the_host", [(path.rpartition("/")[2], path) for path in _IDENTITY], *REFUSED, errno.ENOENT)
def _(path: str) -> str:
    text = Path(path).read_text().strip()
    if not text:
        raise BlockedError("empty")
    return text
