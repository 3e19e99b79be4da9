"""What benchmarks read of the kernel."""

from __future__ import annotations

from itertools import chain, cycle, repeat

from bench.accounting import at_rest


def test_what_is_under_way_is_not_taken_for_what_stays() -> None:
    under_way = iter(chain([7, 9, 9, 7, 8], repeat(11)))

    assert at_rest(lambda: next(under_way), readings=3, pause_s=0) == 11


def test_what_never_rests_is_waited_for_no_longer_than_that() -> None:
    restless = cycle([1, 2])

    assert at_rest(lambda: next(restless), readings=3, pause_s=0, readings_max=10) in (1, 2)
