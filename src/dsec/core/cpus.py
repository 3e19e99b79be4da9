"""Lists of processors as the kernel writes them: "0-3,8" (cpuset(7), formats)."""

from __future__ import annotations

import re
from typing import Final

from dsec.core.errors import InvalidArgumentError

_CPU_MAX: Final = 8_191  # the largest number that kernels are built for
_RANGE: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?\Z")


def parse_cpus(text: str) -> frozenset[int]:
    """Raises InvalidArgumentError unless it names at least one."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2]) if match and match[2] else first
        if match is None or not first <= last <= _CPU_MAX:
            raise InvalidArgumentError(f"{text[:80]!r} is no list of processors", hint='such as "0-3,8"')
        found.update(range(first, last + 1))
    return frozenset(found)
