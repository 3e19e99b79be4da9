"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
from typing import Final

_SETTLE_TURNS: Final = 50


class ManualClock:
    """Implements `core.clock.Clock`, and `sleep` for what takes it as an argument.

    clock = ManualClock()
    task = asyncio.create_task(wait_a_minute(clock, clock.sleep))
    await clock.wait_sleepers(1)
    await clock.advance(60)
    assert task.done()
    """

    def __init__(self, *, wall_s: float = 1_700_000_000.0, monotonic_s: float = 1_000.0) -> None:
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._serial = 0
        self._changed = asyncio.Event()

    def wall_s(self) -> float:
        return self._wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def step_wall(self, seconds: float) -> None:
        """The wall clock jumps, as when somebody sets it; no time passes."""
        self._wall_s += seconds

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        self._serial += 1
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (self._monotonic_s + seconds, self._serial, woken)
        heapq.heappush(self._sleepers, entry)
        self._changed.set()
        try:
            await woken
        finally:
            if entry in self._sleepers:
                self._sleepers.remove(entry)
                heapq.heapify(self._sleepers)

    @property
    def sleepers(self) -> int:
        return len(self._sleepers)

    async def wait_sleepers(self, count: int, *, deadline_s: float = 5.0) -> None:
        """Returns once at least `count` tasks sleep. Raises TimeoutError after `deadline_s` of real time."""
        async with asyncio.timeout(deadline_s):
            while len(self._sleepers) < count:
                self._changed.clear()
                await self._changed.wait()

    async def advance(self, seconds: float) -> None:
        """Time passes: sleepers wake in the order of their times, and what they then do happens at that time."""
        until_s = self._monotonic_s + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until_s:
            due_s, _, woken = heapq.heappop(self._sleepers)
            self._move_to(due_s)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self._move_to(until_s)
        await settle()

    def _move_to(self, monotonic_s: float) -> None:
        passed_s = max(0.0, monotonic_s - self._monotonic_s)
        self._monotonic_s += passed_s
        self._wall_s += passed_s


async def settle() -> None:
    """Lets everything that can run without time passing run on."""
    for _ in range(_SETTLE_TURNS):
        await asyncio.sleep(0)
