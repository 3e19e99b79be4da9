"""The time of day in a guest is late by what the message was on its way: one that took long is followed by another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from dsec.agent.client import AgentClient
from dsec.core.limits import CLOCK_LATE_S_MAX, CLOCK_TRIES_MAX
from dsec.testing.clock import ManualClock


class Late(AgentClient):
    """One whose guest gets a processor late, and sets its clock to what it was told."""

    def __init__(self, clock: ManualClock, takes_s: Sequence[float]) -> None:
        super().__init__(cast(Any, None))
        self.paused: list[float] = []
        self.late_s = 0.0
        self._clock, self._takes_s = clock, list(takes_s)

    async def clock(self, *, paused_s: float, wall_s: float | None = None) -> None:
        assert wall_s is not None
        self.paused.append(paused_s)
        await self._clock.advance(self._takes_s.pop(0))
        self.late_s = self._clock.wall_s() - wall_s


@pytest.mark.parametrize("takes_s", [[0.01], [0.9, 0.1], [3.0, 0.7, 0.2]])
async def test_it_is_told_again_until_it_is_right(takes_s: list[float]) -> None:
    clock = ManualClock()
    client = Late(clock, takes_s)

    await client.set_time(clock, paused_s=7.0)

    assert client.late_s == pytest.approx(takes_s[-1])
    assert client.late_s <= CLOCK_LATE_S_MAX
    assert client.paused == [7.0, *[0.0] * (len(takes_s) - 1)]  # a pause counts once


async def test_a_machine_without_time_for_it_keeps_nobody() -> None:
    clock = ManualClock()
    client = Late(clock, [5.0] * 100)

    await client.set_time(clock, paused_s=0.0)

    assert len(client.paused) == CLOCK_TRIES_MAX
