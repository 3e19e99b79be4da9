"""After a restart: what the journal says of each sandbox, against what is still there. Takes over, or cleans up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from dsec.backends.base import Backend
from dsec.core.errors import DsecError, GoneError, HostError
from dsec.core.ids import SandboxId
from dsec.core.spec import Substrate
from dsec.core.states import EndCause, SandboxState
from dsec.node.environments import Environments
from dsec.node.registry import Registry
from dsec.node.rows import SandboxRow
from dsec.node.services import Services
from dsec.node.supervisor import Supervisor
from dsec.observe.logs import get_logger

log = get_logger(__name__)

_ADOPT_TIMEOUT_S = 60.0


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
        self._turn = asyncio.Semaphore(services.config.adopts_at_once_max)

    async def run(self) -> None:
        """Raises HostError when sandboxes of a substrate that is not offered are there: they must not be forgotten."""
        rows = self._services.journal.sandboxes()
        self._check_backends(rows)
        # All are known before any is waited for: a listing shows them, and a name stays taken.
        taken = [(self._register(row), row) for row in rows]
        async with asyncio.TaskGroup() as group:
            for sandbox, row in taken:
                group.create_task(self._one(sandbox, row))
        if rows:
            log.info("sandboxes taken over", found=len(rows), live=len(self._registry))

    def _check_backends(self, rows: list[SandboxRow]) -> None:
        missing = {str(row.spec.substrate) for row in rows if row.spec.substrate not in self._backends}
        if missing:
            raise HostError(
                f"the journal holds sandboxes of {', '.join(sorted(missing))}, which this node does not offer",
                hint="offer it again, and destroy them first",
            )

    def _register(self, row: SandboxRow) -> Supervisor:
        sandbox = Supervisor(row, backend=self._backends[row.spec.substrate], services=self._services)
        self._registry.add(sandbox)
        return sandbox

    async def _one(self, sandbox: Supervisor, row: SandboxRow) -> None:
        async with self._turn:
            state = SandboxState(row.state)
            if row.boot_id != self._boot_id:
                await _end(sandbox, EndCause.NODE_REBOOTED, "the machine was started again")
            elif state is SandboxState.CREATING:
                await sandbox.abandon("the node ended while it was being created")
            elif state is SandboxState.DESTROYING:
                await _end(sandbox, EndCause(row.end_cause or EndCause.DESTROYED), row.end_detail)
            else:
                await self._adopt(sandbox, row)

    async def _adopt(self, sandbox: Supervisor, row: SandboxRow) -> None:
        try:
            async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                with suppress(DsecError):  # a layer that is gone is still held by its mounts
                    sandbox.hold = await self._environments.hold(row.layers)
                instance = await sandbox.backend.adopt(SandboxId(row.id), row.record)
                await sandbox.take_over(instance)
        except GoneError as error:
            await _end(sandbox, _cause_of(error), error.message)
        except (DsecError, TimeoutError, OSError) as error:
            log.error("a sandbox could not be taken over", sandbox=row.id, exc_info=error)
            await _end(sandbox, EndCause.PLATFORM_FAILURE, f"it could not be taken over: {error or 'no answer'}")
        else:
            sandbox.arm()


async def _end(sandbox: Supervisor, cause: EndCause, detail: str | None) -> None:
    """What cannot be removed now is tried again by the sandbox's supervisor."""
    with suppress(DsecError):
        await sandbox.destroy(cause, detail)


def _cause_of(error: GoneError) -> EndCause:
    told = error.detail.get("cause")
    known = {str(cause): cause for cause in EndCause}
    return known.get(str(told), EndCause.SANDBOX_FAULT)
