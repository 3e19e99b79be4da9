"""Memory of a process that stands still goes to swap (process_madvise(2), MADV_PAGEOUT): what it has written is not
needed before it runs again, and comes back page by page."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.core.errors import HostError
from dsec.core.faults import fault_point
from dsec.core.limits import MIB

_SYS_PROCESS_MADVISE: Final = 440  # on all architectures
_MADV_PAGEOUT: Final = 21
_CHUNK_BYTES: Final = 16 * MIB  # at a time: whoever is to run again waits for no more than that
# Memory that is locked or a device's, and what was unmapped meanwhile.
_PASSED: Final = frozenset({errno.EINVAL, errno.ENOMEM})
_SWAPS: Final = Path("/proc/swaps")


class _Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class PagedOut:
    """As the kernel tells it before and after: of what was advised it takes what it can."""

    resident_before_bytes: int
    resident_bytes: int
    swapped_bytes: int

    @property
    def given_back_bytes(self) -> int:
        return max(0, self.resident_before_bytes - self.resident_bytes)


def has_swap() -> bool:
    """Without it nothing would go but pages of files, which others may need."""
    with contextlib.suppress(OSError):
        return len(_SWAPS.read_text().splitlines()) > 1
    return False


def page_out(pid: int, stop: threading.Event) -> PagedOut:
    """Of the process `pid`, which is ours to know: only its private writable memory. Ends early once `stop` is set.
    Blocking. Raises HostError."""
    fault_point("density.page_out")
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise HostError(f"the memory of {pid} cannot be paged out: {error}") from error
    try:
        before, _ = _resident(pid)
        for start, end in _private(pid):
            for chunk in range(start, end, _CHUNK_BYTES):
                if stop.is_set():
                    break
                _advise(pidfd, chunk, min(_CHUNK_BYTES, end - chunk))
        after, swapped = _resident(pid)
    except OSError as error:
        raise HostError(f"the memory of {pid} cannot be paged out: {error}") from error
    finally:
        os.close(pidfd)
    return PagedOut(before, after, swapped)


def _private(pid: int) -> list[tuple[int, int]]:
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, rights = line.split(maxsplit=2)[:2]
        if rights.startswith("rw") and rights.endswith("p"):
            start, _, end = addresses.partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def _advise(pidfd: int, start: int, length: int) -> None:
    part = _Part(start, length)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(_SYS_PROCESS_MADVISE, pidfd, ctypes.byref(part), ctypes.c_size_t(1), _MADV_PAGEOUT, 0)
    if done < 0 and (number := ctypes.get_errno()) not in _PASSED:
        raise OSError(number, os.strerror(number))


def _resident(pid: int) -> tuple[int, int]:
    """Bytes in memory, and bytes in swap."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines[1:])}
    return sizes["Rss"], sizes["Swap"]
