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


class SystemClock:
    def wall_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()
