"""The manual clock wakes sleepers at their times, in order, and only when it is moved."""

from __future__ import annotations

import asyncio

import pytest

from dsec.testing.clock import ManualClock


async def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock = ManualClock(monotonic_s=0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, *times: float) -> None:
        for seconds in times:
            await clock.sleep(seconds)
            woken.append((name, clock.monotonic_s()))

    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper("a", 3, 3))
        group.create_task(sleeper("b", 2, 3))
        await clock.wait_sleepers(2)
        await clock.advance(10)

    assert woken == [("b", 2), ("a", 3), ("b", 5), ("a", 6)]
    assert clock.monotonic_s() == 10


async def test_nothing_wakes_before_its_time() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(5))
    await clock.wait_sleepers(1)

    await clock.advance(4.9)
    assert not task.done()
    await clock.advance(0.1)
    assert task.done()


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(5))
    await clock.wait_sleepers(1)

    task.cancel()
    await asyncio.wait([task])

    assert clock.sleepers == 0


async def test_the_wall_clock_can_step_alone() -> None:
    clock = ManualClock(wall_s=100, monotonic_s=7)

    clock.step_wall(-50)

    assert (clock.wall_s(), clock.monotonic_s()) == (50, 7)


async def test_waiting_for_sleepers_that_never_come_ends() -> None:
    with pytest.raises(TimeoutError):
        await ManualClock().wait_sleepers(1, deadline_s=0.01)
