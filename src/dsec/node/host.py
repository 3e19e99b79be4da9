"""A few facts of the machine that decisions need."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from dsec.core.errors import HostError

_NO_DESCRIPTORS: Final = {
    errno.EMFILE: "the node has no file descriptors left: raise LimitNOFILE of its service",
    errno.ENFILE: "the machine has no file descriptors left: raise fs.file-max",
}


def hint_of(error: OSError, otherwise: str) -> str:
    """What may be wrong where something of the node's own could not be read or written."""
    return _NO_DESCRIPTORS.get(error.errno or 0, otherwise)


def boot_id() -> str:
    """Another value means that the machine was started again. Raises HostError."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise HostError("the machine's boot id cannot be read", hint=hint_of(error, "is /proc mounted?")) from error


def memory_total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_available_bytes() -> int:
    """What could be used without pushing anything out (MemAvailable, proc_meminfo(5)). Raises HostError."""
    try:
        # Asked at every create: the few first lines, which have it, and no more.
        with open("/proc/meminfo", "rb", buffering=0) as file:
            text = file.read(1_024) or b""
    except OSError as error:
        raise HostError("the machine's free memory cannot be read", hint=hint_of(error, "is /proc mounted?")) from error
    _, found, rest = text.partition(b"MemAvailable:")
    if found:
        return int(rest.split(maxsplit=1)[0]) * 1024
    raise HostError("/proc/meminfo does not say how much memory is available")
