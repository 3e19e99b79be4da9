"""Spares: instances that are there before anybody asks. A create that finds one of its shape has only to claim it.

Nothing of a caller has ever run in a spare: it is launched, its agent says hello, and both wait. Each is in the journal
from before the host is touched until it is claimed (in one transaction with the sandbox that it becomes) or removed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from dsec.agent.client import AgentClient
from dsec.backends.base import Backend, Instance, InstanceSpec
from dsec.core import limits
from dsec.core.errors import DsecError
from dsec.core.ids import SandboxId, new_sandbox_id
from dsec.core.spec import Substrate
from dsec.node.admission import Room
from dsec.node.demand import Demand, demand_after, demand_later, next_change
from dsec.node.environments import Environments, Hold
from dsec.node.removal import Removal
from dsec.node.rows import SpareRow
from dsec.node.services import Services
from dsec.node.tasks import Tasks
from dsec.observe import metrics
from dsec.observe.logs import get_logger

log = get_logger(__name__)

_Key = tuple[Substrate, bytes]
_Backends = Callable[[Substrate], Backend]

_LAUNCH_S: Final = 60.0
_PAUSE_S_MIN: Final = 0.005
_ANSWER_S: Final = 0.001  # a create's answer goes out before the next look at what is missing
_QUIET_S: Final = 0.05  # after a create its caller uses the sandbox, and would share the machine with a launch
_FAILED_S: Final = 30.0  # after a spare that could not be made
_SLEEP_S_MAX: Final = 3_600.0
_OF_NODE_BYTES: Final = 300 * limits.KIB  # of a spare outside its cgroup: kernel objects, and this process's share


@dataclass(slots=True, eq=False)
class Spare:
    """One instance that waits, with its agent on the line."""

    id: SandboxId
    key: _Key
    instance: Instance
    client: AgentClient
    hold: Hold
    made_at: float
    memory_bytes: int
    watcher: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self.client.channel.failure is None


@dataclass(slots=True)
class _Shelf:
    """The spares of one shape, and what was last asked of it."""

    pattern: InstanceSpec
    spares: deque[Spare] = field(default_factory=deque)
    demand: Demand = field(default_factory=Demand)
    failed_until: float = 0.0


class WarmPool:
    """Belongs to the node; `take` is for whoever creates. Making spares gives way to creates that are under way."""

    def __init__(
        self,
        services: Services,
        backends: _Backends,
        environments: Environments,
        room: Callable[[], Room],
        boot_id: str,
    ) -> None:
        self._services = services
        self._config = services.config.warm
        self._backends = backends
        self._environments = environments
        self._room = room
        self._boot_id = boot_id
        self._shelves: OrderedDict[_Key, _Shelf] = OrderedDict()
        self._changed = asyncio.Event()
        self._making = asyncio.Lock()
        self._tasks = Tasks("the spares")
        self._removal = Removal(services, self._tasks, backends)
        self._creating = 0
        self._quiet_until = 0.0
        self._closed = False

    @property
    def enabled(self) -> bool:
        return self._config.spares_max > 0

    def __len__(self) -> int:
        return sum(len(shelf.spares) for shelf in self._shelves.values())

    @property
    def memory_bytes(self) -> int:
        return sum(spare.memory_bytes for shelf in self._shelves.values() for spare in shelf.spares)

    # -- life --------------------------------------------------------------------------------------

    def discard_left(self) -> None:
        """Spares of an earlier process: nobody has claimed them, and nobody will."""
        for row in self._services.journal.spares():
            self._tasks.spawn(self._removal.discard(row))

    def start(self) -> None:
        if self.enabled:
            self._tasks.spawn(self._run())

    async def close(self) -> None:
        """Removes all of them. One that resists is tried again by the next process."""
        self._closed = self._removal.closed = True
        await self._tasks.settle()
        left = [spare for shelf in self._shelves.values() for spare in shelf.spares]
        self._shelves.clear()
        if left:
            await asyncio.gather(*(self._remove(spare) for spare in left), return_exceptions=True)
        await self._tasks.close()
        self._tell()

    # -- for creates -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A create is under way: it has the machine to itself, as far as we are concerned."""
        self._creating += 1

    def finish(self) -> None:
        self._creating -= 1
        self._quiet_until = self._now() + _QUIET_S
        if not self._creating:
            asyncio.get_running_loop().call_later(_ANSWER_S, self._changed.set)

    async def take(self, backend: Backend, instance: InstanceSpec) -> Spare | None:
        """A live spare that may become `instance`; from now on it is the caller's to claim or to `give_up`."""
        if not self.enabled or not backend.capabilities.warm or self._closed:
            return None
        shape = await backend.shape(instance)
        if shape is None:
            return None
        shelf = self._shelf((instance.spec.substrate, shape), instance)
        spare = self._next_alive(shelf)
        config = self._config
        shelf.demand = demand_after(
            shelf.demand, hit=spare is not None, now=self._now(), low=config.low, high=config.high
        )
        (metrics.WARM_MISSES if spare is None else metrics.WARM_HITS).labels(instance.spec.substrate).inc()
        self._tell()
        return spare

    def give_up(self, spare: Spare) -> None:
        """A spare that was taken and cannot be used. It is removed beside."""
        if not self._closed:
            self._tasks.spawn(self._remove_for_sure(spare), finishes=True)

    def let_go(self, spare: Spare) -> None:
        """A spare that was taken is somebody's sandbox now, or theirs to remove."""
        spare.hold.release()

    # -- for the node ------------------------------------------------------------------------------

    async def drop(self, digests: Collection[str]) -> None:
        """Removes every spare on one of these layers. None comes back before somebody asks for its shape again."""
        async with self._making:
            for key, shelf in list(self._shelves.items()):
                if {layer.digest for layer in shelf.pattern.layers} & set(digests):
                    del self._shelves[key]
                    for spare in shelf.spares:
                        await self._remove_for_sure(spare)
        self._tell()

    async def relieve(self) -> None:
        """Gives memory back when the machine has little left."""
        room = self._room()
        if room.memory_available_bytes < room.memory_available_bytes_min + self._config.memory_bytes_max:
            async with self._making:
                for shelf in self._shelves.values():
                    while shelf.spares:
                        await self._remove_for_sure(shelf.spares.popleft())
            self._tell()

    # -- making ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            if not self._creating or self._next_moment() <= self._now():
                await self._retire()
            wait_s = await self._refill()
            if wait_s > 0:
                await self._sleep_or_changed(wait_s)

    async def _refill(self) -> float:
        """One more where one is missing. Returns how long to wait before the next look."""
        if self._creating:  # the last of them wakes us
            return max(_PAUSE_S_MIN, self._next_moment() - self._now())
        shelf = self._neediest()
        if shelf is None:
            return max(0.0, self._next_moment() - self._now())
        quiet_s = self._quiet_until - self._now()
        if quiet_s > 0 and 2 * len(shelf.spares) >= shelf.demand.wanted:
            return quiet_s
        began = self._now()
        async with self._making:
            await self._make(shelf)
        # As much time for others as for this.
        await self._services.sleep(max(_PAUSE_S_MIN, min(self._now() - began, _FAILED_S)))
        return 0.0

    def _neediest(self) -> _Shelf | None:
        room, config = self._room(), self._config
        if (
            len(self) >= config.spares_max
            or self.memory_bytes >= config.memory_bytes_max
            or room.sandboxes + len(self) >= room.sandboxes_max
            or room.memory_available_bytes < room.memory_available_bytes_min + config.memory_bytes_max
            or room.disk_free_bytes < room.disk_free_bytes_min
        ):
            return None
        lacking = [
            s for s in self._shelves.values() if len(s.spares) < s.demand.wanted and self._now() >= s.failed_until
        ]
        return max(lacking, key=lambda s: s.demand.wanted - len(s.spares), default=None)

    async def _make(self, shelf: _Shelf) -> None:
        key = next((key for key, known in self._shelves.items() if known is shelf), None)
        if key is None or self._closed:
            return
        try:
            spare = await self._launch(key, shelf.pattern)
        except (DsecError, OSError) as error:
            log.warning("a spare could not be made", substrate=str(key[0]), error=str(error))
            metrics.WARM_FAILURES.labels(key[0]).inc()
            shelf.failed_until = self._now() + _FAILED_S
            return
        spare.watcher = self._tasks.spawn(self._watch(spare))
        shelf.spares.append(spare)
        self._tell()

    async def _launch(self, key: _Key, pattern: InstanceSpec) -> Spare:
        backend, journal = self._backends(key[0]), self._services.journal
        id = new_sandbox_id(journal.node_id)
        record = b""

        async def intend(intended: bytes) -> None:
            nonlocal record
            record = intended
            await journal.intend_spare(SpareRow(id=id, substrate=str(key[0]), boot_id=self._boot_id, record=intended))

        hold = await self._environments.hold([layer.digest for layer in pattern.layers])
        client: AgentClient | None = None
        try:
            instance = await backend.create(replace(pattern, id=id), intend=intend, deadline_s=_LAUNCH_S)
            client = await AgentClient.connect(instance.connect, sandbox=id)
            usage = await instance.usage()
        except BaseException:
            if client is not None:
                client.close()
            hold.release()
            if record:
                row = SpareRow(id=id, substrate=str(key[0]), boot_id=self._boot_id, record=record)
                self._tasks.spawn(self._removal.discard(row), finishes=True)
            raise
        memory_bytes = (usage.memory_bytes or 0) + _OF_NODE_BYTES
        return Spare(id, key, instance, client, hold, self._now(), memory_bytes)

    # -- ending ------------------------------------------------------------------------------------

    async def _watch(self, spare: Spare) -> None:
        """One that dies is never handed out; another takes its place."""
        ended = await spare.instance.wait()
        shelf = self._shelves.get(spare.key)
        if shelf is not None and spare in shelf.spares:
            log.warning("a spare has ended", spare=spare.id, cause=str(ended.cause), detail=ended.detail)
            shelf.spares.remove(spare)
            spare.watcher = None
            self._tell()
            self._changed.set()
            await self._remove_for_sure(spare)

    async def _retire(self) -> None:
        """What is too old, and what nobody wants any more."""
        config, now = self._config, self._now()
        for key, shelf in list(self._shelves.items()):
            shelf.demand = demand_later(shelf.demand, now=now, low=config.low, idle_s=config.idle_s)
            while shelf.spares and (
                len(shelf.spares) > shelf.demand.wanted or now - shelf.spares[0].made_at >= config.age_s_max
            ):
                await self._remove_for_sure(shelf.spares.popleft())
            if not shelf.demand.asked and not shelf.spares:
                self._shelves.pop(key, None)
        self._tell()

    def _next_moment(self) -> float:
        config = self._config
        moments = [self._now() + _SLEEP_S_MAX]
        for shelf in self._shelves.values():
            moments.append(next_change(shelf.demand, low=config.low, idle_s=config.idle_s))
            if shelf.failed_until > self._now():
                moments.append(shelf.failed_until)
            if shelf.spares:
                moments.append(shelf.spares[0].made_at + config.age_s_max)
        return min(moments)

    async def _remove_for_sure(self, spare: Spare) -> None:
        self._leave(spare)
        await self._removal.until_done(spare.instance.destroy, spare.id)

    async def _remove(self, spare: Spare) -> None:
        self._leave(spare)
        await spare.instance.destroy()
        await self._services.journal.forget_spare(spare.id)

    def _leave(self, spare: Spare) -> None:
        if spare.watcher is not None and spare.watcher is not asyncio.current_task():
            spare.watcher.cancel()
        spare.watcher = None
        spare.client.close()
        spare.hold.release()

    # -- small things ------------------------------------------------------------------------------

    def _shelf(self, key: _Key, instance: InstanceSpec) -> _Shelf:
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(_pattern(instance))
            self._forget_least_used()
        else:
            shelf.pattern = _pattern(instance)
        self._shelves.move_to_end(key)
        return shelf

    def _forget_least_used(self) -> None:
        """Shapes that come once each must not add up: those without spares go first, in the order of their last use."""
        while len(self._shelves) > limits.WARM_SHAPES_MAX:
            bare = next((key for key, shelf in self._shelves.items() if not shelf.spares), None)
            key = bare if bare is not None else next(iter(self._shelves))
            for spare in self._shelves.pop(key).spares:
                self.give_up(spare)

    def _next_alive(self, shelf: _Shelf) -> Spare | None:
        while shelf.spares:
            spare = shelf.spares.popleft()
            if spare.alive:
                if spare.watcher is not None:
                    spare.watcher.cancel()
                    spare.watcher = None
                return spare
            self.give_up(spare)
        return None

    def _now(self) -> float:
        return self._services.clock.monotonic_s()

    def _tell(self) -> None:
        sizes: dict[Substrate, int] = {}
        for key, shelf in self._shelves.items():
            sizes[key[0]] = sizes.get(key[0], 0) + len(shelf.spares)
        for substrate in self._services.config.substrates:
            metrics.WARM_SPARES.labels(substrate).set(sizes.get(substrate, 0))

    async def _sleep_or_changed(self, wait_s: float) -> None:
        waits = {
            asyncio.ensure_future(self._services.sleep(min(wait_s, _SLEEP_S_MAX))),
            asyncio.ensure_future(self._changed.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _pattern(instance: InstanceSpec) -> InstanceSpec:
    """As `instance`, for nobody: whose variables and names these were is nobody else's business."""
    nobody = msgspec.structs.replace(instance.spec, name=None, labels={}, env={}, user=None, workdir=None)
    return replace(instance, spec=nobody, env={}, user=None, workdir=None, spare=True)
