"""Limits of time in tests: short on a machine that is quick, and longer where it shows to be slow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

_LIMITS_S: Final = (1.0, 5.0, 25.0)


async def with_a_limit(run: Callable[[float], Awaitable[T]], came_far: Callable[[T], object]) -> T:
    """Runs what ends at a limit of time; again with a longer one where it did not come as far as the test needs."""
    for limit_s in _LIMITS_S:
        result = await run(limit_s)
        if came_far(result):
            break
    return result
