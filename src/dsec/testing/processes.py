"""Processes as /proc shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """`start_ticks` tells a process from a later one with the same pid."""

    pid: int
    parent: int
    start_ticks: int
    state: str
    name: str

    def __str__(self) -> str:
        """The same for as long as it lives, whatever it does: two looks at it are compared by this."""
        return f"process {self.pid} ({self.name}, started at {self.start_ticks})"


def read_process(pid: int) -> ProcessInfo | None:
    """None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name may hold blanks and parentheses; what follows the last one is plain.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return ProcessInfo(pid, int(fields[1]), int(fields[19]), fields[0], head.partition("(")[2])


def all_processes() -> dict[int, ProcessInfo]:
    found = (read_process(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
    return {info.pid: info for info in found if info is not None}


def descendants(roots: frozenset[int]) -> dict[int, ProcessInfo]:
    """Children of these processes, their children, and so on; not the roots."""
    everything = all_processes()
    found: set[int] = set()
    grown = True
    while grown:
        more = {pid for pid, info in everything.items() if info.parent in roots | found} - found - roots
        grown = bool(more)
        found |= more
    return {pid: everything[pid] for pid in found}


def command_line(pid: int) -> bytes:
    """Empty when it is gone, or a kernel thread."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
