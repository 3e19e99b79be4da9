"""The call service of a node: pools by environment and task type, and what goes through them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.fncall.config import CallsConfig, PoolConfig
from dsec.backends.fncall.perform import Performed, check_files, perform
from dsec.backends.fncall.pool import Pool
from dsec.backends.fncall.tasks import TaskType, TaskTypes
from dsec.backends.fncall.worker import Launched, Worker
from dsec.core import limits
from dsec.core.errors import CapacityError, EnvironmentNotFoundError, SandboxFaultError
from dsec.core.references import parse_reference
from dsec.core.spec import Environment
from dsec.observe import metrics
from dsec.wire.calls import CallAnswer, CallPool, CallRequest, TaskTypeInfo
from dsec.wire.node import team_of

_STARVED_S: Final = 1.0  # without any place, while other pools have all of them: then the next that is free is theirs
_LOOK_S: Final = 5.0  # between two looks for places that nobody needs
_TRIES: Final = 2  # of a call that was not begun with; once more in another place, no oftener

Launch = Callable[[Environment, PoolConfig], Awaitable[Launched]]
"""A container for a pool. Raises EnvironmentNotFoundError, CapacityError, LaunchError, …; nothing is left then."""


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
        for config in self._config.pools:
            if config.places_min and config.environment is not None and config.type is not None:
                self._find_pool(Environment(config.environment), config.type).grow()
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
        project = team_of(project)  # whoever manages one makes as many below it as they like
        self._refuse_too_many(project)
        pool = self._find_pool(request.environment, request.type)
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
            worker = await pool.acquire(project, max(0.0, request.queue_s - (time.monotonic() - came)))
            began = time.monotonic()
            done: Performed | None = None
            try:
                done = await perform(worker, request, type, checker_type)
            except SandboxFaultError:
                if not left:
                    raise
                continue
            finally:
                if done is None:
                    # A call is left in it, or half of one.
                    spoilt = "a call did not come to its end"
                    pool.release(worker, project, time.monotonic() - began, spoilt=spoilt)
            ended = time.monotonic()
            pool.release_after(worker, project, began, done.end)
            if done.lacks is not None:
                if done.for_all:
                    pool.lacks(done.lacks)
                raise done.lacks
            metrics.CALLS.labels(request.type, done.answer.status).inc()
            return msgspec.structs.replace(done.answer, queued_s=began - came, took_s=ended - began)
        raise AssertionError("unreachable")

    @property
    def memory_promised_bytes(self) -> int:
        """To the places that there are, and those that are being made."""
        return sum(pool.places * pool.config.place_memory_bytes for pool in self._pools.values())

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
        wanted = {parse_reference(name).name for name in names}
        found = [
            pool
            for (environment, _), pool in self._pools.items()
            if {parse_reference(name).name for name in environment.names()} & wanted
        ]
        await asyncio.gather(*(pool.drop() for pool in found))

    # -- inside ------------------------------------------------------------------------------------

    def _refuse_too_many(self, project: str) -> None:
        if self._closed or not self._config.places_max:
            raise CapacityError("this node takes no calls", hint="`[calls] places_max` is 0, or it is stopping")
        if sum(len(pool.queue) for pool in self._pools.values()) >= limits.CALLS_QUEUED_MAX:
            wait_s = max((pool.wait_s() for pool in self._pools.values()), default=1.0)
            raise CapacityError(
                f"{limits.CALLS_QUEUED_MAX} calls are waiting", hint="try again later", retry_after_s=wait_s
            )
        if sum(pool.queue.waiting(project) for pool in self._pools.values()) >= limits.CALLS_QUEUED_PER_PROJECT_MAX:
            raise CapacityError(
                f"{limits.CALLS_QUEUED_PER_PROJECT_MAX} calls of {project} and the projects below it are waiting",
                hint="try again later",
                retry_after_s=max(pool.wait_s() for pool in self._pools.values()),
            )

    def _find_pool(self, environment: Environment, name: str) -> Pool:
        key = (environment, name)
        if (pool := self._pools.get(key)) is not None:
            return pool
        self._make_room_for_pool()
        type = self.types.get(name)
        config = self._config.pool(environment.names(), name)

        async def start() -> Worker:
            program = await asyncio.to_thread(lambda: self._program().read_bytes())
            return await Worker.start(
                lambda: self._launch(environment, config), type, program=program, preload=config.preload
            )

        pool = Pool("+".join(environment.names()), name, start, self._may_grow, self._starved, config)
        self._pools[key] = pool
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
        others = [other for other in self._pools.values() if other is not pool]
        found = [(waited, other) for other in others if (waited := other.starved_s()) > _STARVED_S]
        return max(found, key=lambda entry: entry[0])[1] if found else None

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for key, pool in list(self._pools.items()):
                pool.shrink(self._config.idle_s)
                pool.grow()
                await pool.check()
                unused = time.monotonic() - pool.used_at > self._config.idle_s
                if unused and pool.unused and not pool.places:
                    self._pools.pop(key, None)
            metrics.CALL_PLACES.set(sum(pool.places for pool in self._pools.values()))
