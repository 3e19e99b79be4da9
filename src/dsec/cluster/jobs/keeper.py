"""Watches the leases of jobs, and sees to it that what was ordered is done everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from dsec.cluster.jobs.orders import KIND_OF, Orders
from dsec.cluster.jobs.table import Jobs, Seen
from dsec.core.clock import Clock
from dsec.core.errors import DsecError
from dsec.observe import metrics
from dsec.observe.logs import get_logger
from dsec.wire.jobs import Because, JobOrderKind, JobRow, JobState, OnMissed

log = get_logger(__name__)

_AT_ONCE: Final = 8  # jobs that are acted on; further ones wait
# An order that a caller gave is carried out by the replica that was asked. After this long it may have died.
_REDO_S: Final = 120.0
_RETRY_S: Final = 10.0
# Creates that were under way when a job was stopped have ended, for all but those of cold environments.
_SWEEP_S: Final = 60.0
_LOOK_S: Final = 1.0


class JobKeeper:
    """One acts, of as many as there are: who calls `look` holds the lease of watchers, or is alone.

    Leases count on this process' clock from when it saw their last beat. While verdicts are frozen (ruling 30), and
    before this process watched, no time counts: a lease ends late then, and never early.
    """

    def __init__(self, jobs: Jobs, orders: Orders, clock: Clock, *, acts: Callable[[], bool] = lambda: True) -> None:
        self._jobs = jobs
        self._orders = orders
        self._clock = clock
        self._acts = acts
        self._counts_from = clock.monotonic_s()
        self._working: dict[str, asyncio.Task[None]] = {}
        self._next_at: dict[str, float] = {}  # of jobs on which something was not done

    async def run(self) -> None:
        """Of a service that is alone, until it is cancelled."""
        try:
            while True:
                try:
                    await self.look()
                except DsecError as error:
                    log.warning("jobs could not be looked at", error=str(error))
                await asyncio.sleep(_LOOK_S)
        finally:
            await self.close()

    async def close(self) -> None:
        """What is under way is left to the next one."""
        tasks = list(self._working.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settled(self) -> None:
        """Returns when nothing is under way."""
        while self._working:
            await asyncio.wait(set(self._working.values()))

    def freeze(self) -> None:
        """Now nothing is missed: the engine is away, or so many nodes are that it must be."""
        self._counts_from = self._clock.monotonic_s()

    async def look(self) -> None:
        """One round. Raises UnavailableError, and then what is not done is for the next one."""
        now = self._clock.monotonic_s()
        known = set()
        for seen in self._jobs.seen():
            known.add(seen.row.id)
            if self._is_missed(seen, now):
                await self._miss(seen.row)
            elif (work := self._work(seen, now)) is not None:
                self._begin(seen.row, work, now)
        for id in self._next_at.keys() - known:
            del self._next_at[id]

    # -- leases ------------------------------------------------------------------------------------

    def _is_missed(self, seen: Seen, now: float) -> bool:
        row = seen.row
        # One that its client has paused stays so, unless it is to be stopped without a client.
        watched = row.state is JobState.RUNNING or (row.state is JobState.PAUSED and row.on_missed is OnMissed.STOP)
        if not watched or row.lease_s is None:
            return False
        due = max(seen.beat_at, self._counts_from) + row.lease_s
        if row.extensions:
            due = max(due, max(seen.extended_at, self._counts_from) + row.extended_s)
        return now >= due + (row.grace_s if row.on_missed is OnMissed.STOP else 0.0)

    async def _miss(self, row: JobRow) -> None:
        state = JobState.STOPPED if row.on_missed is OnMissed.STOP else JobState.PAUSED
        if await self._jobs.missed(row, state):
            log.warning("the lease of a job was missed", job=row.name, project=row.project, state=str(state))
            metrics.JOB_LEASES_MISSED.labels(str(row.on_missed)).inc()

    # -- what is to be done ------------------------------------------------------------------------

    def _work(self, seen: Seen, now: float) -> Callable[[], Coroutine[Any, Any, bool]] | None:
        row = seen.row
        since = max(seen.changed_at, self._counts_from)
        if not row.settled:
            if row.because is Because.ASKED and now < since + _REDO_S:
                return None
            return lambda: self._settle(row)
        if row.state is JobState.STOPPED and not row.swept and now >= since + _SWEEP_S:
            return lambda: self._settle(row, swept=True)
        if (
            row.state is JobState.PAUSED
            and row.because is Because.LEASE
            and not row.graced
            and now >= since + row.grace_s
        ):
            return lambda: self._settle(row, graced=True)
        return None

    async def _settle(self, row: JobRow, *, graced: bool = False, swept: bool = False) -> bool:
        kind = JobOrderKind.STOP_UNPAUSABLE if graced else KIND_OF[row.state]
        done = await self._orders.carry_out(row, kind, going=lambda: self._acts() and self._is_last(row))
        if done:
            await self._jobs.settle(row, graced=graced, swept=swept)
        return done

    def _is_last(self, row: JobRow) -> bool:
        now = self._jobs.known(row.project, row.name)
        return now is not None and (now.id, now.order) == (row.id, row.order)

    def _begin(self, row: JobRow, work: Callable[[], Coroutine[Any, Any, bool]], now: float) -> None:
        if row.id in self._working or len(self._working) >= _AT_ONCE or now < self._next_at.get(row.id, 0.0):
            return
        self._working[row.id] = asyncio.create_task(self._done(row, work), name=f"job {row.name}")

    async def _done(self, row: JobRow, work: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        done = False
        try:
            done = await work()
        except DsecError as error:
            log.info("an order to a job is given again", job=row.name, error=str(error))
        finally:
            del self._working[row.id]
            if not done:
                self._next_at[row.id] = self._clock.monotonic_s() + _RETRY_S
