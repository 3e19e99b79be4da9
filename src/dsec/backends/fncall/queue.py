"""Who is next when there are more calls than places: fair between projects by the time that their calls take. Pure.

Start-time fair queueing (Goyal, Vin, Cheng 1996): each project has a clock that its calls advance by what they cost,
and the one that is behind is next. Who comes back after a while begins at the clock of those that are served, so that
nobody saves up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_COST_S: Final = 0.01  # what a project's first call is taken to cost
_MEMORY: Final = 0.2  # weight of the newest call in the estimate of the next
_CLOCKS_MAX: Final = 10_000  # projects remembered beside those that wait


@dataclass(slots=True)
class _Project(Generic[T]):
    clock: float
    cost_s: float = _COST_S
    waiting: deque[T] = field(default_factory=deque)


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._projects: dict[str, _Project[T]] = {}
        self._now = 0.0  # the clock of who was served last
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for project in self._projects.values():
            yield from project.waiting

    def waiting(self, project: str) -> int:
        known = self._projects.get(project)
        return len(known.waiting) if known is not None else 0

    def push(self, project: str, item: T) -> None:
        known = self._projects.get(project)
        if known is None:
            self._forget()
            known = self._projects[project] = _Project(self._now)
        if not known.waiting:
            known.clock = max(known.clock, self._now)
        known.waiting.append(item)
        self._size += 1

    def pop(self) -> tuple[str, T] | None:
        """The next item and its project, which is charged what its calls have cost of late."""
        waiting = [(known.clock, name) for name, known in self._projects.items() if known.waiting]
        if not waiting:
            return None
        clock, name = min(waiting)
        known = self._projects[name]
        self._now = clock
        known.clock += known.cost_s
        self._size -= 1
        return name, known.waiting.popleft()

    def remove(self, project: str, item: T) -> bool:
        """Of who waits no longer. False: it is not there."""
        known = self._projects.get(project)
        if known is None or item not in known.waiting:
            return False
        known.waiting.remove(item)
        self._size -= 1
        return True

    def charge(self, project: str, took_s: float) -> None:
        """A call of the project is over: what it was charged in advance is put right."""
        known = self._projects.get(project)
        if known is not None:
            known.clock += took_s - known.cost_s
            known.cost_s += _MEMORY * (took_s - known.cost_s)

    def _forget(self) -> None:
        """Projects whose clock is behind and that wait for nothing would begin anew just so."""
        if len(self._projects) >= _CLOCKS_MAX:
            for name in [n for n, p in self._projects.items() if not p.waiting and p.clock <= self._now]:
                del self._projects[name]
