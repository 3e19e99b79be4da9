"""What backends of machines have in common: create, adopt, discard, sweep, close; templates that are booted once.

A backend says what its machines are made of and how one of them is started; what happens to them on the host, and in
which order things are written down and removed, is the same for all.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from dsec.backends.base import Capabilities, InstanceSpec, Intend, Layer, Probe, require_root
from dsec.backends.forwarding import NETWORK
from dsec.backends.machines import MachineDisk
from dsec.backends.steering import why_not_steered
from dsec.backends.vm.capture import MachineCapture, SleepingCapture, Source
from dsec.backends.vm.clones import Sized, check_network
from dsec.backends.vm.drivers import Machine
from dsec.backends.vm.firecracker_capture import FirecrackerCapture
from dsec.backends.vm.firecracker_machine import FirecrackerMachine
from dsec.backends.vm.instance import MachineInstance
from dsec.backends.vm.monitor import MonitorProcess
from dsec.backends.vm.place import Place, PlaceConfig, holder, launch_error, template_name
from dsec.backends.vm.qemu_machine import QemuMachine
from dsec.backends.vm.record import MachineRecord, parse_record
from dsec.backends.vm.saved import SavedMachine, SavedMachines, SavedManifest
from dsec.backends.vm.templates import Templates
from dsec.core.errors import DsecError, LaunchError, StorageError, UnsupportedError
from dsec.core.ids import NodeId, SandboxId
from dsec.core.spec import NetworkMode
from dsec.density.cgroups import CgroupPlan
from dsec.storage.space import require_free


class Wanted(Protocol):
    """What a create was asked for, once it is known that it can be had."""

    @property
    def shape(self) -> Sized: ...

    @property
    def saved(self) -> SavedMachine | None:
        """What it goes on from."""
        ...


class Current(Protocol):
    @property
    def is_current(self) -> bool: ...


class Facts(Protocol):
    @property
    def driver(self) -> Current: ...


R = TypeVar("R", bound=MachineRecord)
I = TypeVar("I", bound=MachineInstance)  # type: ignore[type-arg]  # noqa: E741 - of R, which a bound cannot say
F = TypeVar("F", bound=Facts)
W = TypeVar("W", bound=Wanted)


class MachineBackend(ABC, Generic[R, I, F, W]):
    """One per node. Instances run on when it is closed. R: its records, I: its instances, F: what it has found on this
    host, W: what it needs to know of one that is wanted."""

    PLURAL: ClassVar[str]  # what its instances are called
    record_type: type[R]

    def __init__(self, config: PlaceConfig, *, node: NodeId, templates: Templates) -> None:
        self._place = Place(config, node)
        self._no_network = why_not_steered() if config.proxied else "the configuration offers none"
        self._networks = frozenset({NetworkMode.NONE} if self._no_network else {NetworkMode.NONE, NetworkMode.PROXIED})
        self._templates = templates
        self.saved = SavedMachines(config.sandboxes_dir.with_name("saved"))
        self._facts: F | None = None
        self._opening = asyncio.Lock()
        self._probe: Probe | None = None
        self.instances: dict[str, I] = {}  # by sandbox

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    # ---- what a backend says -----------------------------------------------------------------------

    @abstractmethod
    async def _prepare(self) -> F:
        """What it works with on this host. Raises HostError or UnsupportedError. Once for each monitor."""

    @abstractmethod
    def _shown(self, facts: F) -> Probe:
        """Of a host that can do it."""

    @abstractmethod
    async def _wanted(self, instance: InstanceSpec) -> W:
        """Raises UnsupportedError, InvalidArgumentError, EnvironmentNotFoundError for what it cannot give."""

    @abstractmethod
    def _record(self, name: str, uid: int, cgroups: CgroupPlan, wanted: W) -> R: ...

    @abstractmethod
    async def _make(self, instance: InstanceSpec, wanted: W, record: R, cgroups: CgroupPlan) -> I:
        """It runs, is in `instances`, and knows who it is. What it leaves when it raises is removed by the caller."""

    @abstractmethod
    def _adopted(self, record: R, process: MonitorProcess | None) -> I:
        """`process`: None of one that sleeps."""

    @abstractmethod
    def _source(self, record: R, origin: Path, overlays: int) -> Source:
        """What of one that runs is to be written down: its own files, and those that its disk stands on, of which
        `origin` has `overlays` that are not its beginning."""

    @abstractmethod
    def _needs(self, facts: F) -> dict[str, str]:
        """What must be the same for a saved machine to go on here."""

    @abstractmethod
    def _size(self, record: R) -> Sized: ...

    @abstractmethod
    async def _stand(self, record: R, saved: SavedMachine, layers: tuple[Layer, ...]) -> MonitorProcess:
        """Its monitor, with the machine as it was saved, standing still. Raises LaunchError and OSError, and then
        nothing of it runs."""

    # ---- probe -------------------------------------------------------------------------------------

    async def probe(self) -> Probe:
        if self._probe is None:
            self._probe = await self._try()
        return self._probe

    async def _try(self) -> Probe:
        try:
            return self._shown(await self._open())
        except DsecError as error:
            return Probe(False, error.message, error.hint)

    async def _open(self) -> F:
        if self._facts is not None:
            return self._facts
        require_root(self.PLURAL)
        async with self._opening:
            if self._facts is None:
                self._facts = await self._prepare()
        return self._facts

    async def _renewed(self) -> F:
        """As `_open`, with the monitor that is there by now: a template's state is for the very one that made it."""
        facts = await self._open()
        if facts.driver.is_current:
            return facts
        async with self._opening:
            if self._facts is facts:
                self._facts = await self._prepare()
        return await self._open()

    # ---- create ------------------------------------------------------------------------------------

    def approach(self, record: bytes) -> None:
        """A machine that boots loses what comes before its agent."""

    async def create(self, instance: InstanceSpec, *, intend: Intend, deadline_s: float) -> I:
        with self.saved.held(instance.machine):
            return await self._create(instance, intend, deadline_s)

    async def _create(self, instance: InstanceSpec, intend: Intend, deadline_s: float) -> I:
        check_network(instance.spec, self._networks)
        wanted = await self._wanted(instance)
        cgroups = self._cgroups(instance.id, wanted.shape, instance.spec.cpu)
        uid = self._place.ids.take(holder(cgroups))
        record = msgspec.structs.replace(self._record(instance.id, uid, cgroups, wanted), cpu=instance.spec.cpu)
        try:
            await intend(record.to_bytes())
        except BaseException:
            self._place.ids.give_back(uid)
            raise
        try:
            async with asyncio.timeout(deadline_s):
                return await self._make(instance, wanted, record, cgroups)
        except asyncio.CancelledError:
            self._place.clean_later(self.remove(record))
            raise
        except Exception as error:
            # Its caller may be cancelled now, too.
            await asyncio.shield(self._place.clean_later(self.remove(record)))
            raise launch_error(instance.id, error) from error

    @asynccontextmanager
    async def _starting(self, made: I, process: MonitorProcess) -> AsyncIterator[None]:
        """It is among the instances, and its monitor runs; or the block fails, and the template is not trusted any
        more: it may be its fault, and the next one makes another."""
        self.instances[made.id] = made
        try:
            try:
                yield
            except LaunchError as error:
                if made.facts.template and error.step != NETWORK:
                    self._templates.drop(made.facts.template)
                raise
        except BaseException:
            await asyncio.shield(process.end())
            made.abandon()
            self.instances.pop(made.id, None)
            raise

    @asynccontextmanager
    async def _nobodys(self, wanted: W) -> AsyncIterator[R]:
        """The place of a machine that is to become a template: as a sandbox of nobody, with its own range, cgroups and
        sockets. Nothing of it is left after the block."""
        name = template_name()
        cgroups = self._cgroups(name, wanted.shape, float(wanted.shape.processors))
        uid = self._place.ids.take(holder(cgroups))
        record = self._record(name, uid, cgroups, wanted)
        try:
            await asyncio.to_thread(self._place.lay_out, record, cgroups)
            yield record
        finally:
            await asyncio.shield(self._place.clean_later(self._place.remove(record)))

    def _cgroups(self, name: str, shape: Sized, cpu: float) -> CgroupPlan:
        return self._place.cgroups(name, processors=shape.processors, memory_bytes=shape.memory_bytes, cpu=cpu)

    # ---- saved machines ----------------------------------------------------------------------------

    @property
    def jail_root(self) -> Path:
        self._place.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # no machine may have been made yet
        return self._place.root

    @contextmanager
    def machine_disk(self, id: str) -> Iterator[MachineDisk]:
        with self.saved.held(id):
            needs = self.saved.get(id, {}, whole=False).manifest.needs  # no monitor goes on with it
            yield self._disk_of(self.saved.get(id, needs))

    @abstractmethod
    def _disk_of(self, saved: SavedMachine) -> MachineDisk: ...

    def control(self, record: R) -> Machine:
        """Of one that runs."""
        return QemuMachine(Path(record.sockets), owner=record.uid)

    async def capture(self, record: R, found: Machine, *, whole: bool = True) -> MachineCapture | FirecrackerCapture:
        """`whole`: its disk as well. Raises UnsupportedError, CapacityError, StorageError."""
        if not record.shape:
            raise UnsupportedError("it was made by an earlier version, which had no snapshots", hint="make a new one")
        facts = await self._open()
        manifest = SavedManifest(sandbox=record.sandbox, needs=self._needs(facts), shape=record.shape, more=record.more)

        def begin() -> MachineCapture | FirecrackerCapture:
            require_free(self.saved.directory.parent, self._size(record).memory_bytes)
            origin, overlays = self._templates.directory / record.template, 0
            if record.saved:
                known = self.saved.get(record.saved, self._needs(facts), whole=False)
                origin, overlays = known.directory, known.manifest.overlays
            source = self._source(record, origin, overlays)
            if isinstance(found, FirecrackerMachine):
                # What it writes is copied.
                require_free(Path(record.directory), 2 * self._size(record).memory_bytes)
                return FirecrackerCapture(self.saved, source, manifest, found, whole=whole)
            assert isinstance(found, QemuMachine)
            return MachineCapture(self.saved, source, manifest, found.monitor, whole=whole)

        try:
            return await asyncio.to_thread(begin)
        except OSError as error:
            raise StorageError(f"a machine cannot be kept: {error.strerror}", hint="is the disk full?") from error

    async def capture_asleep(self, record: R) -> SleepingCapture:
        """Raises as `capture`."""
        facts = await self._open()

        def begin() -> SleepingCapture:
            asleep = self.saved.get(record.asleep, self._needs(facts), whole=False)
            source = self._source(record, asleep.directory, asleep.manifest.overlays)
            return SleepingCapture(self.saved, asleep, source)

        return await asyncio.to_thread(begin)

    async def woken(self, record: R, layers: tuple[Layer, ...]) -> tuple[MonitorProcess, dict[str, object]]:
        facts = await self._open()
        saved = await asyncio.to_thread(self.saved.get, record.asleep, self._needs(facts))
        name = Path(record.directory).name
        try:
            cgroups = self._cgroups(name, self._size(record), record.cpu)
            await self._place.lay_out_again(record, cgroups)
            try:
                process = await self._stand(record, saved, layers)
            except BaseException:
                await asyncio.shield(self._place.clear(record))
                raise
        except OSError as error:
            raise LaunchError(f"the machine cannot be woken: {error}", step="wake", sandbox=record.sandbox) from error
        now = {"pid": process.pid, "start_ticks": process.start_ticks, "boot_id": self._place.boot_id}
        return process, now

    async def forget_asleep(self, id: str) -> None:
        await asyncio.to_thread(self.saved.remove, id)

    async def sync_machine(self, id: str) -> None:
        await asyncio.to_thread(self.saved.sync, id)

    async def keep_machines(self, ids: Collection[str], records: Collection[bytes]) -> None:
        try:
            known = [parse_record(record, self.record_type) for record in records]
        except StorageError:
            return  # what they need cannot be told
        needed = {id for record in known for id in (record.saved, record.asleep) if id}
        await asyncio.to_thread(self.saved.keep, needed | set(ids))

    # ---- adopt, discard, remove --------------------------------------------------------------------

    async def adopt(self, id: SandboxId, record: bytes) -> I:
        await self._open()
        known = parse_record(record, self.record_type)
        if known.asleep:
            await self._place.adopt_asleep(known)
        instance = self._adopted(known, None if known.asleep else self._place.adopt(known))
        self.instances[known.sandbox] = instance
        return instance

    async def discard(self, id: SandboxId, record: bytes) -> None:
        await self._open()
        known = parse_record(record, self.record_type)
        await self._place.end(known)
        await self.remove(known)

    async def remove(self, record: R) -> None:
        """Nothing of it is left on the host afterwards. Idempotent. Raises HostError if something resists."""
        known = self.instances.get(record.sandbox)
        # After a rollback the sandbox has another machine.
        if known is not None and known.facts.directory == record.directory:
            del self.instances[record.sandbox]
            known.abandon()
        await self._place.remove(record)
        if record.asleep:
            await asyncio.to_thread(self.saved.remove, record.asleep)

    def names(self, records: Collection[bytes]) -> frozenset[str]:
        known = [parse_record(record, self.record_type) for record in records]
        return frozenset(Path(path).name for one in known for path in (one.directory, one.sockets))

    async def sweep(self, records: Collection[bytes]) -> None:
        try:
            known = self.names(records)
        except StorageError:
            return  # whose they are cannot be told
        await self._place.sweep(known)
        await asyncio.to_thread(self._templates.sweep)

    async def close(self) -> None:
        for instance in list(self.instances.values()):
            instance.abandon()
        self.instances.clear()
        await self._place.close()
