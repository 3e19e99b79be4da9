"""How many spares a shape is worth."""

from __future__ import annotations

from dsec.node.demand import Demand, demand_after, demand_later, next_change

LOW, HIGH, IDLE_S = 2, 16, 600.0


def asked(times: int, *, hit: bool, demand: Demand | None = None, now: float = 0.0) -> Demand:
    demand = demand or Demand()
    for _ in range(times):
        demand = demand_after(demand, hit=hit, now=now, low=LOW, high=HIGH)
    return demand


def test_a_shape_that_is_asked_for_once_gets_no_spares() -> None:
    assert asked(1, hit=False).wanted == 0
    assert asked(2, hit=False).wanted == LOW


def test_one_that_finds_none_left_wants_twice_as_many_up_to_the_high_watermark() -> None:
    assert [asked(n, hit=False).wanted for n in (2, 3, 4, 5, 6)] == [2, 4, 8, 16, 16]


def test_one_that_finds_a_spare_wants_no_more() -> None:
    assert asked(50, hit=True).wanted == LOW


def test_it_falls_back_by_halves_and_not_below_the_low_watermark() -> None:
    demand = asked(5, hit=False)
    seen = []
    for now in range(300, 2_000, 300):
        demand = demand_after(demand, hit=True, now=now, low=LOW, high=HIGH)
        demand = demand_later(demand, now=now, low=LOW, idle_s=IDLE_S)
        seen.append(demand.wanted)

    assert seen == [8, 4, 2, 2, 2, 2]


def test_one_that_nobody_asks_for_any_more_is_forgotten() -> None:
    demand = demand_later(asked(5, hit=False), now=IDLE_S, low=LOW, idle_s=IDLE_S)

    assert (demand.asked, demand.wanted) == (0, 0)
    assert asked(1, hit=False, demand=demand, now=IDLE_S).wanted == 0


def test_nothing_changes_before_the_moment_that_is_named() -> None:
    for demand in (asked(1, hit=False), asked(2, hit=False), asked(5, hit=False)):
        moment = next_change(demand, low=LOW, idle_s=IDLE_S)

        assert demand_later(demand, now=moment - 1, low=LOW, idle_s=IDLE_S) == demand
        assert demand_later(demand, now=moment, low=LOW, idle_s=IDLE_S) != demand
