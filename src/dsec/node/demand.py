"""How many spares of one shape are worth having. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Demand:
    """What has been asked of one shape. `wanted` lies between the watermarks once that was twice."""

    asked: int = 0
    wanted: int = 0
    asked_at: float = 0.0
    changed_at: float = 0.0


def demand_after(demand: Demand, *, hit: bool, now: float, low: int, high: int) -> Demand:
    """Somebody asks. A shape that is asked for once may never be again; one that finds no spare wants more of them."""
    asked = demand.asked + 1
    if asked < 2:
        return Demand(asked=asked, asked_at=now, changed_at=now)
    wanted = max(demand.wanted, low)
    if not hit and demand.wanted:
        wanted = min(high, 2 * wanted)
    changed_at = demand.changed_at if wanted == demand.wanted else now
    return Demand(asked=asked, wanted=wanted, asked_at=now, changed_at=changed_at)


def demand_later(demand: Demand, *, now: float, low: int, idle_s: float) -> Demand:
    """Time passes: it falls back by halves while nothing makes it grow, and to nothing when nobody asks any more."""
    if now - demand.asked_at >= idle_s:
        return replace(demand, asked=0, wanted=0, changed_at=now)
    if demand.wanted > low and now - demand.changed_at >= idle_s / 2:
        return replace(demand, wanted=max(low, demand.wanted // 2), changed_at=now)
    return demand


def next_change(demand: Demand, *, low: int, idle_s: float) -> float:
    """When `demand_later` has something to say, unless somebody asks before."""
    idle_at = demand.asked_at + idle_s
    return min(idle_at, demand.changed_at + idle_s / 2) if demand.wanted > low else idle_at
