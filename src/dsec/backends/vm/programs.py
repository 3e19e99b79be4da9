"""A monitor's program is a file that somebody may replace while a node runs: with the next version, most often."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

Stamp: TypeAlias = tuple[int, int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Another one means another file; None: there is none. Blocking, a microsecond."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
