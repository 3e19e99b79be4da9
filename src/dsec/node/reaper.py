"""Ends sandboxes whose time is over. It sleeps until the next moment that anybody has asked for; it polls nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from dsec.core.clock import Clock
from dsec.node.tasks import Tasks
from dsec.node.timers import Timers

_SLEEP_S_MAX: Final = 3_600.0


class Reaper:
    """`expire` is called with a sandbox's id when its moment has come; it looks again and decides."""

    def __init__(self, clock: Clock, sleep: Callable[[float], Awaitable[None]], expire: Callable[[str], None]) -> None:
        self._clock = clock
        self._sleep = sleep
        self._expire = expire
        self._timers = Timers()
        self._sooner = asyncio.Event()

    def schedule(self, id: str, at: float) -> None:
        """`at` is monotonic. The earliest moment of an id counts."""
        if self._timers.schedule(id, at):
            self._sooner.set()

    def cancel(self, id: str) -> None:
        self._timers.cancel(id)

    def start(self, tasks: Tasks) -> None:
        tasks.spawn(self._run())

    def run_due(self) -> None:
        for id in self._timers.due(self._clock.monotonic_s()):
            self._expire(id)

    async def _run(self) -> None:
        while True:
            self._sooner.clear()
            self.run_due()
            at = self._timers.next_at()
            wait_s = _SLEEP_S_MAX if at is None else min(max(0.0, at - self._clock.monotonic_s()), _SLEEP_S_MAX)
            await self._sleep_or_sooner(wait_s)

    async def _sleep_or_sooner(self, wait_s: float) -> None:
        waits = {asyncio.ensure_future(self._sleep(wait_s)), asyncio.ensure_future(self._sooner.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
