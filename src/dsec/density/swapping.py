"""The second half of paging out (`pageout` is the first), of whole cgroups: what is in swap already and in memory yet,
what several processes share, and files in memory. The kernel counts all that as used until the cgroup is told.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.core.faults import fault_point
from dsec.core.limits import MIB
from dsec.density.cgroups import read_keyed, read_number

_WRITTEN_S: Final = 10.0  # for what is on its way to swap; what is not there by then stays
_LOOK_S: Final = 0.02
_PIECE_BYTES: Final = 64 * MIB  # at a time: whoever is to run again waits for no more than that
_SWAPPINESS_MAX: Final = 200  # nothing of files: their pages may be others' too
_PIDS_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """Where the memory of one sandbox is counted. Both None: nowhere."""

    v2: Path | None
    v1: Path | None

    @classmethod
    def of(cls, cgroup2: str | None, cgroup1: dict[str, str]) -> CgroupMemory:
        """A controller is in one hierarchy: what has a directory in version 1 is not in version 2."""
        v1 = cgroup1.get("memory")
        v2 = cgroup2 if v1 is None and cgroup2 is not None and Path(cgroup2, "memory.current").exists() else None
        return cls(None if v2 is None else Path(v2), None if v1 is None else Path(v1))

    def allow_swap(self, allowed: bool) -> None:
        """Version 2 gives sandboxes no swap, but while they stand still. Version 1 counts both together, and needs not
        be told. Raises OSError."""
        if self.v2 is not None and (file := self.v2 / "memory.swap.max").exists():
            file.write_text("max" if allowed else "0")

    def push_out(self, stop: threading.Event) -> None:
        """Until nothing but pages of files is left, or `stop` is set. Blocking. Raises OSError."""
        fault_point("density.push_out")
        if self.v2 is not None:
            self._push_out_v2(self.v2, stop)
        elif self.v1 is not None:
            self._push_out_v1(self.v1, stop)

    def _push_out_v2(self, directory: Path, stop: threading.Event) -> None:
        _wait_written(directory / "memory.stat", "file_writeback", stop)
        while not stop.is_set():
            found = read_keyed(directory / "memory.stat")
            left = found.get("anon", 0) + found.get("shmem", 0) + found.get("swapcached", 0)
            before = read_number(directory / "memory.current") or 0
            if left < MIB:
                return
            asked = min(left, _PIECE_BYTES)
            # Says EAGAIN when it has found less, and EINVAL (before Linux 6.11) when it is not to look at anonymous
            # memory before files.
            if _written(directory / "memory.reclaim", f"{asked} swappiness={_SWAPPINESS_MAX}") == errno.EINVAL:
                _written(directory / "memory.reclaim", str(asked))
            if before - (read_number(directory / "memory.current") or 0) < asked // 8:
                return

    def _push_out_v1(self, directory: Path, stop: threading.Event) -> None:
        _wait_written(directory / "memory.stat", "writeback", stop)
        before = read_number(directory / "memory.swappiness")
        (directory / "memory.swappiness").write_text(str(_SWAPPINESS_MAX))
        try:
            # It goes on until nothing more goes, which no signal to a thread ends: a process can be killed.
            command = ["/bin/sh", "-c", 'echo 1 >"$0"', str(directory / "memory.force_empty")]
            quiet = subprocess.DEVNULL
            with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
                while process.poll() is None and not stop.wait(_LOOK_S):
                    pass
                process.kill()
        finally:
            (directory / "memory.swappiness").write_text(str(before if before is not None else 60))


def processes_below(directory: Path) -> Iterator[int]:
    """Of a cgroup and all below it."""
    seen = 0
    for place, _, names in os.walk(directory):
        if "cgroup.procs" not in names:
            continue
        with contextlib.suppress(OSError):
            for line in Path(place, "cgroup.procs").read_text().splitlines():
                seen += 1
                if seen > _PIDS_MAX:
                    return
                yield int(line)


def _wait_written(stat: Path, key: str, stop: threading.Event) -> None:
    until_s = time.monotonic() + _WRITTEN_S
    while read_keyed(stat).get(key, 0) and time.monotonic() < until_s and not stop.wait(_LOOK_S):
        pass


def _written(file: Path, text: str) -> int:
    """0, or the error's number. Raises no OSError but those that nobody expects here."""
    try:
        file.write_text(text)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EINVAL, errno.ENOENT):
            raise
        return error.errno or errno.EINVAL
    return 0
