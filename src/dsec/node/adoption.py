"""After a restart: what the journal says of each sandbox, against what is still there. Takes over, or cleans up.

The node serves meanwhile. Listings show every sandbox as the journal has it; who asks for a single one waits until that
one has had its turn, which comes next then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from dsec.backends.base import Backend, Instance, InstanceExit
from dsec.core.errors import DsecError, GoneError, HostError, UnavailableError
from dsec.core.ids import SandboxId
from dsec.core.spec import Substrate
from dsec.core.states import EndCause, SandboxState
from dsec.node.environments import Environments
from dsec.node.registry import Registry
from dsec.node.rows import SandboxRow
from dsec.node.services import Services
from dsec.node.startup import start_again
from dsec.node.supervisor import Supervisor
from dsec.observe.logs import get_logger

log = get_logger(__name__)

_ADOPT_TIMEOUT_S = 60.0
_END_SHOWS_S = 6.0  # a container waits 5 s for its launcher to say how an agent ended


class Adoption:
    def __init__(
        self,
        services: Services,
        registry: Registry,
        backends: Mapping[Substrate, Backend],
        environments: Environments,
        boot_id: str,
    ) -> None:
        self._services = services
        self._registry = registry
        self._backends = backends
        self._environments = environments
        self._boot_id = boot_id
        self._left: OrderedDict[str, Supervisor] = OrderedDict()  # have not had their turn yet, in its order
        self._done: dict[str, asyncio.Future[None]] = {}

    def begin(self) -> None:
        """All are known when it returns: a name stays taken, memory stays promised. The rest goes on beside requests.

        Raises HostError when sandboxes of a substrate that is not offered are there: they must not be forgotten.
        """
        rows = self._services.journal.sandboxes()
        self._check_backends(rows)
        for row in rows:
            sandbox = self._register(row)
            self._left[row.id] = sandbox
            self._done[row.id] = asyncio.get_running_loop().create_future()
        if rows:
            self._services.tasks.spawn(self._all(len(rows)))

    async def settled(self, id: str) -> None:
        """Returns once that sandbox has had its turn, whatever came of it. It is the next to have one.

        Raises UnavailableError when the node stops before.
        """
        done = self._done.get(id)
        if done is None:
            return
        if id in self._left:
            self._left.move_to_end(id, last=False)
        await asyncio.shield(done)

    async def _all(self, found: int) -> None:
        began = self._services.clock.monotonic_s()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(found, self._services.config.adopts_at_once_max)):
                    group.create_task(self._some())
        finally:
            self._give_up()
        took_s = self._services.clock.monotonic_s() - began
        log.info("sandboxes taken over", found=found, live=len(self._registry), took_s=round(took_s, 3))

    def _give_up(self) -> None:
        """The node stops: whoever waits is told so."""
        for done in self._done.values():
            done.set_exception(UnavailableError("the node is stopping", hint="ask again once it is back"))
            done.exception()  # it may be that nobody waits

    async def _some(self) -> None:
        while self._left:
            id, sandbox = self._left.popitem(last=False)
            try:
                await self._one(sandbox)
            except Exception as error:
                log.error("a sandbox could be neither taken over nor ended", sandbox=id, exc_info=error)
            self._done.pop(id).set_result(None)

    def _check_backends(self, rows: list[SandboxRow]) -> None:
        missing = {str(row.spec.substrate) for row in rows if row.spec.substrate not in self._backends}
        if missing:
            raise HostError(
                f"the journal holds sandboxes of {', '.join(sorted(missing))}, which this node does not offer",
                hint="offer it again, and destroy them first",
            )

    def _register(self, row: SandboxRow) -> Supervisor:
        if row.asleep and row.state != SandboxState.DESTROYING:
            # It is on the disk, whatever was about to become of it; the monotonic time of another boot says nothing.
            since = row.paused_monotonic_s if row.boot_id == self._boot_id else None
            row = msgspec.structs.replace(
                row, state=str(SandboxState.PAUSED), boot_id=self._boot_id, paused_monotonic_s=since
            )
        elif row.boot_id != self._boot_id and row.state != SandboxState.DESTROYING:
            # Nothing of it runs any more: a listing must not say that it does.
            row = msgspec.structs.replace(
                row,
                state=str(SandboxState.DESTROYING),
                end_cause=str(EndCause.NODE_REBOOTED),
                end_detail="the machine was started again",
            )
        sandbox = Supervisor(row, backend=self._backends[row.spec.substrate], services=self._services)
        self._registry.add(sandbox)
        return sandbox

    async def _one(self, sandbox: Supervisor) -> None:
        row = sandbox.row
        state = SandboxState(row.state)
        if state is SandboxState.CREATING:
            await sandbox.abandon("the node ended while it was being created")
        elif row.fork is not None and state is not SandboxState.DESTROYING:
            await sandbox.abandon("the node ended before its fork was complete")
        elif state is SandboxState.DESTROYING:
            await _end(sandbox, EndCause(row.end_cause or EndCause.DESTROYED), row.end_detail)
        else:
            await self._adopt(sandbox, row)

    async def _adopt(self, sandbox: Supervisor, row: SandboxRow) -> None:
        instance: Instance | None = None
        try:
            async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                with suppress(DsecError):  # a layer that is gone is still held by its mounts
                    sandbox.hold = await self._environments.hold(row.layers)
                instance = await sandbox.backend.adopt(SandboxId(row.id), row.record)
                await sandbox.take_over(instance)
                await sandbox.drop_leftover()
        except GoneError as error:
            await _end(sandbox, _cause_of(error), error.message)
        except (DsecError, TimeoutError, OSError) as error:
            log.error("a sandbox could not be taken over", sandbox=row.id, exc_info=error)
            ended = await _ended_meanwhile(instance)
            if ended is not None:
                await _end(sandbox, ended.cause, ended.detail)
            else:
                await _end(sandbox, EndCause.PLATFORM_FAILURE, f"it could not be taken over: {error or 'no answer'}")
        else:
            sandbox.arm()
            self._services.egress.reopen(sandbox)
            self._services.links.reopen(sandbox)
            if sandbox.row.main_due_at is not None:  # others do not wait for it to be ready
                self._services.tasks.spawn(_start_again(sandbox, self._services))


async def _start_again(sandbox: Supervisor, services: Services) -> None:
    try:
        await start_again(sandbox, services.journal)
    except DsecError as error:
        log.error("the program of a sandbox that was rolled back does not run", sandbox=sandbox.id, error=str(error))


async def _ended_meanwhile(instance: Instance | None) -> InstanceExit | None:
    """An agent that dies while it is taken over is no failure of ours; it shows as a lost channel first."""
    if instance is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SHOWS_S):
                return await instance.wait()
    return None


async def _end(sandbox: Supervisor, cause: EndCause, detail: str | None) -> None:
    """What cannot be removed now is tried again by the sandbox's supervisor."""
    with suppress(DsecError):
        await sandbox.destroy(cause, detail)


def _cause_of(error: GoneError) -> EndCause:
    told = error.detail.get("cause")
    known = {str(cause): cause for cause in EndCause}
    return known.get(str(told), EndCause.SANDBOX_FAULT)
