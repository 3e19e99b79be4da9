"""Work that goes on when the caller who asked for it has gone away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from dsec.core.errors import CapacityError, UnavailableError
from dsec.core.limits import KEPT_CREATES_MAX

T = TypeVar("T")


class Keeper:
    """Owns such tasks. A create with an idempotency key is one: it completes, and can be found by its key."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._creates = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], *, creates: int = 1) -> asyncio.Task[T]:
        """Await the task through `asyncio.shield`: cancelling the waiter then leaves the work alone. `creates`: how
        many it makes."""
        if self._closed:
            work.close()
            raise UnavailableError("the service is stopping", retry_after_s=1.0)
        if self._creates + creates > KEPT_CREATES_MAX:
            work.close()
            raise CapacityError(f"{KEPT_CREATES_MAX} creates are under way", retry_after_s=1.0)
        task = asyncio.create_task(work)
        self._tasks[task] = creates
        self._creates += creates
        task.add_done_callback(self._done)
        return task

    async def settle(self, *, deadline_s: float) -> None:
        """Returns when nothing is under way any more, or after `deadline_s`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=deadline_s)

    async def close(self) -> None:
        """Cancels what is under way; nothing more is taken."""
        self._closed = True
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._creates -= self._tasks.pop(task)
        if not task.cancelled():
            task.exception()  # who waits gets it; if nobody does, the node has logged it
