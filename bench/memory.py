"""What processes have of the machine's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_SAME = 5
_LOOK_S = 0.5


def least(look: Callable[[], int]) -> int:
    """Memory is given back in the background: the least that is seen until it is less no more."""
    found, same = look(), 0
    while same < _SAME:
        time.sleep(_LOOK_S)
        found, same = (now, 0) if (now := look()) < found else (found, same + 1)
    return found


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
