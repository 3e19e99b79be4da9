"""What sandboxes use, looked at now and then: a little at a time, as there may be thousands and one event loop."""

from __future__ import annotations

import asyncio
from typing import Final

from dsec.node.registry import Registry

IDLE_TURNS: Final = 10  # of those in which a busy sandbox is looked at; what an idle one uses hardly changes
_AT_ONCE: Final = 16  # each some 0.4 ms of reading files; then everybody else has a turn


class Sampling:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._turn = 0

    async def turn(self) -> None:
        """All that are busy, and every tenth of the others: another one the next time."""
        self._turn += 1
        looked = 0
        for place, sandbox in enumerate(self._registry):
            if not sandbox.lifetime.busy and (place + self._turn) % IDLE_TURNS:
                continue
            await sandbox.sample()
            looked += 1
            if looked % _AT_ONCE == 0:
                await asyncio.sleep(0)
