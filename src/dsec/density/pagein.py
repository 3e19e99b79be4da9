"""Memory that has gone to swap is read ahead of who needs it: what was used the last time (`used_of`, when it goes once
more) is likely to be used again, and a disk gives it in one go many times sooner than page by page.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.core.errors import HostError
from dsec.core.faults import fault_point
from dsec.core.limits import KIB, MIB
from dsec.density.advice import Advice, advise

USED_BYTES_MAX: Final = 128 * MIB  # of one process; more is no small part of it, and would keep the disk from others
_PARTS_MAX: Final = 4096  # of one process
_REGIONS_MAX: Final = 16_384  # as the kernel tells them, before neighbours are joined
_PIECE_BYTES: Final = MIB  # at a time: the first is there while the next is asked for
_AT_ONCE: Final = 4  # reads of what advice does not reach
_NEAR_BYTES: Final = 32 * KIB  # of a hole: the kernel would read as much around each page
_PAGEMAP_SCAN: Final = 0xC0606610  # Linux 6.7
_OF_FILE: Final = 1 << 2
_PRESENT: Final = 1 << 3
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Part:
    """Addresses in one process. `of_file`: a private view of a file, of which advice reads the file, not the swap."""

    start: int
    end: int
    of_file: bool


class _Scan(ctypes.Structure):
    """struct pm_scan_arg of linux/fs.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    )


class _Region(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("categories", ctypes.c_uint64))


def used_of(pid: int, private: Sequence[Part]) -> tuple[Part, ...]:
    """Of what is mapped so: what is in memory now. Nothing where that is much, or where the kernel does not tell.
    Raises OSError when the process has ended."""
    if not private:
        return ()
    found = (_Region * _REGIONS_MAX)()
    scan = _Scan(
        size=ctypes.sizeof(_Scan),
        start=private[0].start,
        end=private[-1].end,
        vec=ctypes.addressof(found),
        vec_len=_REGIONS_MAX,
        category_inverted=_OF_FILE,
        category_mask=_OF_FILE | _PRESENT,
        return_mask=_PRESENT,
    )
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        count = fcntl.ioctl(fd, _PAGEMAP_SCAN, scan)
    except OSError:
        return ()  # an older kernel
    finally:
        os.close(fd)
    if count == _REGIONS_MAX:
        return ()  # there may be more
    parts = _joined([(region.start, region.end) for region in found[:count]], private)
    few = len(parts) <= _PARTS_MAX and sum(part.end - part.start for part in parts) <= USED_BYTES_MAX
    return parts if few else ()


def _joined(regions: Sequence[tuple[int, int]], private: Sequence[Part]) -> tuple[Part, ...]:
    """Neighbours as one; each within what it is mapped as."""
    joined: list[Part] = []
    starts = [part.start for part in private]
    for start, end in regions:
        while start < end:
            at = bisect_right(starts, start) - 1
            if at < 0 or private[at].end <= start:
                break  # mapped otherwise: it has not gone, so it need not come
            until = min(end, private[at].end)
            last = joined[-1] if joined else None
            if last is not None and last.start >= private[at].start and start - last.end <= _NEAR_BYTES:
                joined[-1] = Part(last.start, until, last.of_file)
            else:
                joined.append(Part(start, until, private[at].of_file))
            start = until
    return tuple(joined)


def page_in(pid: int, parts: Sequence[Part], stop: threading.Event, *, touch: bool) -> None:
    """Asks for it; most comes while the process runs. `touch`: reads what advice does not reach, of a process whose
    program is ours: another could map something there that a read waits for. Ends early once `stop` is set. Blocking.
    Raises HostError."""
    fault_point("density.page_in")
    try:
        with contextlib.ExitStack() as stack:
            pidfd = os.pidfd_open(pid)
            stack.callback(os.close, pidfd)
            memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, memory)
            for part in parts:
                for at in () if part.of_file else range(part.start, part.end, _PIECE_BYTES):
                    if stop.is_set():
                        return
                    advise(pidfd, at, min(_PIECE_BYTES, part.end - at), Advice.WILLNEED)
            if not touch:
                return
            pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="page-in"))
            done = [pool.submit(_touch, memory, part, stop) for part in parts if part.of_file]
            for each in done:
                each.result()
    except OSError as error:
        raise HostError(f"the memory of {pid} cannot be read ahead: {error}") from error


def _touch(memory: int, part: Part, stop: threading.Event) -> None:
    with contextlib.suppress(OSError):  # unmapped meanwhile
        for at in range(part.start, part.end, _PIECE_BYTES):
            if stop.is_set():
                return
            os.pread(memory, min(_PIECE_BYTES, part.end - at), at)


def private_of(pid: int) -> list[Part]:
    """What of its memory is its own, and may be written. Raises OSError."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
        addresses, rights, _, _, inode = line.split(maxsplit=5)[:5]
        if rights.startswith("rw") and rights.endswith("p"):
            start, _, end = addresses.partition("-")
            found.append(Part(int(start, 16), int(end, 16), inode != "0"))
    return found
