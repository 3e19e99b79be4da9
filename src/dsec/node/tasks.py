"""Tasks with an owner: none is forgotten, and the owner's end is theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from dsec.core.errors import UnavailableError
from dsec.observe.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")


_FINISH_S: Final = 60.0  # what must be finished is cut off after this, so that closing ends


async def result_of(task: asyncio.Task[T]) -> T:
    """What `task` gives; it goes on when its waiter is cancelled. Raises UnavailableError when its owner ended it."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        waiter = asyncio.current_task()
        if task.cancelled() and (waiter is None or not waiter.cancelling()):
            raise UnavailableError("the node is stopping", hint="ask again once it is back") from None
        raise


class Tasks:
    """A set of tasks that come and go. Unlike a TaskGroup it outlives the failure of one, which is logged."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: set[asyncio.Task[Any]] = set()
        self._finishing: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, T], *, awaited: bool = False, finishes: bool = False) -> asyncio.Task[T]:
        """`awaited`: somebody takes its result, and its failure is theirs to tell. `finishes`: it ends by itself, and
        closing waits for that: what it does must not be left half done. Raises UnavailableError after `close`."""
        if self._closed:
            work.close()
            raise UnavailableError(f"{self._what} has ended")
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        if finishes:
            self._finishing.add(task)
        task.add_done_callback(self._done_awaited if awaited else self._done)
        return task

    async def settle(self) -> None:
        """Ends all that there are; more may come afterwards. Never waits for the task that calls it."""
        loop = asyncio.get_running_loop()
        cut_at = loop.time() + _FINISH_S
        while rest := {task for task in self._tasks if task is not asyncio.current_task()}:
            for task in rest - self._finishing if loop.time() < cut_at else rest:
                task.cancel()
            await asyncio.wait(rest, timeout=1.0)

    async def close(self) -> None:
        """Ends all, and takes no more."""
        await self.settle()
        self._closed = True
        await self.settle()

    def __len__(self) -> int:
        return len(self._tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._forget(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task failed", what=self._what, exc_info=error)

    def _done_awaited(self, task: asyncio.Task[Any]) -> None:
        self._forget(task)
        if not task.cancelled():
            task.exception()  # whoever awaits it gets it; if they were cancelled, it is not reported as lost

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._finishing.discard(task)
