"""Snapshots of a node's sandboxes: taken, named, listed, found, removed."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from dsec.backends.base import Backend, Capture, CapturedLayer, Instance, Keeps
from dsec.backends.machines import KeepsMachines
from dsec.core import limits
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    DsecError,
    LimitError,
    Outcome,
    UnsupportedError,
)
from dsec.core.ids import new_snapshot_id
from dsec.core.spec import Substrate
from dsec.core.states import ENDED, SandboxState
from dsec.image.capture import publish
from dsec.image.publishing import PublishJob
from dsec.image.residue import rules_for
from dsec.node.environments import Environments, Hold
from dsec.node.events import event_of
from dsec.node.once import Once
from dsec.node.origins import Origin, origin_of
from dsec.node.registry import Registry
from dsec.node.rights import reaches
from dsec.node.services import Services
from dsec.node.snapshotstore import Place as SnapshotPlace
from dsec.node.snapshotstore import SnapshotStore, decode_place, encode_place, not_found
from dsec.node.supervisor import Supervisor
from dsec.node.tasks import Tasks, result_of
from dsec.observe import metrics
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack
from dsec.wire.events import EventKind
from dsec.wire.node import Caller, team_of
from dsec.wire.snapshots import (
    Published,
    PublishRequest,
    SnapshotInfo,
    SnapshotPage,
    SnapshotQuery,
    SnapshotRequest,
    SnapshotRow,
)

log = get_logger(__name__)

_SCANNED_MAX: Final = 5_000  # looked at for one page; a page may come short, and then has a cursor
_RETRY_S: Final = 10.0


@dataclass(slots=True)
class _MachineHold:
    """Of a machine that was written down, and of the layers that it reads."""

    layers: Hold
    capture: Capture
    tasks: Tasks

    def release(self) -> None:
        self.layers.release()
        self.tasks.spawn(_close(self.capture), finishes=True)


@dataclass(frozen=True, slots=True)
class Captured:
    """What a sandbox had, as layers, or as a machine beside them; held until `hold` is released."""

    hold: Hold
    layers: tuple[str, ...]
    made: CapturedLayer
    frozen_ms: float


class Snapshots:
    """`collect` removes layers that nothing names or uses. `changing` is held while what is named changes."""

    def __init__(
        self,
        services: Services,
        registry: Registry,
        environments: Environments,
        store: SnapshotStore,
        collect: Callable[[], Awaitable[None]],
    ) -> None:
        self._services = services
        self._registry = registry
        self._environments = environments
        self._store = store
        self._collect = collect
        self._turn = asyncio.Semaphore(limits.SNAPSHOTS_AT_ONCE_MAX)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # of teams
        self._under_way: Counter[str] = Counter()  # by team: a project below the root
        self._once: Once[SnapshotInfo] = Once(services.tasks, "snapshot")
        self._kept: Counter[str | None] = Counter()
        self.changing = asyncio.Lock()

    def owners(self) -> Iterator[str]:
        """The project of each snapshot."""
        return self._store.projects()

    def layers(self) -> frozenset[str]:
        """Digests that snapshots are made of."""
        return self._store.layers()

    def machines(self, substrate: Substrate) -> frozenset[str]:
        """Those that snapshots are, by the ids of their backend."""
        return self._store.machines(substrate)

    # -- taking ------------------------------------------------------------------------------------

    async def take(
        self, sandbox: Supervisor, request: SnapshotRequest, caller: Caller, key: str | None
    ) -> SnapshotInfo:
        """Raises UnsupportedError, ConflictError (the name, or another snapshot of this sandbox is being made),
        LimitError, CapacityError, FreezeTimeoutError, DeadlineError (it could not be copied in the time for which it
        may stand still), GoneError, StorageError. The sandbox goes on in any case, and a failed one leaves nothing."""
        hash = hashlib.sha256(pack((sandbox.id, request))).digest()
        if key is None:
            return await self._once.alone(self._take(sandbox, request, caller, None, b""))
        scope = (sandbox.row.project, key)
        return await self._once.done(
            scope, hash, lambda: self._take(sandbox, request, caller, key, hash), lambda: self._known(scope, hash)
        )

    def _known(self, scope: tuple[str, str], hash: bytes) -> SnapshotInfo | None:
        known = next((row for row in self._store if (row.info.project, row.key) == scope), None)
        if known is None:
            return None
        if known.request_hash != hash:
            raise self._once.mismatch(scope[1])
        return known.info

    async def _take(
        self, sandbox: Supervisor, request: SnapshotRequest, caller: Caller, key: str | None, hash: bytes
    ) -> SnapshotInfo:
        id = new_snapshot_id()
        project, name = sandbox.row.project, request.name or id
        self._store.reserve(project, name, id)
        committing = False
        try:
            captured = await self.capture(sandbox)
            try:
                row = self._row(sandbox, captured, id, name, caller, key, hash)
                if row.machine and isinstance(sandbox.backend, KeepsMachines):
                    await sandbox.backend.sync_machine(row.machine)
                committing = True
                work = self._commit(row, sandbox.backend)
                await result_of(self._services.tasks.spawn(work, awaited=True, finishes=True))
            except BaseException:
                self._services.collect()
                raise
            finally:
                captured.hold.release()
        finally:
            if not committing:
                self._store.let_go(project, name)
        with suppress(DsecError):  # it is there, whoever is told
            event = event_of(sandbox.row, EventKind.SNAPSHOT, self._services.clock.wall_s(), snapshot=id)
            await self._services.journal.note([event])
        log.info("snapshot taken", sandbox=sandbox.id, snapshot=id, frozen_ms=round(captured.frozen_ms, 1))
        return row.info

    async def _commit(self, row: SnapshotRow, backend: Backend) -> None:
        """Durable, and named. Its layers are held by the caller, or are in nobody's way until the next collection."""
        async with self.changing:
            try:
                if row.machine and isinstance(backend, KeepsMachines):
                    await backend.sync_machine(row.machine)  # again, which is quick: it may have been collected
                hold = await self._environments.hold(row.info.layers)
            except DsecError:
                self._store.let_go(row.info.project, row.info.name)
                raise
            try:
                await asyncio.to_thread(self._store.write, row)
                self._store.enter(row)
            except BaseException:
                self._store.let_go(row.info.project, row.info.name)
                raise
            finally:
                hold.release()

    def _row(
        self,
        sandbox: Supervisor,
        captured: Captured,
        id: str,
        name: str,
        caller: Caller,
        key: str | None,
        hash: bytes,
    ) -> SnapshotRow:
        row = sandbox.row
        info = SnapshotInfo(
            id=id,
            name=name,
            project=row.project,
            sandbox=row.id,
            substrate=str(row.spec.substrate),
            environment="+".join(row.spec.environment.names()),
            created_at=self._services.clock.wall_s(),
            layers=captured.layers,
            size_bytes=captured.made.size_bytes,
            entries=captured.made.entries,
            parent=row.snapshot,
            frozen_ms=captured.frozen_ms,
            notes=captured.made.notes,
            keeps=str(sandbox.backend.capabilities.snapshot),
        )
        return SnapshotRow(
            info=info,
            principal=caller.principal,
            spec=row.spec,
            env=row.image.env,
            user=row.user,
            workdir=row.workdir,
            entrypoint=row.image.entrypoint,
            command=row.image.command,
            base=row.base or row.layers,
            machine=captured.made.machine,
            key=key,
            request_hash=hash,
        )

    # -- capturing ---------------------------------------------------------------------------------

    async def capture(self, sandbox: Supervisor) -> Captured:
        """What it has now, as layers or as a machine. Raises as `take` does."""
        if sandbox.backend.capabilities.snapshot is Keeps.NOTHING:
            raise UnsupportedError(f"this node takes no snapshots of {sandbox.row.spec.substrate} sandboxes")
        project = team_of(sandbox.row.project)
        own, total = self._under_way[project], self._under_way.total()
        if total >= limits.SNAPSHOTS_WAITING_MAX or own >= limits.SNAPSHOTS_WAITING_PER_PROJECT_MAX:
            raise CapacityError(f"{total} snapshots are being made already", retry_after_s=_RETRY_S)
        turn = self._turns.get(project)
        if turn is None:
            turn = self._turns[project] = asyncio.Semaphore(limits.SNAPSHOTS_AT_ONCE_PER_PROJECT_MAX)
        self._under_way[project] += 1
        try:
            with sandbox.changing_disk("a snapshot of it is being made"):
                async with turn, self._turn:
                    return await self._captured(sandbox)
        except DsecError as error:
            if sandbox.state in (SandboxState.DESTROYING, *ENDED):
                raise sandbox.gone() from error
            error.sandbox = error.sandbox or sandbox.id
            raise
        finally:
            self._under_way[project] -= 1
            if not self._under_way[project]:
                del self._under_way[project]

    async def _captured(self, sandbox: Supervisor) -> Captured:
        instance = await sandbox.present_instance()
        below = sandbox.row.layers
        run = _run_to_merge(below, sandbox.row.base or below)
        held = await self._environments.hold(below)
        try:
            capture = await instance.snapshot()
            try:
                async with _at_most(limits.SNAPSHOT_MAKE_S_MAX):
                    frozen_ms = await self._copy(sandbox, instance, capture)
                    made = await capture.keep(run)
                if made.merged:
                    below = below[: -len(run)]
                own = () if made.machine else (made.digest,)
                layers = tuple(dict.fromkeys(reversed((*below, *own))))[::-1]
                if len(layers) > limits.LOWERS_MAX:
                    raise LimitError(
                        f"the sandbox has {len(below)} layers below it, and there can be no more",
                        hint="they could not be made fewer: see the node's log, and `dsec layer collapse`",
                    )
                hold = await self._environments.hold(layers)
            except BaseException:
                await asyncio.shield(capture.close())
                raise
            if made.machine:
                hold = _MachineHold(hold, capture, self._services.tasks)
            else:
                # It only removes what was needed on the way: nobody has to wait for that.
                self._services.tasks.spawn(_close(capture), finishes=True)
            return Captured(hold, layers, made, frozen_ms)
        finally:
            held.release()

    async def _copy(self, sandbox: Supervisor, instance: Instance, capture: Capture) -> float:
        """How many milliseconds the sandbox stood still for it."""
        if sandbox.state is SandboxState.RUNNING:
            for _ in range(limits.SNAPSHOT_LOOKS_MAX):
                if await capture.look():
                    break
        clock = self._services.clock

        async def take() -> float:
            if sandbox.instance is not instance:
                sandbox.check_alive()
            paused = sandbox.state is SandboxState.PAUSED
            began_s = clock.monotonic_s()
            async with sandbox.pausing.still():
                copied = await capture.take(within_s=self._services.config.snapshot_freeze_s)
            frozen_s = 0.0 if paused else clock.monotonic_s() - began_s
            log.debug("a sandbox stood still", sandbox=sandbox.id, frozen_s=round(frozen_s, 6), copied_bytes=copied)
            metrics.SNAPSHOT_FROZEN_SECONDS.observe(frozen_s)
            return frozen_s * 1000

        return await sandbox.serially(take)

    # -- finding -----------------------------------------------------------------------------------

    def find(self, reference: str, *, project: str | None, own: str) -> SnapshotRow:
        """By name, of the caller's own project first, or by id. Raises NotFoundError, ConflictError."""
        row = self._store.named(own, reference) or self._store.get(reference)
        if row is not None and reaches(project, row.info.project):
            return row
        found = [row for row in self._store if row.info.name == reference and reaches(project, row.info.project)]
        if len(found) > 1:
            raise ConflictError(f"several snapshots are called {reference!r}", hint="use the id")
        if not found:
            raise not_found(reference)
        return found[0]

    def origin(self, reference: str, *, project: str | None, own: str) -> Origin:
        """For a create or a rollback, which keep it from being removed by their rows. Raises as `find` does."""
        return origin_of(self.find(reference, project=project, own=own))

    def list(self, query: SnapshotQuery, *, project: str | None) -> SnapshotPage:
        last = SnapshotPlace(0.0, "") if query.cursor is None else decode_place(query.cursor)
        found: list[SnapshotInfo] = []
        for scanned, (place, row) in enumerate(self._store.after(last)):
            if len(found) == query.limit or scanned == _SCANNED_MAX:
                return SnapshotPage(found, encode_place(last))
            last = place
            if reaches(project, row.info.project) and query.sandbox in (None, row.info.sandbox):
                found.append(row.info)
        return SnapshotPage(found, None)

    @contextmanager
    def keeping(self, id: str | None) -> Iterator[None]:
        """That snapshot is not removed meanwhile."""
        self._kept[id] += 1
        try:
            yield
        finally:
            self._kept[id] -= 1
            if not self._kept[id]:
                del self._kept[id]

    # -- publishing --------------------------------------------------------------------------------

    async def publish(self, row: SnapshotRow, request: PublishRequest) -> Published:
        """Raises InvalidArgumentError (a rule), ConflictError (the name), StorageError, CapacityError,
        UnsupportedError (of a machine)."""
        if row.machine:
            raise UnsupportedError(
                "what a machine has on its disk is no layer, and cannot be published", hint="build it as an environment"
            )
        base = row.base
        job = PublishJob(
            state=str(self._services.config.state_dir),
            name=request.name,
            source=f"{request.kind} from snapshot {row.info.name} of {row.info.sandbox}",
            base=base,
            run=tuple(digest for digest in row.info.layers if digest not in base),
            rules=rules_for(self._services.config.residue, request.keep),
            replace=request.replace,
            dry_run=request.dry_run,
        )
        with self.keeping(row.info.id):
            hold = await self._environments.hold(row.info.layers)
            try:
                async with self._turn:
                    return await publish(job)
            finally:
                hold.release()

    # -- removing ----------------------------------------------------------------------------------

    async def remove(self, reference: str, *, project: str | None, own: str) -> None:
        """Raises ConflictError while sandboxes that were made from it live, and says which."""
        work = self._remove(reference, project=project, own=own)
        await result_of(self._services.tasks.spawn(work, awaited=True, finishes=True))

    async def _remove(self, reference: str, *, project: str | None, own: str) -> None:
        async with self.changing:
            row = self.find(reference, project=project, own=own)
            children = [sandbox.id for sandbox in self._registry if sandbox.row.snapshot == row.info.id]
            if children:
                shown = ", ".join(itertools.islice(children, 3)) + (" …" if len(children) > 3 else "")
                raise ConflictError(
                    f"{len(children)} sandboxes are on snapshot {row.info.name!r}: {shown}",
                    hint="destroy them first",
                    detail={"sandboxes": children[: limits.LIST_PAGE_MAX]},
                )
            if self._kept[row.info.id]:
                raise ConflictError(f"a sandbox is going back to snapshot {row.info.name!r}", hint="ask again later")
            self._store.withdraw(row)
            try:
                await asyncio.to_thread(self._store.unlink, row)
            except BaseException:
                self._store.enter(row)
                raise
            self._store.let_go(row.info.project, row.info.name)
        log.info("snapshot removed", snapshot=row.info.id)
        await self._collect()


def _run_to_merge(below: tuple[str, ...], base: tuple[str, ...]) -> tuple[str, ...]:
    """The layers of snapshots that the next becomes one with, so that no chain ends; mostly none. Pure.

    Where the environment has about as many as there can be, its own highest are among them.
    """
    start = 0
    while start < len(below) and below[start] in base:
        start += 1
    if len(below) >= limits.LOWERS_MAX:
        return below[min(start, limits.LOWERS_MAX // 2) :]
    return below[start:] if len(below) - start >= limits.SNAPSHOT_CHAIN_MAX else ()


@asynccontextmanager
async def _at_most(seconds: float) -> AsyncIterator[None]:
    """Raises DeadlineError for what takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineError(
            f"the snapshot was not made within {seconds:g} s",
            outcome=Outcome.UNCHANGED,
            hint="the sandbox has written too much, or the disk is too slow",
        ) from error


async def _close(capture: Capture) -> None:
    with suppress(DsecError):  # what it leaves is removed at the next start
        await capture.close()
