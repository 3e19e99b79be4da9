"""Whether this host can steer a network namespace (`NetworkMode.PROXIED`): tried, in one that ends with the trial."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from typing import Final

from dsec.binaries import find_binary
from dsec.core.errors import DsecError
from dsec.storage.syscalls import check_syscall, leave_network

_BPF: Final = 321  # of x86-64, the one that there are programs for
_PROG_LOAD: Final = 5
_LINK_CREATE: Final = 28
_SK_LOOKUP: Final = 30  # type of program
_ATTACH_SK_LOOKUP: Final = 36
_PASS: Final = struct.pack("<BBhiBBhi", 0xB7, 0, 0, 1, 0x95, 0, 0, 0)  # r0 = 1; exit
_ATTR_BYTES: Final = 128
_WAIT_S: Final = 10.0


@functools.cache
def why_not_steered() -> str:
    """Empty where it can. Once per process; blocks for a moment."""
    if os.geteuid() != 0:
        return "it takes root"
    if os.uname().machine != "x86_64":
        return "there is no program for this processor"
    try:
        find_binary("dsec-egress")
    except DsecError as error:
        return error.message
    found: list[str] = []
    # In a thread: its network namespace is its own, and goes with it.
    thread = threading.Thread(target=lambda: found.append(_tried()), name="steering", daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    return found[0] if found else "the trial did not end in time"


def _tried() -> str:
    descriptors: list[int] = []
    try:
        leave_network()
        descriptors.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        descriptors.append(_program())
        link = struct.pack("<IIII", descriptors[1], descriptors[0], _ATTACH_SK_LOOKUP, 0)
        descriptors.append(_bpf(_LINK_CREATE, link))
        return ""
    except OSError as error:
        return f"the kernel refuses ({error.strerror}); it takes Linux 5.9 or newer, with BPF"
    finally:
        for descriptor in reversed(descriptors):
            os.close(descriptor)


def _program() -> int:
    code, licence = ctypes.create_string_buffer(_PASS, len(_PASS)), ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "<IIQQIIQII16sII",
        *(_SK_LOOKUP, len(_PASS) // 8, ctypes.addressof(code), ctypes.addressof(licence)),
        *(0, 0, 0, 0, 0, b"dsec_trial", 0, _ATTACH_SK_LOOKUP),
    )
    return _bpf(_PROG_LOAD, attributes)


def _bpf(command: int, attributes: bytes) -> int:
    room = ctypes.create_string_buffer(attributes, _ATTR_BYTES)
    return check_syscall("bpf", _BPF, ctypes.c_int(command), room, ctypes.c_uint(_ATTR_BYTES))
