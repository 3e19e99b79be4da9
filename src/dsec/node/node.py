"""One node: built from its parts, started, asked, closed."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from dsec.backends.base import Backend
from dsec.backends.fncall.calls import Calls
from dsec.backends.forwarding import MakeForwarder
from dsec.backends.machines import HasImages, KeepsMachines
from dsec.binaries import find_binary
from dsec.core.clock import Clock, SystemClock
from dsec.core.errors import (
    DsecError,
    GoneError,
    HostError,
    NodeRetiredError,
    SandboxNotFoundError,
    StorageError,
    UnsupportedError,
)
from dsec.core.ids import NodeId, node_of, parse_sandbox_id
from dsec.core.limits import COLLAPSE_ABOVE, LOWERS_MAX
from dsec.core.spec import Substrate
from dsec.core.states import EndCause
from dsec.node.admission import Room, memory_promised_max
from dsec.node.adoption import Adoption
from dsec.node.calls import CallPlaces
from dsec.node.census import Known, Places
from dsec.node.collecting import Collector
from dsec.node.config import NodeConfig
from dsec.node.creation import Creation
from dsec.node.devices import Devices
from dsec.node.egress import NodeEgress
from dsec.node.endedrecords import EndedRecords
from dsec.node.environments import Environments
from dsec.node.exectable import ExecTable
from dsec.node.expiry import expire
from dsec.node.forking import Forks
from dsec.node.host import boot_id, memory_available_bytes, memory_total_bytes
from dsec.node.jobs import NodeJobs
from dsec.node.journal import Journal
from dsec.node.links import NodeLinks
from dsec.node.memoryqueue import MemoryQueue
from dsec.node.reaper import Reaper
from dsec.node.recordplace import RecordPlace
from dsec.node.registry import Registry
from dsec.node.rights import reaches
from dsec.node.rollback import Rollbacks
from dsec.node.sampling import Sampling
from dsec.node.services import Services, Sleep
from dsec.node.snapshots import Snapshots
from dsec.node.snapshotstore import SnapshotStore
from dsec.node.supervisor import Supervisor
from dsec.node.tasks import Tasks
from dsec.node.view import gone_error
from dsec.node.volumes import Volumes
from dsec.node.warmpool import WarmPool
from dsec.observe.logs import get_logger
from dsec.storage.space import free_bytes
from dsec.storage.spread import spread_children
from dsec.storage.volumes import VolumeStore
from dsec.wire.environments import EnvironmentInfo
from dsec.wire.layers import CollapseRequest
from dsec.wire.records import NodeLoad

log = get_logger(__name__)

_PRUNE_EVERY_S: Final = 600.0
_RENEW_EVERY_S: Final = 240.0  # signed URLs hold for days, addresses for hours, credentials of a role for ten minutes
_SAMPLE_EVERY_S: Final = 30.0
_COLLECT_S: Final = 1.0
_RECORD_RESERVE: Final = 4  # output is recorded down to this fraction of the room that creates must leave

MakeBackends = Callable[[NodeId], Mapping[Substrate, Backend]]


class Node:
    """The sandboxes of one machine.

        node = Node(config, make_backends=make, environments=StoredEnvironments(store, remote))
        await node.start()          # takes over what an earlier process has left, beside the first requests
        service = Service(node)     # what API and tests talk to
        await node.close()          # sandboxes that can run on do

    Everything belongs to the event loop of `start`. One process at a time has a state directory.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        make_backends: MakeBackends,
        environments: Environments,
        clock: Clock | None = None,
        sleep: Sleep = asyncio.sleep,
        boot_id: str | None = None,
        make_forwarder: MakeForwarder | None = None,
    ) -> None:
        """`make_forwarder`: of sandboxes with network `proxied`; without one there are none."""
        self.config = config
        self.environments = environments
        self.clock: Clock = clock or SystemClock()
        self.registry = Registry()
        self._sleep = sleep
        self.started_at = 0.0
        self._make_backends = make_backends
        self._boot_id = boot_id
        self._make_forwarder = make_forwarder
        self._tasks = Tasks("the node")
        self._lock: int | None = None
        self._closed = False
        self._collecting = False
        self.backends: Mapping[Substrate, Backend] = {}
        self.journal: Journal
        self.creation: Creation
        self.adoption: Adoption
        self.snapshots: Snapshots
        self.forks: Forks
        self.rollbacks: Rollbacks
        self.jobs: NodeJobs
        self.memory: MemoryQueue
        self.links: NodeLinks
        self.warm: WarmPool
        self.volumes: Volumes
        self.ended: EndedRecords
        self.collector: Collector
        self.calls: Calls
        self._call_places: CallPlaces
        self._services: Services
        self._record_place: RecordPlace
        self._reaper: Reaper

    @property
    def id(self) -> NodeId:
        return self.journal.node_id

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises HostError (another process has the state directory, or a newer version wrote it) or StorageError."""
        config = self.config
        try:
            config.records_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            spread_children(config.records_dir)
            config.ended_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageError(f"cannot make {error.filename}: {error.strerror}") from error
        self._take_lock()
        try:
            self.journal = await Journal.open(config.journal_path, self.clock)
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        boot = self._boot_id or boot_id()
        self._reaper = Reaper(self.clock, self._sleep, self._expire)
        self.ended = EndedRecords(
            self.config.ended_dir,
            bytes_max=self.config.ended_records_bytes_max,
            buried=self.journal.tombstone,
            tasks=self._tasks,
        )
        self.volumes = Volumes(
            VolumeStore(self.config.state_dir), self.config.datasets, self.registry, self.clock, self._tasks
        )
        self._record_place = RecordPlace(
            self.config.records_dir, bytes_max=self.config.records_bytes_max, has_room=self._has_room_for_records
        )
        self.jobs = NodeJobs(self.id, self.registry, self.clock.monotonic_s, lambda id: self.adoption.settled(id))
        self.memory = MemoryQueue(
            self.clock, self._sleep, self._tasks, lambda: self._services.config.memory_available_bytes_min
        )
        self.links = NodeLinks(self.registry, self._tasks, self._sleep, is_paused=self.jobs.is_paused)
        self._services = Services(
            config=self.config,
            journal=self.journal,
            clock=self.clock,
            sleep=self._sleep,
            tasks=self._tasks,
            schedule=self._reaper.schedule,
            forget=self._forget,
            collect=self._collect_soon,
            records=self._record_place,
            read_failure=self.environments.read_failure,
            layers=self.environments.layers,
            volumes=self.volumes,
            links=self.links,
            egress=NodeEgress(self.registry, self.journal, self.clock, self._tasks, self._sleep, self._make_forwarder),
            jobs=self.jobs,
            memory=self.memory,
        )
        self.backends = self._make_backends(self.journal.node_id)
        self.warm = WarmPool(self._services, self.backends.__getitem__, self.environments, self.room, boot)
        store = await asyncio.to_thread(SnapshotStore, self.config.snapshots_dir)
        self.snapshots = Snapshots(self._services, self.registry, self.environments, store, self._tidy_environments)
        devices = Devices(self.config.calls.cdi_dirs)
        self._call_places = CallPlaces(self._services, self._backend, self.environments, self.room, boot, devices)
        self.calls = Calls(self.config.calls, self._call_places.launch, lambda: find_binary("dsec-call"))
        self.creation = Creation(
            self._services,
            self.registry,
            self.backends,
            self.environments,
            self.room,
            boot,
            self.warm,
            snapshots=self.snapshots,
        )
        self.forks = Forks(self._services, self.registry, self.creation, self.snapshots)
        self.rollbacks = Rollbacks(self._services, self.environments, self.snapshots, boot)
        self.collector = Collector(
            Places(self.config.state_dir, self.config.run_dir),
            self.config.collect,
            clock=self.clock,
            known=self._known,
            tidy=self._tidy_environments,
        )
        await self._sweep()
        await self._sort_records()
        self._record_place.start(self.config.records_ahead_dir)
        self.adoption = Adoption(self._services, self.registry, self.backends, self.environments, boot)
        self.adoption.begin()
        self.warm.discard_left()
        await self.journal.prune(self.clock.wall_s())
        self._reaper.start(self._tasks)
        self.warm.start()
        self._tasks.spawn(self.volumes.clean())
        self._tasks.spawn(self._services.egress.sweep())
        self.calls.start()
        self._tasks.spawn(self._housekeep())
        self._tasks.spawn(self._tidy_environments())
        self.started_at = self.clock.wall_s()

    async def close(self) -> None:
        """Idempotent. Sandboxes that survive their node run on; the others are destroyed."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_services"):
            self.memory.close()
            await self._leave_sandboxes()
        if hasattr(self, "calls"):
            await self.calls.close()
            await self._call_places.close()
        if hasattr(self, "warm"):
            await self.warm.close()
        await self._tasks.close()
        if hasattr(self, "_services"):
            await self._services.egress.close()
        if hasattr(self, "ended"):
            self.ended.close()
        if hasattr(self, "_record_place"):
            self._record_place.close()
        for backend in self.backends.values():
            with suppress(DsecError):
                await backend.close()
        if hasattr(self, "journal"):
            await self.journal.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _leave_sandboxes(self) -> None:
        for sandbox in self.registry:
            if not sandbox.backend.capabilities.survives_node:
                with suppress(DsecError):
                    await sandbox.destroy(EndCause.DESTROYED, "the node stops")
        self._services.closing = True
        # Creates under way are cancelled, and clean up after themselves, while the journal still writes.
        await self._tasks.settle()
        for sandbox in self.registry:
            await sandbox.leave()

    def _take_lock(self) -> None:
        path = self.config.state_dir / "node.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"cannot open {path}: {error.strerror}", hint="the node writes in its state directory"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise HostError(
                f"another node process has {self.config.state_dir}", hint="stop it first: dsec down"
            ) from error
        self._lock = lock

    async def _sweep(self) -> None:
        """Before anything is created: an intent that is not in the journal any more was lost with the power."""
        records: dict[Substrate, list[bytes]] = {substrate: [] for substrate in self.backends}
        for row in self.journal.sandboxes():
            records.setdefault(row.spec.substrate, []).extend((row.record, row.leftover))
        for spare in self.journal.spares():
            records.setdefault(Substrate(spare.substrate), []).append(spare.record)
        for substrate, backend in self.backends.items():
            await backend.sweep([record for record in records[substrate] if record])

    def _known(self) -> Known:
        """Of collections: what there is of sandboxes and spares, and which layers they and snapshots have."""
        records: dict[Substrate, list[bytes]] = {substrate: [] for substrate in self.backends}
        names = set()
        for row in self.journal.sandboxes():
            names.add(row.id)
            records.setdefault(row.spec.substrate, []).append(row.record)
        for spare in self.journal.spares():
            names.add(spare.id)
            records.setdefault(Substrate(spare.substrate), []).append(spare.record)
        for sandbox in self.registry:  # of a create that is not in the journal yet
            names.add(sandbox.id)
        for substrate, found in records.items():
            names |= self.backends[substrate].names([record for record in found if record])
        return Known(names, self.layers_in_use())

    async def _sort_records(self) -> None:
        """Before sandboxes are taken over: those of ended ones are apart, and those of nobody are removed."""
        living = {row.id for row in self.journal.sandboxes()}
        try:
            await self.ended.load(self.config.records_dir, living)
        except OSError as error:
            raise StorageError(f"records cannot be read: {error}") from error
        await self.ended.prune(self.clock.wall_s())

    # -- for the service ---------------------------------------------------------------------------

    def find(self, id: str, *, project: str | None) -> Supervisor:
        """A sandbox that has not ended. `project` None: of any. Raises SandboxNotFoundError for other projects' ones,
        GoneError with the tombstone, NodeRetiredError for an id of a node that this one is not."""
        parsed = parse_sandbox_id(id)
        found = self.registry.find(id)
        if found is not None:
            if not reaches(project, found.row.project):
                raise _not_found(id)
            if found.ended:
                raise found.gone()
            return found
        buried = self.journal.tombstone(id)
        if buried is not None and reaches(project, buried.sandbox.project):
            raise gone_error(buried.sandbox)
        if node_of(parsed) != self.id:
            raise NodeRetiredError(f"the node of {id} has left, and its sandboxes with it", sandbox=id)
        raise _not_found(id)

    async def execs_of(self, id: str, *, project: str | None) -> ExecTable:
        """To be read; of an ended sandbox too, while they are kept. Raises as `find` does."""
        try:
            return self.find(id, project=project).execs
        except GoneError as error:
            buried = self.journal.tombstone(id)
            found = None if buried is None else await self.ended.open(buried.sandbox)
            if found is None:
                error.hint = "it has run no command, or their records have made room for later ones"
                raise
            return found

    async def settled(self, id: str, *, project: str | None) -> None:
        """Returns once the sandbox, if it is the caller's, has been taken over from an earlier process, or ended."""
        found = self.registry.find(id)
        if found is not None and reaches(project, found.row.project):
            await self.adoption.settled(id)

    def _backend(self, substrate: Substrate) -> Backend:
        found = self.backends.get(substrate)
        if found is None:
            raise UnsupportedError(f"this node does not offer the substrate {substrate}, which calls need")
        return found

    async def set_egress(self, sandbox: Supervisor, egress: list[str] | None) -> None:
        """What it reaches from now on. Raises as `NodeEgress.set`."""
        await self._services.egress.set(sandbox, None if egress is None else tuple(egress))

    def load(self) -> NodeLoad:
        config = self.config
        return NodeLoad(
            sandboxes=len(self.registry),
            sandboxes_max=config.sandboxes_max,
            memory_promised_bytes=self.registry.memory_promised_bytes,
            memory_promised_bytes_max=memory_promised_max(memory_total_bytes(), config.memory_overcommit),
        )

    def room(self) -> Room:
        config = self.config
        return Room(
            sandboxes=len(self.registry),
            sandboxes_max=config.sandboxes_max,
            memory_promised_bytes=self.registry.memory_promised_bytes + self.calls.memory_promised_bytes,
            memory_total_bytes=memory_total_bytes(),
            memory_overcommit=config.memory_overcommit,
            memory_available_bytes=max(0, memory_available_bytes() - self.memory.ahead_bytes),
            memory_available_bytes_min=config.memory_available_bytes_min,
            disk_free_bytes=self._free_bytes(config.disk_free_bytes_min),
            disk_free_bytes_min=config.disk_free_bytes_min,
            closing=self._closed,
        )

    async def let_layers_go(self) -> None:
        """Backends keep layers for the next sandbox; those of no environment hold their room on the disk.

        What cannot be let go now is at the next start.
        """
        named = set(await self.environments.named())
        live = self.layers_in_use()
        for backend in self.backends.values():
            try:
                await backend.keep_layers(named | live)
            except DsecError as error:
                log.warning("layers of removed environments are still mounted", error=str(error))
        await self._let_machines_go()

    async def _let_machines_go(self) -> None:
        """Those that no snapshot is, and on which no sandbox stands."""
        for substrate, backend in self.backends.items():
            if not isinstance(backend, KeepsMachines):
                continue
            rows = [sandbox.row for sandbox in self.registry if sandbox.row.spec.substrate == substrate]
            records = [record for row in rows for record in (row.record, row.leftover)]
            records += [spare.record for spare in self.journal.spares() if spare.substrate == substrate]
            await backend.keep_machines(self.snapshots.machines(substrate), [record for record in records if record])

    def layers_in_use(self) -> set[str]:
        """Of sandboxes, snapshots and images of machines."""
        images = {
            digest
            for backend in self.backends.values()
            if isinstance(backend, HasImages)
            for digest in backend.images.layers()
        }
        used = {digest for sandbox in self.registry for digest in sandbox.row.layers}
        return used | self.snapshots.layers() | images

    async def collapse_soon(self, environment: EnvironmentInfo) -> None:
        """Beside other work: with many layers, runs of them are made one. It is of use as it is, too, unless they are
        more than a sandbox can have: then this returns when that is done."""
        if len(environment.layers) <= COLLAPSE_ABOVE:
            return
        task = self._tasks.spawn(self._collapse(environment.name))
        if len(environment.layers) > LOWERS_MAX:
            await asyncio.wait([task])

    async def _collapse(self, name: str) -> None:
        async for event in self.environments.collapse(CollapseRequest(name=name)):
            if event.kind == "error":
                log.warning("layers could not be collapsed", environment=name, error=event.message)

    # -- inside ------------------------------------------------------------------------------------

    def _has_room_for_records(self) -> bool:
        wanted = self.config.disk_free_bytes_min // _RECORD_RESERVE
        return self._free_bytes(wanted) >= wanted

    def _free_bytes(self, wanted: int) -> int:
        """What is kept of ended sandboxes goes before living ones lack room."""
        while (free := free_bytes(self.config.state_dir)) < wanted and self.ended.drop_oldest():
            pass
        return free

    def _expire(self, id: str) -> None:
        sandbox = self.registry.find(id)
        if sandbox is not None:
            self._tasks.spawn(_expire(sandbox, self.clock))

    def _forget(self, id: str) -> None:
        self._reaper.cancel(id)
        self.links.drop(id)
        self.memory.drop(id)
        found = self.registry.find(id)
        if found is not None:
            self._services.egress.drop(found)
        self.registry.remove(id)
        if found is not None and found.tombstone is not None:
            self.ended.keep(found.execs, found.tombstone.sandbox.ended_at or self.clock.wall_s())

    def _collect_soon(self) -> None:
        """One for all that ends within a moment."""
        if not self._collecting and not self._closed:
            self._collecting = True
            self._tasks.spawn(self._collect())

    async def _collect(self) -> None:
        try:
            await self._sleep(_COLLECT_S)
        finally:
            self._collecting = False
        await self._tidy_environments()

    async def _tidy_environments(self) -> None:
        """Beside the first requests: it may take as long as removing trees does."""
        try:
            async with self.snapshots.changing:
                await self.environments.tidy(live=self.layers_in_use())
                await self.let_layers_go()
        except DsecError as error:
            log.warning("the environments could not be tidied up", error=str(error))

    async def _housekeep(self) -> None:
        pruned_at = renewed_at = self.clock.monotonic_s()
        sampling = Sampling(self.registry)
        while True:
            await self._sleep(_SAMPLE_EVERY_S)
            await self.warm.relieve()
            await sampling.turn()
            self._tasks.spawn(self.collector.relieve())
            if self.clock.monotonic_s() - pruned_at >= _PRUNE_EVERY_S:
                pruned_at = self.clock.monotonic_s()
                await self.ended.prune(self.clock.wall_s())
                with suppress(StorageError):
                    await self.journal.prune(self.clock.wall_s())
            if self.clock.monotonic_s() - renewed_at >= _RENEW_EVERY_S:
                renewed_at = self.clock.monotonic_s()
                self._tasks.spawn(self._renew())

    async def _renew(self) -> None:
        try:
            await self.environments.renew()
        except DsecError as error:
            log.warning("sources of layers could not be renewed", error=str(error))


def _not_found(id: str) -> SandboxNotFoundError:
    return SandboxNotFoundError(f"no sandbox {id}", sandbox=id)


async def _expire(sandbox: Supervisor, clock: Clock) -> None:
    # What could not be removed is tried again by the supervisor.
    with suppress(DsecError):
        await expire(sandbox, clock)
