"""Microvms: create from templates, adopt, discard."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.agent.client import AgentClient
from dsec.backends.base import Capabilities, Instance, InstanceSpec, Keeps, Layer, Probe, Weakness
from dsec.backends.machines import MachineDisk
from dsec.backends.microvm.config import MicrovmConfig
from dsec.backends.microvm.instance import MicrovmInstance
from dsec.backends.microvm.monitors import choose_monitor, control_of, with_card
from dsec.backends.microvm.record import MicrovmRecord
from dsec.backends.vm import machine
from dsec.backends.vm.backend import MachineBackend
from dsec.backends.vm.capture import Below, Source
from dsec.backends.vm.clones import awaken, check_same, disk_of, memory_of, processors_of, rehearse
from dsec.backends.vm.disks import check_layers, digest_of, has_blob, layer_binds
from dsec.backends.vm.driver import DISK_NAME
from dsec.backends.vm.drivers import Machine, VmDriver
from dsec.backends.vm.firecracker_driver import FirecrackerDriver, watch_memory
from dsec.backends.vm.machine import Shape
from dsec.backends.vm.monitor import Confines, MonitorProcess
from dsec.backends.vm.saved import OVERLAY, SavedMachine
from dsec.backends.vm.templates import DISK, Template, Templates, template_key
from dsec.core.errors import InvalidArgumentError, UnsupportedError
from dsec.core.ids import NodeId
from dsec.core.limits import MIB
from dsec.core.spec import NetworkMode, Substrate
from dsec.density.cgroups import CgroupPlan
from dsec.wire.agent import ClaimArgs
from dsec.wire.codec import pack
from dsec.wire.jail import JailBind

_MEMORY_BYTES_MIN: Final = 96 * MIB  # a kernel, an agent, and something to run
_AGENT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Facts:
    driver: VmDriver[Any]
    identity: dict[str, str]  # of everything that is the same for all templates
    shown: dict[str, str]
    weak: dict[str, Weakness]


@dataclass(frozen=True, slots=True)
class _Wanted:
    shape: Shape
    facts: _Facts
    saved: SavedMachine | None = None


class MicrovmBackend(MachineBackend[MicrovmRecord, MicrovmInstance, _Facts, _Wanted]):
    PLURAL = "microvms"
    record_type = MicrovmRecord

    def __init__(self, config: MicrovmConfig, *, node: NodeId) -> None:
        self._config = config
        super().__init__(config, node=node, templates=Templates(config.templates_dir, kept_max=config.templates_max))
        self._with_card: tuple[VmDriver[Any], tuple[VmDriver[Any], dict[str, str]]] | None = None  # of which it is
        self._finding_card = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            substrate=Substrate.MICROVM,
            networks=self._networks,
            network_reason=self._no_network,
            pause=True,
            snapshot=Keeps.DISK_MEMORY,
            fork=Keeps.DISK_MEMORY,
            survives_node=True,
            own_machine=True,
            links_by_agent=True,
            warm=True,
            memory_limit=True,
            cpu_limit=self._place.host.limits("cpu") is not None,
            pids_limit=True,
            disk_limit="disk",
            volumes=False,
            resource_view="live",
        )

    async def _prepare(self) -> _Facts:
        chosen = await choose_monitor(self._config)
        await asyncio.to_thread(self._place.open)
        self._config.images_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _Facts(chosen.driver, chosen.identity, chosen.shown, chosen.weak)

    def _shown(self, facts: _Facts) -> Probe:
        return Probe(True, facts=facts.shown, weak=facts.weak)

    # ---- create ----------------------------------------------------------------------------------

    async def _wanted(self, instance: InstanceSpec) -> _Wanted:
        shape = shape_of(instance, self._config)
        facts = await self._renewed()
        if not instance.machine:
            return _Wanted(shape, facts)
        saved = await asyncio.to_thread(self.saved.get, instance.machine, self._needs(facts))
        had = msgspec.convert(saved.manifest.shape, Shape)
        check_same(had, instance.spec)
        if (shape.layers, shape.pids) != (had.layers, had.pids):
            raise InvalidArgumentError(
                "a machine that goes on from a snapshot has the layers and `pids_max` that it had"
            )
        return _Wanted(had, facts, saved)

    async def _make(
        self, instance: InstanceSpec, wanted: _Wanted, record: MicrovmRecord, cgroups: CgroupPlan
    ) -> MicrovmInstance:
        layers = await self._binds(instance.layers)
        if wanted.saved is not None:
            return await self._clone(instance, wanted, record, cgroups, wanted.saved.template, layers)
        async with self._templates.held(lambda: self._template(wanted, layers)) as template:
            record = msgspec.structs.replace(record, template=template.key)
            return await self._clone(instance, wanted, record, cgroups, template, layers)

    async def _binds(self, layers: tuple[Layer, ...]) -> list[JailBind]:
        persistent = self._config.layer_device == "pmem"
        return await asyncio.to_thread(layer_binds, layers, self._config.images_dir, persistent=persistent)

    async def _clone(
        self,
        instance: InstanceSpec,
        wanted: _Wanted,
        record: MicrovmRecord,
        cgroups: CgroupPlan,
        template: Template,
        layers: list[JailBind],
    ) -> MicrovmInstance:
        driver, shape = wanted.facts.driver, wanted.shape
        await asyncio.to_thread(self._lay_out, record, shape, cgroups, template, driver)
        confines = self._confines(record, driver)
        process = driver.spawn(template, Path(record.directory), shape, confines, layers)
        record = msgspec.structs.replace(record, pid=process.pid, start_ticks=process.start_ticks)
        found = driver.control(confines.sockets, owner=record.uid)
        made = MicrovmInstance(self, record, process, found, page_out=self._config.page_out)
        async with self._starting(made, process):
            await driver.go_on(found, process, template, confines, stand=instance.attach is not None)
            await made.run_attached(instance.attach)
            await awaken(
                made, instance, None if instance.spare else claim_args(instance), wanted.saved, wait_s=_AGENT_S
            )
        return made

    def _lay_out(
        self, record: MicrovmRecord, shape: Shape, cgroups: CgroupPlan, template: Template, driver: VmDriver[Any]
    ) -> None:
        self._place.lay_out(record, cgroups)
        driver.prepare_clone(template, Path(record.directory), shape, record.uid)

    def _confines(self, record: MicrovmRecord, driver: VmDriver[Any]) -> Confines:
        return self._place.confines(record, kvm=driver.accelerator == "kvm")

    def _record(self, name: str, uid: int, cgroups: CgroupPlan, wanted: _Wanted) -> MicrovmRecord:
        return MicrovmRecord(
            sandbox=name,
            monitor=wanted.facts.driver.name,
            boot_id=self._place.boot_id,
            uid=uid,
            sockets=str(self._place.sockets_of(name)),
            directory=str(self._place.directory_of(name)),
            cgroup2=cgroups.cgroup2,
            cgroup1=cgroups.cgroup1,
            saved=wanted.saved.id if wanted.saved is not None else "",
            shape=msgspec.to_builtins(wanted.shape),
        )

    def _needs(self, facts: _Facts) -> dict[str, str]:
        return {**facts.driver.identity, "machine": str(machine.GENERATION)}

    def _disk_of(self, saved: SavedMachine) -> MachineDisk:
        """What it has written, above layers that it only reads; under Firecracker in one file."""
        above = tuple(saved.directory / name for name in saved.template.overlays)
        size = msgspec.convert(saved.manifest.shape, Shape).disk_bytes
        return MachineDisk((saved.directory / DISK,), (), above, "raw", size)

    def _source(self, record: MicrovmRecord, origin: Path, overlays: int) -> Source:
        assert self._facts is not None
        shape = msgspec.convert(record.shape, Shape)
        flat = record.monitor == FirecrackerDriver.name
        names = () if flat else (DISK, *(OVERLAY.format(number) for number in range(1, overlays + 1)))
        return Source(
            sandbox=record.sandbox,
            pid=record.pid,
            uid=record.uid,
            directory=Path(record.directory),
            disk=DISK if flat else DISK_NAME,
            memory_bytes=shape.memory_bytes,
            disk_bytes=shape.disk_bytes,
            below=[Below(f"{machine.TEMPLATE}/{name}", name, (origin / name,)) for name in names],
            overlays=overlays,
            memory_mode=self._facts.driver.memory_mode,
            flat=flat,
        )

    # ---- templates -------------------------------------------------------------------------------

    async def _template(self, wanted: _Wanted, layers: list[JailBind]) -> Template:
        shape = wanted.shape
        digests = " ".join(digest for digest, _ in shape.layers)
        driver, identity = wanted.facts.driver, wanted.facts.identity
        if shape.network:
            driver, identity = await self._able_to_network(driver)
        made_of = {**identity, "shape": repr(shape), "layers": digests}

        async def build(directory: Path) -> None:
            await self._build_template(directory, wanted, layers, driver)

        return await self._templates.get(template_key(made_of), made_of, build)

    async def _able_to_network(self, driver: VmDriver[Any]) -> tuple[VmDriver[Any], dict[str, str]]:
        """Found when the first one asks for it."""
        async with self._finding_card:
            if self._with_card is None or self._with_card[0] is not driver:
                self._with_card = driver, await with_card(self._config, driver)
            return self._with_card[1]

    async def _build_template(
        self, directory: Path, wanted: _Wanted, layers: list[JailBind], driver: VmDriver[Any]
    ) -> None:
        """Booted until its agent has run a command. Of a card that it has nothing is behind."""
        async with self._nobodys(wanted) as record:
            async with driver.booting(directory, wanted.shape, self._confines(record, driver), layers) as found:
                client = await AgentClient.connect(
                    lambda factory: found.connect(factory, timeout_s=self._config.boot_s),
                    sandbox=record.sandbox,
                    open_timeout_s=self._config.boot_s,
                )
                try:
                    await client.usage()  # what it needs is in its memory then
                    await rehearse(client)
                finally:
                    client.close()
                await driver.save(found, directory)

    # ---- spares ----------------------------------------------------------------------------------

    async def shape(self, instance: InstanceSpec) -> bytes | None:
        shape = shape_of(instance, self._config)
        return pack([repr(shape), instance.spec.cpu])

    async def claim(self, spare: Instance, instance: InstanceSpec) -> MicrovmInstance:
        """Its agent names it, as told by the caller: nothing outside of it has the sandbox's name."""
        assert isinstance(spare, MicrovmInstance)
        self.instances[instance.id] = self.instances.pop(spare.id, spare)
        spare.become(msgspec.structs.replace(spare.facts, sandbox=instance.id))
        return spare

    # ---- what is there ---------------------------------------------------------------------------

    def _size(self, record: MicrovmRecord) -> Shape:
        return msgspec.convert(record.shape, Shape)

    async def _stand(self, record: MicrovmRecord, saved: SavedMachine, layers: tuple[Layer, ...]) -> MonitorProcess:
        assert self._facts is not None
        driver = self._facts.driver
        binds = await self._binds(layers)
        confines = self._confines(record, driver)
        process = driver.spawn(saved.template, Path(record.directory), self._size(record), confines, binds)
        found = driver.control(confines.sockets, owner=record.uid)
        try:
            await driver.go_on(found, process, saved.template, confines, stand=True)
        except BaseException:
            await asyncio.shield(process.end())
            process.forget()
            raise
        finally:
            found.close()
        return process

    def _adopted(self, record: MicrovmRecord, process: MonitorProcess | None) -> MicrovmInstance:
        if process is not None:
            watch_memory(process, Path(record.sockets), record.cgroups)
        return MicrovmInstance(self, record, process, self.control(record), page_out=self._config.page_out)

    def control(self, record: MicrovmRecord) -> Machine:
        return control_of(record.monitor, Path(record.sockets), owner=record.uid)

    async def keep_layers(self, digests: Collection[str]) -> None:
        """Images that were made of layers go with them, and so do the templates: running clones hold what they use."""
        kept = set(digests)
        await asyncio.to_thread(self._forget_layers, kept)

    def _forget_layers(self, kept: set[str]) -> None:
        self._templates.drop_made_of(lambda made_of: set(made_of.get("layers", "").split()) <= kept)
        for image in self._config.images_dir.glob("*.*"):
            if digest_of(image) not in kept:
                image.unlink(missing_ok=True)


