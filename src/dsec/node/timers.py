"""When something is due: a heap of moments by name, moved without searching."""

from __future__ import annotations

import heapq


class Timers:
    """At most one live entry a name: asking for a later moment changes nothing, as the holder looks again when due."""

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._at: dict[str, float] = {}

    def schedule(self, name: str, at: float) -> bool:
        """True when this is now the earliest of all: a sleeper must wake sooner."""
        queued = self._at.get(name)
        if queued is not None and queued <= at:
            return False
        self._at[name] = at
        heapq.heappush(self._heap, (at, name))
        return self._heap[0] == (at, name)

    def cancel(self, name: str) -> None:
        self._at.pop(name, None)

    def next_at(self) -> float | None:
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[str]:
        """Names whose moment has come, earliest first; they are no longer scheduled."""
        found: list[str] = []
        self._drop_stale()
        while self._heap and self._heap[0][0] <= now:
            _, name = heapq.heappop(self._heap)
            del self._at[name]
            found.append(name)
            self._drop_stale()
        return found

    def __len__(self) -> int:
        return len(self._at)

    def _drop_stale(self) -> None:
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
