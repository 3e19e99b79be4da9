"""A sandbox goes back to a snapshot and stays the same sandbox: its id, name, limits and records.

A second instance is made first, as a spare, on the snapshot's layers. When it answers, one write makes it the
sandbox's, and the one before is removed. Whoever dies in between leaves the one or the other; the journal says which.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Final

import msgspec

from dsec.agent.client import AgentClient
from dsec.backends.base import Instance, InstanceSpec, Keeps
from dsec.core import limits
from dsec.core.errors import DsecError, LaunchError, SandboxStateError, UnsupportedError
from dsec.core.ids import SandboxId, new_sandbox_id
from dsec.core.states import SandboxState
from dsec.node.creation import claimed
from dsec.node.environments import Environments, Resolved
from dsec.node.lifetime import resumed_row
from dsec.node.origins import Origin
from dsec.node.rights import project_seen
from dsec.node.rows import ImageRow, SandboxRow, SpareRow
from dsec.node.services import Services
from dsec.node.snapshots import Snapshots
from dsec.node.startup import main_request, start_again
from dsec.node.supervisor import Supervisor
from dsec.node.tasks import result_of
from dsec.observe.logs import get_logger
from dsec.wire.node import Caller

log = get_logger(__name__)

_LAUNCH_S: Final = 60.0
_RETRY_S: Final = 0.5


class Rollbacks:
    def __init__(self, services: Services, environments: Environments, snapshots: Snapshots, boot_id: str) -> None:
        self._services = services
        self._environments = environments
        self._snapshots = snapshots
        self._boot_id = boot_id

    async def roll_back(self, sandbox: Supervisor, reference: str, caller: Caller) -> None:
        """Ends all that runs in it. To its end, whatever becomes of who asked.

        Raises NotFoundError, UnsupportedError, SandboxStateError (a snapshot of it is being made), GoneError,
        LaunchError or StorageError: then it is as it was, and goes on. With the steps `start` and `ready` a LaunchError
        says that it was rolled back, and that the program that it was created with does not run.
        """
        able = sandbox.backend.capabilities
        if able.snapshot is Keeps.NOTHING or not able.warm:
            raise UnsupportedError(f"{sandbox.row.spec.substrate} sandboxes on this node cannot be rolled back")
        if any(not volume.readonly and not volume.dataset for volume in sandbox.row.spec.volumes):
            raise UnsupportedError(
                "a sandbox that writes to a volume cannot be rolled back: for a moment there would be two of it",
                hint="destroy it, and create one from the snapshot",
            )
        origin = self._snapshots.origin(reference, project=project_seen(caller), own=caller.project)
        if origin.spec.substrate != sandbox.row.spec.substrate:
            raise UnsupportedError(
                f"a {sandbox.row.spec.substrate} sandbox cannot go back to a snapshot of a "
                f"{origin.spec.substrate} sandbox"
            )
        work = self._roll_back(sandbox, origin)
        await result_of(self._services.tasks.spawn(work, awaited=True, finishes=True))

    async def _roll_back(self, sandbox: Supervisor, origin: Origin) -> None:
        with sandbox.changing_disk("it is being rolled back"):
            await sandbox.present_instance()
            with self._snapshots.keeping(origin.snapshot):
                resolved = await origin.acquire(self._environments)
                try:
                    main_request(sandbox.id, sandbox.row.spec, resolved)  # nothing to run: nothing is changed
                    await self._replace(sandbox, origin, resolved)
                except BaseException:
                    resolved.hold.release()
                    raise
            log.info("sandbox rolled back", sandbox=sandbox.id, snapshot=origin.snapshot)
            await start_again(sandbox, self._services.journal)

    async def _replace(self, sandbox: Supervisor, origin: Origin, resolved: Resolved) -> None:
        row = _row_after(sandbox.row, origin, resolved)
        node = self._services.journal.node_id
        wanted = InstanceSpec(
            id=SandboxId(row.id),
            node=node,
            spec=row.spec,
            layers=resolved.layers,
            env={**resolved.env, **row.spec.env},
            user=row.user,
            workdir=row.workdir,
            machine=origin.machine,
        )
        if row.spec.volumes:
            wanted = replace(wanted, volumes=await self._services.volumes.sources(row.spec, row.project))
        spare = replace(wanted, id=new_sandbox_id(node), spare=True, env={}, user=None, workdir=None)
        record = SpareRow(id=spare.id, substrate=str(row.spec.substrate), boot_id=self._boot_id, record=b"")

        async def intend(intended: bytes) -> None:
            nonlocal record
            record = msgspec.structs.replace(record, record=intended)
            await self._services.journal.intend_spare(record)

        client: AgentClient | None = None
        try:
            instance = await sandbox.backend.create(spare, intend=intend, deadline_s=_LAUNCH_S)
            client = await AgentClient.connect(instance.connect, sandbox=spare.id)
            opened = client

            async def act() -> None:
                await self._swap(sandbox, instance, opened, wanted, origin, resolved)

            await sandbox.serially(act)
        except BaseException as error:
            if any(row.id == spare.id for row in self._services.journal.spares()):  # it has not become the sandbox's
                if client is not None:
                    client.close()
                await self._discard(sandbox, record)
            if isinstance(error, LaunchError):
                error.sandbox = sandbox.id
            raise

    async def _swap(
        self,
        sandbox: Supervisor,
        instance: Instance,
        client: AgentClient,
        wanted: InstanceSpec,
        origin: Origin,
        resolved: Resolved,
    ) -> None:
        sandbox.check_alive()
        if sandbox.state not in (SandboxState.RUNNING, SandboxState.PAUSED):
            raise SandboxStateError(f"the sandbox is {sandbox.row.state}", sandbox=sandbox.id)
        spare = instance.id
        became = await claimed(instance, client, sandbox.backend, wanted)
        row = _row_after(sandbox.row, origin, resolved)
        if row.spec.start and not origin.machine:  # in a machine it goes on
            row = msgspec.structs.replace(row, main_due_at=self._services.clock.wall_s())
        if sandbox.state is SandboxState.PAUSED:
            row, _ = resumed_row(row, sandbox.lifetime, self._services.clock.monotonic_s())
        before = await sandbox.replace_instance(became, client, row, spare=spare, hold=resolved.hold)
        self._services.egress.reopen(sandbox)
        self._services.links.reopen(sandbox)
        self._services.tasks.spawn(self._drop(sandbox, before))

    async def _drop(self, sandbox: Supervisor, before: Instance) -> None:
        """Again and again until nothing is left of it; the journal has it, should this process end before."""
        retry_s = _RETRY_S
        while not sandbox.ended:
            try:
                await before.destroy()
                await sandbox.drop_leftover()
                return
            except DsecError as error:
                log.warning("what a rollback has left cannot be removed yet", sandbox=sandbox.id, error=str(error))
            await self._services.sleep(retry_s)
            retry_s = min(retry_s * 2, limits.DESTROY_RETRY_S_MAX)

    async def _discard(self, sandbox: Supervisor, row: SpareRow) -> None:
        """What cannot be removed now is by the next process: the journal knows it."""
        if not row.record:
            return
        with suppress(DsecError):
            await asyncio.shield(self._remove(sandbox, row))

    async def _remove(self, sandbox: Supervisor, row: SpareRow) -> None:
        await sandbox.backend.discard(SandboxId(row.id), row.record)
        await self._services.journal.forget_spare(row.id)


def _row_after(row: SandboxRow, origin: Origin, resolved: Resolved) -> SandboxRow:
    return msgspec.structs.replace(
        row,
        state=str(SandboxState.RUNNING),
        layers=tuple(layer.digest for layer in resolved.layers),
        image=ImageRow(resolved.env, resolved.entrypoint, resolved.command),
        user=row.spec.user if row.spec.user is not None else resolved.user,
        workdir=row.spec.workdir if row.spec.workdir is not None else resolved.workdir,
        snapshot=origin.snapshot,
        base=origin.base,
        incarnation=row.incarnation + 1,
        agent_boot_id="",
    )
