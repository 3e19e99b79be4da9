"""Requests that may come again: their work is done once for an idempotency key, and goes on without its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dsec.core.errors import IdempotencyError
from dsec.node.tasks import Tasks, result_of

T = TypeVar("T")


@dataclass(slots=True)
class _InFlight(Generic[T]):
    request_hash: bytes
    task: asyncio.Task[T]


class Once(Generic[T]):
    """For requests of one kind; `what` is said to who uses a key again for another one."""

    def __init__(self, tasks: Tasks, what: str) -> None:
        self._tasks = tasks
        self._what = what
        self._in_flight: dict[tuple[str, str], _InFlight[T]] = {}

    def __len__(self) -> int:
        """How much is under way."""
        return len(self._in_flight)

    async def done(
        self,
        scope: tuple[str, str],
        hash: bytes,
        work: Callable[[], Coroutine[Any, Any, T]],
        known: Callable[[], T | None],
    ) -> T:
        """What `work` gives: now, for whoever began it with this project and key, or before, as `known` tells.

        Raises IdempotencyError when that was another request, and what the work raises.
        """
        running = self._in_flight.get(scope)
        if running is None:
            before = known()
            if before is not None:
                return before
            task = self._tasks.spawn(work(), awaited=True)
            running = self._in_flight[scope] = _InFlight(hash, task)
            task.add_done_callback(lambda _: self._in_flight.pop(scope, None))
        elif running.request_hash != hash:
            raise self.mismatch(scope[1])
        return await result_of(running.task)

    def is_under_way(self, scope: tuple[str, str]) -> bool:
        return scope in self._in_flight

    async def alone(self, work: Coroutine[Any, Any, T]) -> T:
        """Without a key nobody can ask again: the work ends with its caller."""
        task = self._tasks.spawn(work, awaited=True)
        try:
            return await result_of(task)
        except asyncio.CancelledError:
            task.cancel()
            raise

    def mismatch(self, key: str) -> IdempotencyError:
        return IdempotencyError(
            f"the idempotency key {key[:80]!r} was used for a different request",
            hint=f"use a fresh key for every {self._what}",
        )
