"""Several sandboxes on what one has now: all of them, or none.

It is captured once, as for a snapshot that has no name; the layer, or the machine, stays for as long as one of them
lives.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress

import msgspec

from dsec.backends.base import Keeps
from dsec.core.errors import DsecError, SandboxError, UnsupportedError
from dsec.core.ids import new_snapshot_id
from dsec.core.spec import SandboxSpec
from dsec.core.states import SandboxState
from dsec.node.creation import Creation
from dsec.node.once import Once
from dsec.node.origins import Origin, origin_of_fork
from dsec.node.registry import Registry
from dsec.node.rows import KeyRow
from dsec.node.services import Services
from dsec.node.snapshots import Snapshots
from dsec.node.supervisor import Supervisor
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack
from dsec.wire.node import Caller
from dsec.wire.plans import CreatePlan
from dsec.wire.records import CreateRequest, Sandbox
from dsec.wire.snapshots import ForkRequest

log = get_logger(__name__)


class Forks:
    def __init__(self, services: Services, registry: Registry, creation: Creation, snapshots: Snapshots) -> None:
        self._services = services
        self._registry = registry
        self._creation = creation
        self._snapshots = snapshots
        self._once: Once[list[Sandbox]] = Once(services.tasks, "fork")

    async def fork(self, sandbox: Supervisor, request: ForkRequest, caller: Caller, key: str | None) -> list[Sandbox]:
        """Raises what a snapshot raises, and then what a create raises: none of them is left then."""
        if sandbox.backend.capabilities.fork is Keeps.NOTHING:
            raise UnsupportedError(f"{sandbox.row.spec.substrate} sandboxes on this node cannot be forked")
        hash = hashlib.sha256(pack((sandbox.id, request))).digest()
        if key is None:
            return await self._once.alone(self._fork(sandbox, request, caller, None, b""))
        scope = (sandbox.row.project, key)
        return await self._once.done(
            scope,
            hash,
            lambda: self._fork(sandbox, request, caller, key, hash),
            lambda: self._known(scope, request.count, hash),
        )

    async def plan(self, sandbox: Supervisor, request: ForkRequest, key: str | None) -> CreatePlan:
        """What each of the children would be. Raises IdempotencyError."""
        hash = hashlib.sha256(pack((sandbox.id, request))).digest()
        row = sandbox.row
        known = key is not None and self._known((row.project, key), request.count, hash) is not None
        origin = origin_of_fork(row, row.layers)
        spec = origin.spec_for(SandboxSpec(environment=row.spec.environment, job=row.spec.job, job_id=row.spec.job_id))
        return await self._creation.plan_of(spec, row.project, origin, known=known)

    def _known(self, scope: tuple[str, str], count: int, hash: bytes) -> list[Sandbox] | None:
        """What the same request gave before, also of those that have ended since."""
        project, key = scope
        found: list[Sandbox] = []
        for index in range(count):
            row = self._services.journal.key(project, _key_of(key, index))
            if row is None:
                return None
            if row.request_hash != hash:
                raise self._once.mismatch(key)
            live, buried = self._registry.find(row.sandbox), self._services.journal.tombstone(row.sandbox)
            if live is not None:
                found.append(live.view())
            elif buried is not None:
                found.append(buried.sandbox)
        return found

    async def _fork(
        self, sandbox: Supervisor, request: ForkRequest, caller: Caller, key: str | None, hash: bytes
    ) -> list[Sandbox]:
        caller = msgspec.structs.replace(caller, project=sandbox.row.project)
        captured = await self._snapshots.capture(sandbox)
        try:
            origin = origin_of_fork(sandbox.row, captured.layers, captured.made.machine)
            with self._snapshots.keeping(origin.snapshot):
                made = await self._make_all(origin, request, caller)
        except BaseException:
            self._services.collect()
            raise
        finally:
            captured.hold.release()
        try:
            await self._settle(made, caller.project, key, hash)
        except BaseException:
            await self._undo(made)
            raise
        log.info("sandbox forked", sandbox=sandbox.id, count=len(made), frozen_ms=round(captured.frozen_ms, 1))
        return [child.view() for child in made]

    async def _make_all(self, origin: Origin, request: ForkRequest, caller: Caller) -> list[Supervisor]:
        fork = new_snapshot_id()
        # What a job's sandbox is forked into is of the job, too: it ends with it.
        spec = SandboxSpec(environment=origin.spec.environment, job=origin.spec.job, job_id=origin.spec.job_id)
        asked = CreateRequest(spec=spec, timeout_s=request.timeout_s)
        tasks = [
            self._services.tasks.spawn(self._creation.make(asked, caller, origin, fork), awaited=True)
            for _ in range(request.count)
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()  # those that are done already do not mind
            await asyncio.shield(asyncio.wait(tasks))
            failed = [task for task in tasks if task.cancelled() or task.exception() is not None]
            made = [found for task in tasks if task not in failed and (found := self._of(task)) is not None]
            if failed:
                await self._undo(made)
        errors = [error for task in failed if not task.cancelled() and (error := task.exception()) is not None]
        if failed:
            raise _failure(errors, asked=request.count)
        return made

    def _of(self, task: asyncio.Task[Sandbox]) -> Supervisor | None:
        """None when somebody has destroyed it already."""
        return self._registry.find(task.result().id)

    async def _settle(self, made: list[Supervisor], project: str, key: str | None, hash: bytes) -> None:
        """From here on they stay if the node ends."""
        rows = []
        for child in made:
            child.row = msgspec.structs.replace(child.row, fork=None)
            if child.state is not SandboxState.DESTROYING and not child.ended:
                rows.append(child.row)
        at = self._services.clock.wall_s()
        keys = (
            []
            if key is None
            else [
                KeyRow(project=project, key=_key_of(key, index), request_hash=hash, sandbox=child.id, at=at)
                for index, child in enumerate(made)
            ]
        )
        await self._services.journal.settle_fork(rows, keys)

    async def _undo(self, made: list[Supervisor]) -> None:
        work = [self._services.tasks.spawn(_abandon(child), awaited=True, finishes=True) for child in made]
        if work:
            await asyncio.shield(asyncio.wait(work))


async def _abandon(child: Supervisor) -> None:
    async def act() -> None:
        if not child.ended and child.state is not SandboxState.DESTROYING:
            await child.abandon("another one of its fork could not be made")

    with suppress(DsecError):  # what could not be removed is tried again
        await child.serially(act)


def _failure(errors: list[BaseException], *, asked: int) -> BaseException:
    """The first, and of how many."""
    if not errors:
        return SandboxError("the fork was given up")
    first = errors[0]
    if isinstance(first, DsecError):
        first.message = f"a fork into {asked} could not be made, and nothing of it is left: {first.message}"
        first.detail = {**first.detail, "asked": asked, "failed": len(errors)}
    return first


def _key_of(key: str, index: int) -> str:
    return f"{key}/{index}"
