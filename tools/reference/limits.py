"""docs/reference/limits.md"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from dsec.core import limits
from tools.reference.text import NOTE, join

_LIMIT = re.compile(r"^([A-Z][A-Z0-9_]*): Final = (.+?)(?:  # (.+))?$")
_UNITS = ("KIB", "MIB", "GIB")


@dataclass(frozen=True, slots=True)
class Limit:
    section: str
    name: str
    value: int | float
    reason: str


def page() -> str:
    lines = [
        "# Limits",
        "",
        NOTE,
        "",
        "Every bound, from `dsec.core.limits`. Sizes are in bytes, durations in seconds.",
        "",
    ]
    section = ""
    for limit in read_limits():
        if limit.section != section:
            section = limit.section
            lines += [
                "",
                f"## {section}",
                "",
                "| limit | value | what for |",
                "| --- | --- | --- |",
            ]
        lines.append(f"| `{limit.name}` | {_shown(limit)} | {limit.reason} |")
    return join(lines)


def read_limits() -> list[Limit]:
    found = []
    section = ""
    for line in inspect.getsource(limits).splitlines():
        if line.startswith("# "):
            section = line[2:]
        declared = _LIMIT.match(line)
        if declared and declared[1] not in _UNITS:
            found.append(Limit(section, declared[1], getattr(limits, declared[1]), declared[3] or ""))
    return found


def _shown(limit: Limit) -> str:
    value = limit.value
    if "_BYTES" in limit.name and isinstance(value, int):
        for unit, size in (("GiB", limits.GIB), ("MiB", limits.MIB), ("KiB", limits.KIB)):
            if value % size == 0 and value >= size:
                return f"{value // size:,} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"
