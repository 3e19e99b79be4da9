"""Fault injection walks through every call, and notices a test that proves nothing."""

from __future__ import annotations

from contextlib import suppress

import pytest

from dsec.core.faults import fault_point
from dsec.testing.faults import Faults, each_nth_failure


def work(done: list[str]) -> None:
    for name in ("step.a", "step.b", "other", "step.c"):
        fault_point(name)
        done.append(name)


def test_without_a_test_a_fault_point_does_nothing() -> None:
    work([])


def test_each_call_fails_once_and_the_last_run_fails_none() -> None:
    runs: list[list[str]] = []
    hits = []

    for faults in each_nth_failure("step."):
        done: list[str] = []
        with faults, suppress(OSError):
            work(done)
        runs.append(done)
        hits.append(faults.hit)

    assert hits == ["step.a", "step.b", "step.c", None]
    assert runs[1] == ["step.a"]
    assert runs[3] == ["step.a", "step.b", "other", "step.c"]


async def test_it_iterates_asynchronously_too() -> None:
    hits = []

    async for faults in each_nth_failure("step."):
        with faults, suppress(OSError):
            work([])
        hits.append(faults.hit)

    assert hits == ["step.a", "step.b", "step.c", None]


def test_the_error_is_the_test_s_choice() -> None:
    with Faults(1, error=lambda name: ValueError(name)), pytest.raises(ValueError, match=r"step\.a"):
        work([])


def test_a_prefix_that_meets_no_point_is_an_error() -> None:
    def walk() -> None:
        for faults in each_nth_failure("nothing."):
            with faults:
                work([])

    with pytest.raises(AssertionError, match="no fault point"):
        walk()


def test_faults_that_are_not_entered_are_an_error() -> None:
    with pytest.raises(AssertionError, match="not entered"):
        for _ in each_nth_failure():
            pass


def test_a_run_that_always_meets_one_more_point_ends_in_an_error() -> None:
    calls = 0

    def growing() -> None:
        nonlocal calls
        calls += 1
        for _ in range(calls):
            fault_point("x")

    def walk() -> None:
        for faults in each_nth_failure():
            with faults, suppress(OSError):
                growing()

    with pytest.raises(AssertionError, match="still failing"):
        walk()


def test_two_at_a_time_are_refused_and_the_first_stays() -> None:
    with Faults(0) as first:
        with pytest.raises(RuntimeError, match="already"):
            Faults(0).__enter__()
        work([])

    assert first.calls == ["step.a", "step.b", "other", "step.c"]
    work([])
    assert len(first.calls) == 4
