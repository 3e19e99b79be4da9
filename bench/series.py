"""Series of timings taken in turn, and what is said of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Series:
    name: str
    milliseconds: list[float] = field(default_factory=list)

    @property
    def p50(self) -> float:
        return statistics.median(self.milliseconds)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.milliseconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def summary(self) -> dict[str, float]:
        return {
            "n": len(self.milliseconds),
            "min_ms": round(min(self.milliseconds), 3),
            "p50_ms": round(self.p50, 3),
            "p95_ms": round(self.percentile(0.95), 3),
            "max_ms": round(max(self.milliseconds), 3),
        }


Measure = Callable[[], list[float]]
"""Runs something and gives the milliseconds of each repetition in it."""


def timed(action: Callable[[], object]) -> Measure:
    def once() -> list[float]:
        started = time.perf_counter_ns()
        action()
        return [(time.perf_counter_ns() - started) / 1e6]

    return once


def interleave(measures: dict[str, Measure], rounds: int, *, warmup: int = 2) -> dict[str, Series]:
    """Each once a round, so that what disturbs the machine disturbs all alike; in another order each time, for one may
    make it easier for the next (by what the kernel keeps ready)."""
    series = {name: Series(name) for name in measures}
    order = list(measures.items())
    chance = random.Random(0)
    for turn in range(warmup + rounds):
        chance.shuffle(order)
        for name, measure in order:
            values = measure()
            if turn >= warmup:
                series[name].milliseconds.extend(values)
    return series
