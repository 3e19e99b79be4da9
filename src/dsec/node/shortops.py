"""Operations under way that a pause lets finish: a frozen agent would leave them without an answer."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

_DRAIN_S: Final = 2.0  # one that takes longer goes on after the pause


class ShortOperations:
    __slots__ = ("_count", "_quiet")

    def __init__(self) -> None:
        self._count = 0
        self._quiet = asyncio.Event()

    def begin(self, counted: bool) -> None:
        self._count += counted

    def finish(self, counted: bool) -> None:
        self._count -= counted
        if self._count == 0:
            self._quiet.set()

    async def drain(self) -> None:
        """Returns when there are none, or after two seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while self._count:
                    self._quiet.clear()
                    await self._quiet.wait()
