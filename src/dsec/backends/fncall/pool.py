"""The places of one environment and task type, and who waits for one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from dsec.backends.fncall.config import PoolConfig
from dsec.backends.fncall.queue import FairQueue
from dsec.backends.fncall.worker import Worker
from dsec.core.errors import CapacityError, DsecError, UnsupportedError
from dsec.observe.logs import get_logger

log = get_logger(__name__)

_FAILED_S: Final = 5.0  # after a place that could not be made: who asks meanwhile gets the same answer
_LACKS_S: Final = 60.0  # what an environment lacks is asked for again: another may have its name by then
_RETRY_S_MAX: Final = 60.0
_CHECK_S: Final = 20.0  # a place is asked how it does when nobody has for as long


@dataclass(slots=True, eq=False)
class Ticket:
    came: float = field(default_factory=time.monotonic)
    given: asyncio.Future[Worker] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Pool:
    """`start` makes a worker; `may_grow` says whether the node has room for one more of this pool; `starved` which pool
    is to have the place that this one has just been given back, if another one needs it more."""

    def __init__(
        self,
        name: str,
        type: str,
        start: Callable[[], Awaitable[Worker]],
        may_grow: Callable[[Pool], bool],
        starved: Callable[[Pool], Pool | None] = lambda _: None,
        config: PoolConfig | None = None,
    ) -> None:
        self.name = name
        self.type = type
        self.config = config or PoolConfig()
        self.queue: FairQueue[Ticket] = FairQueue()
        self.idle: deque[Worker] = deque()
        self.busy = 0
        self.starting = 0
        self.calls = 0
        self.retired = 0
        self.used_at = time.monotonic()
        self._checking = 0
        self._start = start
        self._may_grow = may_grow
        self._starved = starved
        self._failure: tuple[float, DsecError] | None = None
        self._lack: tuple[float, UnsupportedError] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[str | None]] = set()  # calls that are answered, whose places are cleaned up
        self._took_s = 0.1
        self._closed = False

    @property
    def places(self) -> int:
        return len(self.idle) + self.busy + self.starting + self._checking

    @property
    def unused(self) -> bool:
        """Nothing of it is lost to anybody: one that a place is being made for would never get to know of its end."""
        return not (self.busy or self.starting or self._checking or len(self.queue) or self.config.places_min)

    async def acquire(self, project: str, wait_s: float) -> Worker:
        """A worker for one call; `release` must follow. Raises CapacityError when none came in time, or what kept one
        from being made."""
        self.used_at = time.monotonic()
        self._refuse_if_failing()
        if not len(self.queue) and (worker := self._take_idle()) is not None:
            self.busy += 1
            return worker
        ticket = Ticket()
        self.queue.push(project, ticket)
        self.grow()
        try:
            async with asyncio.timeout(wait_s):
                return await ticket.given
        except BaseException as error:
            self.queue.remove(project, ticket)
            self._put_back(ticket)
            if not isinstance(error, TimeoutError):
                raise
            raise CapacityError(
                f"no place for a call of type {self.type!r} was free within {wait_s:g} s",
                hint="try again later, or let it wait longer for one",
                retry_after_s=self.wait_s(),
            ) from error

    def release(self, worker: Worker, project: str, took_s: float, *, spoilt: str | None) -> None:
        """The call is over. A worker that is `spoilt` is never used again."""
        self.busy -= 1
        self.calls += 1
        self.used_at = time.monotonic()
        self.queue.charge(project, took_s)
        self._took_s += 0.1 * (took_s - self._took_s)
        if spoilt is not None:
            log.warning("a place for calls is given up", worker=worker.id, type=self.type, why=spoilt[:500])
        if spoilt is not None or self._is_worn(worker) or not worker.alive or self._closed:
            self.retired += 1
            worker.close()
        elif (other := self._starved(self)) is not None:
            self.retired += 1
            worker.close()
            other.grow()
        else:
            self.idle.append(worker)
        self.serve()
        self.grow()

    def release_after(self, worker: Worker, project: str, began: float, end: Coroutine[Any, Any, str | None]) -> None:
        """The caller has its answer; the place is free once `end` is through, which says why it is spoilt."""

        def done(task: asyncio.Task[str | None]) -> None:
            self._ending.discard(task)
            failed = "it was not cleaned up" if task.cancelled() else task.exception()
            spoilt = task.result() if failed is None else str(failed)
            self.release(worker, project, time.monotonic() - began, spoilt=spoilt)

        task = asyncio.create_task(end)
        self._ending.add(task)
        task.add_done_callback(done)

    def lacks(self, error: UnsupportedError) -> None:
        """The environment has not what this task type needs: no call has to find that out for a while."""
        self._lack = (time.monotonic() + _LACKS_S, error)

    def starved_s(self) -> float:
        """For how long somebody has waited here, where there is no place at all."""
        if not len(self.queue) or self.places:
            return 0.0
        return time.monotonic() - min(ticket.came for ticket in self.queue)

    def serve(self) -> None:
        """Idle places to who waits, in the order of the queue."""
        while len(self.queue):
            worker = self._take_idle()
            if worker is None:
                return
            popped = self.queue.pop()
            while popped is not None and popped[1].given.done():
                popped = self.queue.pop()
            if popped is None:
                self.idle.append(worker)
                return
            self.busy += 1
            popped[1].given.set_result(worker)

    def grow(self) -> None:
        """One for each that waits, but for those who get a place that is about to be free; and those to be kept."""
        while not self._closed and self._wants_more() and self._may_grow(self):
            self.starting += 1
            task = asyncio.create_task(self._add())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def shrink(self, idle_s: float, *, all: bool = False) -> list[asyncio.Task[None]]:
        """Gives up what has been idle for as long, and what is too old; the tasks end when it is gone."""
        now = time.monotonic()
        ends = []
        for worker in [worker for worker in self.idle if self._is_worn(worker) or not worker.alive]:
            self.idle.remove(worker)
            self.retired += 1
            ends.append(worker.close())
        keep = 0 if all else self.config.places_min
        while len(self.idle) > keep and now - self.idle[0].idle_since >= idle_s:
            ends.append(self.idle.popleft().close())
        return ends

    async def drop(self) -> None:
        """Its environment is to go: what is idle, or will be in a moment, is gone then."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        await asyncio.gather(*self.shrink(0.0, all=True), return_exceptions=True)
        self._failure = self._lack = None

    def drop_one(self) -> bool:
        """Room for another pool: the place that has been idle for the longest time."""
        if len(self.idle) <= self.config.places_min or len(self.queue):
            return False
        self.idle.popleft().close()
        return True

    async def check(self) -> None:
        """Asks places that nobody has used for a while how they do, and gives up those that do not do well."""
        now = time.monotonic()
        for worker in [worker for worker in self.idle if now - worker.seen_at >= _CHECK_S]:
            if worker not in self.idle:
                continue
            self.idle.remove(worker)
            self._checking += 1
            fine = False
            try:
                fine = await worker.check()
            finally:
                self._checking -= 1
                if fine and not self._closed:
                    self.idle = deque(sorted([*self.idle, worker], key=lambda known: known.idle_since))
                else:
                    log.warning("a place for calls does not do well", worker=worker.id, type=self.type)
                    self.retired += 1
                    worker.close()
            self.serve()
            self.grow()

    def wait_s(self) -> float:
        """What a call that comes now may have to wait; a guess."""
        return min(_RETRY_S_MAX, max(0.1, len(self.queue) * self._took_s / max(1, self.places)))

    async def close(self) -> None:
        self._closed = True
        for ticket in list(self.queue):
            if not ticket.given.done():
                ticket.given.set_exception(CapacityError("the node is stopping", retry_after_s=1.0))
        for task in [*self._tasks, *self._ending]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._ending, return_exceptions=True)
        while self.idle:
            self.idle.popleft().close()

    # -- inside ------------------------------------------------------------------------------------

    def _is_worn(self, worker: Worker) -> bool:
        return worker.calls >= self.config.calls_max or time.monotonic() - worker.started_at > self.config.age_s_max

    def _wants_more(self) -> bool:
        if self.places >= self.config.places_most:
            return False
        return len(self.queue) > self.starting + len(self._ending) or (
            self.places < self.config.places_min and _now(self._failure) is None and _now(self._lack) is None
        )

    def _take_idle(self) -> Worker | None:
        """The one used last: its pages are warm, and the others may grow old and go."""
        while self.idle:
            worker = self.idle.pop()
            if worker.alive:
                return worker
            self.retired += 1
            worker.close()
        return None

    def _put_back(self, ticket: Ticket) -> None:
        """Of a caller that was given a worker and has gone in the same moment."""
        given = ticket.given
        if given.done() and not given.cancelled() and given.exception() is None:
            self.busy -= 1
            self.idle.append(given.result())
            self.serve()

    def _refuse_if_failing(self) -> None:
        if (lack := _now(self._lack)) is not None:
            raise _again(lack)
        failure = _now(self._failure)
        if failure is not None and not (self.idle or self.busy or self.starting):
            raise _again(failure)

    async def _add(self) -> None:
        try:
            worker = await self._start()
        except DsecError as error:
            self.starting -= 1
            log.warning("a place for calls could not be made", environment=self.name, type=self.type, error=str(error))
            self._failure = (time.monotonic() + _FAILED_S, error)
            if isinstance(error, UnsupportedError):
                self.lacks(error)
            if not self.busy and not self.starting and not self.idle:
                while (popped := self.queue.pop()) is not None:
                    if not popped[1].given.done():
                        popped[1].given.set_exception(_again(error))
            return
        except BaseException:
            self.starting -= 1
            raise
        self.starting -= 1
        self._failure = None
        if self._closed:
            worker.close()
            return
        self.idle.append(worker)
        self.serve()


def _now(failure: tuple[float, DsecError] | None) -> DsecError | None:
    return failure[1] if failure is not None and time.monotonic() < failure[0] else None


def _again(error: DsecError) -> DsecError:
    """The same error for another caller, whose traceback is its own."""
    return type(error)(
        error.message, hint=error.hint, outcome=error.outcome, step=error.step, retry_after_s=error.retry_after_s
    )
