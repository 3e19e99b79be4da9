"""What the sandboxes of each project, and of those below it, have: counted as they come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from dsec.core.spec import SandboxSpec
from dsec.wire.iam import amounts_of


class ProjectHoldings:
    def __init__(self) -> None:
        self._by_project: dict[str, Counter[str]] = {}

    def add(self, project: str, spec: SandboxSpec) -> None:
        amounts = amounts_of(spec)
        for path in _lineage(project):
            self._by_project.setdefault(path, Counter()).update(amounts)

    def remove(self, project: str, spec: SandboxSpec) -> None:
        amounts = amounts_of(spec)
        for path in _lineage(project):
            held = self._by_project[path]
            held.subtract(amounts)
            if not held["sandboxes"]:
                del self._by_project[path]

    def of(self, projects: Iterable[str]) -> dict[str, dict[str, int]]:
        return {path: dict(self._by_project[path]) for path in projects if path in self._by_project}


def kept(projects: Iterable[str], things: Mapping[str, Iterable[str]]) -> dict[str, dict[str, int]]:
    """`things`: of each kind, the project of each. By project: how many of each kind it has, with all below it."""
    found: dict[str, dict[str, int]] = {}
    for kind, owners in things.items():
        counts = Counter(path for owner in owners for path in _lineage(owner))
        for path in projects:
            if counts[path]:
                found.setdefault(path, {})[kind] = counts[path]
    return found


def _lineage(project: str) -> list[str]:
    """The root, and every project down to this one."""
    parts = project.split("/")[1:]
    return ["/", *("/" + "/".join(parts[: depth + 1]) for depth in range(len(parts)) if parts[depth])]
