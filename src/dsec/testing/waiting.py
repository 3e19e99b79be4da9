"""Waiting for a condition that nothing announces, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

_POLL_S: Final = 0.01


async def eventually(check: Callable[[], T | Awaitable[T]], *, deadline_s: float = 60.0) -> T:
    """The first true answer of `check`, which may be a coroutine function. Raises AssertionError at the deadline."""
    until_s = time.monotonic() + deadline_s
    while True:
        answer = check()
        value: T = await answer if inspect.isawaitable(answer) else answer
        if value:
            return value
        assert time.monotonic() < until_s, f"still not so after {deadline_s:g} s; the last answer was {value!r}"
        await asyncio.sleep(_POLL_S)
