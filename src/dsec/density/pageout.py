"""Memory of a process that stands still goes to swap (process_madvise(2), MADV_PAGEOUT): what it has written is not
needed before it runs again, and comes back page by page."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.core.errors import HostError
from dsec.core.faults import fault_point
from dsec.core.limits import MIB
from dsec.density.advice import Advice, advise
from dsec.density.pagein import Part, private_of, used_of

_CHUNK_BYTES: Final = 16 * MIB  # at a time: whoever is to run again waits for no more than that
_SWAPS: Final = Path("/proc/swaps")


@dataclass(frozen=True, slots=True)
class PagedOut:
    """As the kernel tells it before and after: of what was advised it takes what it can."""

    resident_before_bytes: int
    resident_bytes: int
    swapped_bytes: int
    used: tuple[Part, ...] = ()  # since it last came back from there; nothing the first time

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
        before, already = _resident(pid)
        private = private_of(pid)
        used = used_of(pid, private) if already else ()
        for part in private:
            for chunk in range(part.start, part.end, _CHUNK_BYTES):
                if stop.is_set():
                    break
                advise(pidfd, chunk, min(_CHUNK_BYTES, part.end - chunk), Advice.PAGEOUT)
        after, swapped = _resident(pid)
    except OSError as error:
        raise HostError(f"the memory of {pid} cannot be paged out: {error}") from error
    finally:
        os.close(pidfd)
    return PagedOut(before, after, swapped, used)


def _resident(pid: int) -> tuple[int, int]:
    """Bytes in memory, and bytes in swap."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines[1:])}
    return sizes["Rss"], sizes["Swap"]