def shape_of(instance: InstanceSpec, config: MicrovmConfig) -> Shape:
    """Raises UnsupportedError or InvalidArgumentError for what a microvm cannot give."""
    spec = instance.spec
    if instance.volumes:
        raise UnsupportedError("microvms have no volumes yet", hint="use backend='container'")
    if spec.memory_bytes < _MEMORY_BYTES_MIN:
        raise InvalidArgumentError(f"a microvm has at least {_MEMORY_BYTES_MIN // MIB} MiB of memory")
    network = spec.network is NetworkMode.PROXIED
    check_layers(instance.layers, network=network)
    return Shape(
        processors=processors_of(spec),
        memory_bytes=memory_of(spec),
        disk_bytes=disk_of(spec.disk_bytes or config.disk_bytes),
        pids=spec.pids_max,
        layers=tuple((layer.digest, has_blob(layer)) for layer in instance.layers),
        network=network,
    )


def claim_args(instance: InstanceSpec) -> ClaimArgs:
    return ClaimArgs(
        sandbox=instance.id,
        env={key.encode(): value.encode("utf-8", "surrogateescape") for key, value in instance.env.items()},
        user=instance.user,
        workdir=instance.workdir.encode("utf-8", "surrogateescape") if instance.workdir else None,
        hostname=instance.hostname,
    )
