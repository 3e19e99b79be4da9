"""Project paths: "/" is the root, "/team/run" a project and its sub-project."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from dsec.core.errors import InvalidArgumentError
from dsec.core.limits import PROJECT_PATH_BYTES_MAX

ROOT: Final = "/"
DEPTH_MAX: Final = 16  # levels; a quota is counted at each of them

_PART: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")


def parse_project(text: str) -> str:
    """`text` as a project path. Raises InvalidArgumentError."""
    if text == ROOT:
        return text
    parts = text.split("/")
    good = not parts[0] and 2 <= len(parts) <= DEPTH_MAX + 1 and all(_PART.match(part) for part in parts[1:])
    if not good or len(text) > PROJECT_PATH_BYTES_MAX:
        raise InvalidArgumentError(
            f"{text[:80]!r} is not a project path",
            hint="a project path is '/' or such as '/team/run-7': names of letters, digits, '.', '_' and '-'",
        )
    return text


def reaches(owner: str, project: str) -> bool:
    """Whether who belongs to `owner` may act on what belongs to `project`: itself, or anything below it."""
    return owner in (ROOT, project) or project.startswith(f"{owner}/")


def parent_of(project: str) -> str | None:
    """None of the root."""
    return None if project == ROOT else project.rpartition("/")[0] or ROOT


@lru_cache(maxsize=4_096)
def lineage(project: str) -> tuple[str, ...]:
    """The root, and every project down to this one."""
    if project == ROOT:
        return (ROOT,)
    parts = project.split("/")[1:]
    return (ROOT, *("/" + "/".join(parts[: depth + 1]) for depth in range(len(parts))))
