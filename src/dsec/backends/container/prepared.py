"""Containers made ahead as far as that goes without knowing what will run: cgroups, ids, namespaces, `/dev`, `/proc`.

A create takes one, and only has to make its tree and start its agent. They hold no layer and no agent, so one fits
nearly every create, and they cost little; the launcher drops them with the node's connection. They are made when no
create has been under way for a moment, for the shapes of the last creates.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from dsec.backends.container.launcher import Launcher, LauncherRefusal
from dsec.backends.container.record import record_of
from dsec.core.errors import DsecError
from dsec.observe.logs import get_logger
from dsec.security.idranges import IdRanges
from dsec.wire.launch import LaunchOp, LaunchPlan
from dsec.wire.node import Done

log = get_logger(__name__)

_QUIET_S: Final = 0.05  # after a create its caller uses the sandbox, and would share the machine with this
_FAILED_S: Final = 30.0  # after one that could not be made
_REMOVE_S: Final = 20.0
_UNUSED_MAX: Final = 4  # that others replace, beyond those that were of use: what comes next cannot be told then
_UNUSED_S: Final = 30.0  # before others are replaced again

# Of whoever asked last nothing is in what is made for the next.
_OF_NOBODY: Final[dict[str, Any]] = {
    "lowers": [],
    "hostname": "prepared",
    "etc_files": [],
    "env": {},
    "user": None,
    "workdir": None,
    "view": None,
    "volumes": [],
    "devices": [],
    "binds": [],
    "named": "",
}

Named = Callable[[LaunchPlan], LaunchPlan]


class PreparedContainers:
    """Those of one node. `named` gives a plan the names of a new one, without ids."""

    def __init__(self, wanted: int, *, named: Named, ids: IdRanges, launcher: Launcher, boot_id: str) -> None:
        self._wanted = wanted
        self._named = named
        self._ids = ids
        self._launcher = launcher
        self._boot_id = boot_id
        self._ready: deque[tuple[int, LaunchPlan]] = deque()  # with the connection that has asked for it
        self._asked: deque[LaunchPlan] = deque(maxlen=max(wanted, 1))  # what the last creates were of
        self._unused = 0
        self._unused_until = 0.0
        self._creating = 0
        self._filling: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._failed_until = 0.0
        self._closed = False
        self.is_known = False  # whether the launcher that runs makes any; one of before may not

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(plan.sandbox for _, plan in self._ready)

    # -- for creates -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A create is under way, and has the machine to itself."""
        self._creating += 1
        if self._filling is not None:
            self._filling.cancel()
            self._filling = None

    def finish(self, plan: LaunchPlan | None) -> None:
        """It is over; it was of `plan`, if it came as far. What is missing is made later."""
        self._creating -= 1
        if plan is not None and _is_plain(plan):
            self._asked.append(msgspec.structs.replace(plan, **_OF_NOBODY))
        wanted = self._asked and self._wanted and self.is_known
        if wanted and not self._creating and not self._closed:
            self._filling = asyncio.get_running_loop().create_task(self._fill())

    def take(self, plan: LaunchPlan) -> LaunchPlan | None:
        """The plan under the names and ids of one that serves for it, which is the caller's from now on."""
        if not _is_plain(plan) or not self.is_known:
            return None  # what waits may serve the next
        self._drop_ended()
        for waiting in self._ready:
            made = waiting[1]
            if serves(made, plan):
                self._ready.remove(waiting)
                self._unused = max(0, self._unused - 1)
                return _under_names_of(made, plan)
        return None

    def give_up(self, plan: LaunchPlan) -> None:
        """One that was taken and not launched."""
        self._remove_later(plan)

    async def give_way(self) -> bool:
        """When others need the ids: none is there any more, nor made for a while. True if there were any."""
        self._failed_until = asyncio.get_running_loop().time() + _FAILED_S
        removals = [self._remove_later(self._ready.popleft()[1]) for _ in range(len(self._ready))]
        if removals:
            await asyncio.wait(removals)
        return bool(removals)

    # -- making ------------------------------------------------------------------------------------

    async def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(_QUIET_S, self._failed_until - loop.time()))
        self._drop_ended()
        while True:
            pattern, unused = self._compare()
            if pattern is None or (len(self._ready) >= self._wanted and not self._replace(unused[0])):
                return
            # Not to be cut short: what the launcher has been told must be known here.
            try:
                await asyncio.shield(self._track(self._make(pattern)))
            except (DsecError, LauncherRefusal) as error:
                self._failed_until = loop.time() + _FAILED_S
                log.warning("a container could not be prepared", error=str(error))
                return
            await asyncio.sleep(_QUIET_S / 10)  # others have their turn

    def _compare(self) -> tuple[LaunchPlan | None, list[tuple[int, LaunchPlan]]]:
        """What the newest create was of for which nothing waits, if the next are of what the last were; and those that
        wait for none of these, the oldest first."""
        asked = [*reversed(self._asked)]
        others, missing = list(self._ready), None
        for pattern in asked + asked[:1] * (self._wanted - len(asked)):
            found = next((waiting for waiting in others if serves(waiting[1], pattern)), None)
            if found is not None:
                others.remove(found)
            elif missing is None:
                missing = pattern
        return missing, others

    def _replace(self, unused: tuple[int, LaunchPlan]) -> bool:
        """Makes room by one that waits for nobody. False when it should stay: others would have no more use."""
        now = asyncio.get_running_loop().time()
        if self._unused >= _UNUSED_MAX:
            if now < self._unused_until:
                return False
            self._unused = 0
        self._unused += 1
        self._unused_until = now + _UNUSED_S
        self._ready.remove(unused)
        self._remove_later(unused[1])
        return True

    def _drop_ended(self) -> None:
        """Those whose launcher, or the connection to it, has gone."""
        for connection, made in [waiting for waiting in self._ready if not self._lives(waiting[0])]:
            self._ready.remove((connection, made))
            self._remove_later(made)

    async def _make(self, pattern: LaunchPlan) -> None:
        plan = self._named(pattern)
        id_base = self._ids.take(plan.cgroup2 or next(iter(plan.cgroup1.values())))
        plan = msgspec.structs.replace(plan, id_base=id_base, **_OF_NOBODY)
        try:
            await self._launcher.request(LaunchOp.PREPARE, plan, Done)
        except BaseException:
            self._remove_later(plan)
            raise
        if self._closed:
            self._remove_later(plan)
        else:
            self._ready.append((self._launcher.connection, plan))

    # -- ending ------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Removes all of them."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
        # Those of a launcher that is gone have ended with it: none is started for that.
        left = [plan for connection, plan in self._ready if self._lives(connection)]
        self._ready.clear()
        for plan in left:
            self._remove_later(plan)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REMOVE_S):
                while self._under_way:  # one that is just being made is removed after that
                    await asyncio.wait(self._under_way)

    def _lives(self, connection: int) -> bool:
        """What was asked for by that one waits still."""
        return self._launcher.is_connected and connection == self._launcher.connection

    def _remove_later(self, plan: LaunchPlan) -> asyncio.Task[None]:
        return self._track(self._remove(plan))

    def _track(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """It goes on whatever becomes of who waits for it; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _remove(self, plan: LaunchPlan) -> None:
        """Its ids are given back once nothing of it is left. What resists goes with the node's next start."""
        try:
            args = record_of(plan, self._boot_id).destroy_args()
            await self._launcher.request(LaunchOp.DESTROY, args, Done, timeout_s=_REMOVE_S)
        except (DsecError, LauncherRefusal) as error:
            log.warning("a prepared container could not be removed", name=plan.sandbox, error=str(error))
            return
        self._ids.give_back(plan.id_base)


def serves(made: LaunchPlan, wanted: LaunchPlan) -> bool:
    """Whether what was made for one plan serves for another under the same names; limits are written again.

    As the launcher's own `serves`, which decides (native/launch/src/prepare.rs).
    """
    return (
        _is_plain(wanted)
        and set(made.cgroup2_files) == set(wanted.cgroup2_files)
        and {c: set(files) for c, files in made.cgroup1_files.items()}
        == {c: set(files) for c, files in wanted.cgroup1_files.items()}
        and set(made.sysctls) == set(wanted.sysctls)
        and made.masks == wanted.masks
        and made.readonly_proc == wanted.readonly_proc
        and made.shm_bytes == wanted.shm_bytes
        and made.filter_agent == wanted.filter_agent
    )


def _is_plain(plan: LaunchPlan) -> bool:
    return not plan.light and not plan.cgroup1_from and plan.upper_tmpfs_bytes is None and plan.upper_device is None


def _under_names_of(made: LaunchPlan, plan: LaunchPlan) -> LaunchPlan:
    return msgspec.structs.replace(
        plan,
        sandbox=made.sandbox,
        named=plan.sandbox,
        id_base=made.id_base,
        directory=made.directory,
        socket=made.socket,
        cgroup2=made.cgroup2,
        cgroup1=made.cgroup1,
    )
