"""Time is passed in, so that tests own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def wall_s(self) -> float:
        """Seconds since the epoch; may step."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since some fixed moment; never steps."""
        ...


class SteadyWall:
    """Seconds since the epoch as a clock had them once, and what has passed since: a step of the clock changes nothing.

    For moments that processes compare with each other's, where one that stepped would take what is under way for over.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_s = clock.wall_s() - clock.monotonic_s()

    def now_s(self) -> float:
        return self._ahead_s + self._clock.monotonic_s()


class SystemClock:
    def wall_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()
