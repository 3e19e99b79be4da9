"""The call service of a node: pools by environment and task type, and what goes through them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.backends.fncall.perform import Performed, check_files, perform
from dsec.backends.fncall.pool import Pool
from dsec.backends.fncall.tasks import TaskType, TaskTypes
from dsec.backends.fncall.worker import Launched, Worker
from dsec.core import limits
from dsec.core.errors import CapacityError, EnvironmentNotFoundError, InvalidArgumentError, SandboxFaultError
from dsec.core.references import parse_reference
from dsec.core.spec import Environment
from dsec.observe import metrics
from dsec.wire.calls import CallAnswer, CallPool, CallRequest, TaskTypeInfo

_STARVED_S: Final = 1.0  # without any place, while other pools have all of them: then the next that is free is theirs
_LOOK_S: Final = 5.0  # between two looks for places that nobody needs
_TRIES: Final = 2  # of a call that was not begun with; once more in another place, no oftener

Launch = Callable[[Environment], Awaitable[Launched]]
"""Makes a container for calls. Raises EnvironmentNotFoundError, CapacityError, LaunchError, …; nothing is left then."""


@dataclass(frozen=True, slots=True)
class CallsConfig:
    places_max: int = 2 * (os.cpu_count() or 1)  # containers for calls, of all pools together; 0: no calls
    place_memory_bytes: int = 512 * limits.MIB  # of one, files of calls included
    place_cpu: float = 1.0
    idle_s: float = 300.0  # then a place that nobody used goes
    preload: tuple[str, ...] = ()  # modules that warm interpreters import before the first call
    types: Mapping[str, TaskType] = field(default_factory=dict)  # beside those that are shipped

    def __post_init__(self) -> None:
        if not 0 <= self.places_max <= limits.CALL_PLACES_MAX:
            raise InvalidArgumentError(f"calls.places_max must be between 0 and {limits.CALL_PLACES_MAX}")
        if self.place_memory_bytes < 2 * limits.CALL_MEMORY_BYTES_MIN or self.idle_s <= 0:
            raise InvalidArgumentError("calls.place_memory_bytes is too small, or calls.idle_s is not above 0")
        if not limits.CPU_MIN <= self.place_cpu <= limits.CPU_MAX:
            raise InvalidArgumentError(f"calls.place_cpu must be between {limits.CPU_MIN} and {limits.CPU_MAX:g}")


class Calls:
    """Belongs to the node. `start` before the first call, `close` at the end: all places are gone then."""

    def __init__(self, config: CallsConfig, launch: Launch, program: Callable[[], Path]) -> None:
        """`program` is where `dsec-call` is; it raises HostError."""
        self.types = TaskTypes(config.types)
        self._config = config
        self._launch = launch
        self._program = program
        self._pools: dict[tuple[Environment, str], Pool] = {}
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()

    async def call(self, request: CallRequest, project: str) -> CallAnswer:
        """Raises UnsupportedError (task type, or the environment lacks its toolchain), EnvironmentNotFoundError,
        CapacityError (with `retry_after_s`), SandboxFaultError; nothing has run in each case."""
        type = self.types.get(request.type)
        checker_type = self.types.get(request.checker.type) if request.checker is not None else None
        check_files(request, type)
        pool = self._pool(request.environment, request.type, type, project)
        try:
            return await self._tried(pool, request, project, type, checker_type)
        except EnvironmentNotFoundError:
            if not pool.places and not len(pool.queue):
                self._pools.pop((request.environment, request.type), None)
            raise

    async def _tried(
        self, pool: Pool, request: CallRequest, project: str, type: TaskType, checker_type: TaskType | None
    ) -> CallAnswer:
        came = time.monotonic()
        for left in reversed(range(_TRIES)):
            try:
                async with self._worker(pool, project, request.queue_s) as (worker, outcome):
                    began = time.monotonic()
                    done = await perform(worker, request, type, checker_type)
                    outcome.append(done)
                ended = time.monotonic()
                metrics.CALLS.labels(request.type, done.answer.status).inc()
                return _timed(done.answer, queued_s=began - came, took_s=ended - began)
            except SandboxFaultError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    @property
    def memory_promised_bytes(self) -> int:
        """To the places that there are, and those that are being made."""
        return sum(pool.places for pool in self._pools.values()) * self._config.place_memory_bytes

    def list_types(self) -> list[TaskTypeInfo]:
        return self.types.list()

    def list_pools(self) -> list[CallPool]:
        return [
            CallPool(
                environment=pool.name,
                type=pool.type,
                idle=len(pool.idle),
                busy=pool.busy,
                starting=pool.starting,
                queued=len(pool.queue),
                calls=pool.calls,
                retired=pool.retired,
            )
            for pool in self._pools.values()
        ]

    async def drop(self, names: set[str]) -> None:
        """Environments that are to be removed: idle places of theirs go, and no others come back by themselves.

        By whatever tag or digest they are meant: what goes in vain is made again when it is needed.
        """
        ends = []
        wanted = {parse_reference(name).name for name in names}
        for (environment, _), pool in list(self._pools.items()):
            if {parse_reference(name).name for name in environment.names()} & wanted:
                ends += pool.shrink(0.0)
        await asyncio.gather(*ends, return_exceptions=True)

    # -- inside ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _worker(self, pool: Pool, project: str, wait_s: float) -> AsyncIterator[tuple[Worker, list[Performed]]]:
        worker = await pool.acquire(project, wait_s)
        began = time.monotonic()
        outcome: list[Performed] = []
        try:
            yield worker, outcome
        finally:
            # Whoever leaves without an outcome leaves a call in it, or half of one.
            spoilt = outcome[0].spoilt if outcome else "a call did not come to its end"
            pool.release(worker, project, time.monotonic() - began, spoilt=spoilt)

    def _pool(self, environment: Environment, name: str, type: TaskType, project: str) -> Pool:
        if self._closed or not self._config.places_max:
            raise CapacityError("this node takes no calls", hint="`[calls] places_max` is 0, or it is stopping")
        if sum(len(pool.queue) for pool in self._pools.values()) >= limits.CALLS_QUEUED_MAX:
            wait_s = max((pool.wait_s() for pool in self._pools.values()), default=1.0)
            raise CapacityError(
                f"{limits.CALLS_QUEUED_MAX} calls are waiting", hint="try again later", retry_after_s=wait_s
            )
        if sum(pool.queue.waiting(project) for pool in self._pools.values()) >= limits.CALLS_QUEUED_PER_PROJECT_MAX:
            raise CapacityError(
                f"{limits.CALLS_QUEUED_PER_PROJECT_MAX} calls of this project are waiting",
                hint="try again later",
                retry_after_s=max(pool.wait_s() for pool in self._pools.values()),
            )
        key = (environment, name)
        pool = self._pools.get(key)
        if pool is None:
            self._make_room_for_pool()

            async def start() -> Worker:
                program = await asyncio.to_thread(lambda: self._program().read_bytes())
                return await Worker.start(
                    lambda: self._launch(environment), type, program=program, preload=self._config.preload
                )

            pool = self._pools[key] = Pool("+".join(environment.names()), name, start, self._may_grow, self._starved)
        return pool

    def _make_room_for_pool(self) -> None:
        if len(self._pools) < limits.CALL_POOLS_MAX:
            return
        unused = [(pool.used_at, key) for key, pool in self._pools.items() if pool.unused]
        if not unused:
            raise CapacityError("too many kinds of calls at once", retry_after_s=1.0)
        _, key = min(unused, key=lambda found: found[0])
        self._pools.pop(key).shrink(0.0)

    def _may_grow(self, pool: Pool) -> bool:
        places = sum(other.places for other in self._pools.values())
        if places < self._config.places_max:
            return True
        others = sorted((other for other in self._pools.values() if other is not pool), key=lambda p: p.used_at)
        return any(other.drop_one() for other in others)

    def _starved(self, pool: Pool) -> Pool | None:
        """Whose calls have waited longest of those that have no place, while `pool` gives one back."""
        if sum(other.places for other in self._pools.values()) >= self._config.places_max:
            return None  # there would be no room even so
        found = [(waited, other) for other in self._pools.values() if (waited := other.starved_s()) > _STARVED_S]
        return max(found, key=lambda entry: entry[0])[1] if found else None

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for key, pool in list(self._pools.items()):
                pool.shrink(self._config.idle_s)
                pool.grow()
                unused = time.monotonic() - pool.used_at > self._config.idle_s
                if unused and not pool.places and not len(pool.queue):
                    del self._pools[key]
            metrics.CALL_PLACES.set(sum(pool.places for pool in self._pools.values()))


def _timed(answer: CallAnswer, *, queued_s: float, took_s: float) -> CallAnswer:
    return CallAnswer(
        status=answer.status,
        compile=answer.compile,
        run=answer.run,
        cases=answer.cases,
        files=answer.files,
        missing=answer.missing,
        queued_s=queued_s,
        took_s=took_s,
        worker=answer.worker,
    )
