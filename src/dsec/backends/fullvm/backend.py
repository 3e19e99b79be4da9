"""Full machines: create from templates of images, adopt, discard."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from dsec.agent.client import AgentClient
from dsec.backends.base import Capabilities, Instance, InstanceSpec, Keeps, Layer, Probe
from dsec.backends.fullvm import machine
from dsec.backends.fullvm.config import FullvmConfig
from dsec.backends.fullvm.driver import FullDriver
from dsec.backends.fullvm.guestagent import guest_agent
from dsec.backends.fullvm.images import MachineImage, MachineImages, Manifest
from dsec.backends.fullvm.instance import FullvmInstance
from dsec.backends.fullvm.machine import Shape
from dsec.backends.fullvm.record import FullvmRecord
from dsec.backends.machines import MachineDisk
from dsec.backends.vm.accelerator import Accelerator, choose_accelerator
from dsec.backends.vm.backend import MachineBackend
from dsec.backends.vm.capture import Below, Source
from dsec.backends.vm.clones import awaken, check_same, disk_of, memory_of, processors_of, rehearse
from dsec.backends.vm.kernel import fetch_kernel, find_kernel
from dsec.backends.vm.machine import TEMPLATE
from dsec.backends.vm.monitor import Confines, MonitorProcess
from dsec.backends.vm.ports import AgentPorts
from dsec.backends.vm.qemu import Qemu, check_own_net, find_qemu, weaknesses
from dsec.backends.vm.qmp import MonitorError
from dsec.backends.vm.saved import OVERLAY, SavedMachine
from dsec.backends.vm.templates import Template, Templates, template_key
from dsec.binaries import find_binary
from dsec.core.errors import (
    ConflictError,
    DsecError,
    GoneError,
    HostError,
    InvalidArgumentError,
    LaunchError,
    UnsupportedError,
)
from dsec.core.ids import NodeId
from dsec.core.limits import MIB
from dsec.core.machines import Agent, Firmware
from dsec.core.references import TAG_DEFAULT, parse_reference
from dsec.core.spec import Environment, NetworkMode, Substrate
from dsec.density.cgroups import CgroupPlan
from dsec.observe.logs import get_logger
from dsec.wire.agent import ClaimArgs
from dsec.wire.codec import pack

log = get_logger(__name__)

_MEMORY_BYTES_MIN: Final = 16 * MIB  # a firmware, and something to start
_AGENT_S: Final = 60.0
_TIME_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Facts:
    driver: FullDriver
    identity: dict[str, str]  # of everything that is the same for all templates
    reason: str  # why it is emulated


@dataclass(frozen=True, slots=True)
class _Wanted:
    image: MachineImage
    shape: Shape
    facts: _Facts
    saved: SavedMachine | None = None


class FullvmBackend(MachineBackend[FullvmRecord, FullvmInstance, _Facts, _Wanted]):
    PLURAL = "full machines"
    record_type = FullvmRecord

    def __init__(self, config: FullvmConfig, *, node: NodeId) -> None:
        self._config = config
        self.images = MachineImages(config.images_dir)
        templates = Templates(config.templates_dir, kept_max=config.templates_max, disk=machine.DISK_NAME)
        super().__init__(config, node=node, templates=templates)
        self._booting: set[asyncio.Task[Template]] = set()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            substrate=Substrate.FULLVM,
            networks=self._networks,
            network_reason=self._no_network,
            pause=True,
            snapshot=Keeps.DISK_MEMORY,
            fork=Keeps.DISK_MEMORY,
            survives_node=True,
            own_machine=True,
            links_by_agent=True,
            layers=False,
            screen=True,
            warm=True,
            memory_limit=True,
            cpu_limit=self._place.host.limits("cpu") is not None,
            pids_limit=False,
            disk_limit="disk",
            resource_view="live",
        )

    async def _prepare(self) -> _Facts:
        config = self._config
        qemu = find_qemu(config.qemu)
        find_binary("dsec-jail")
        chosen = await self._accelerator(qemu)
        await asyncio.to_thread(self._place.open)
        identity = {"generation": str(machine.GENERATION), "monitor": qemu.text, "accelerator": chosen.name}
        return _Facts(FullDriver(qemu, chosen.name, config.uefi), identity, chosen.reason)

    async def _accelerator(self, qemu: Qemu) -> Accelerator:
        """KVM is tried with a kernel of our own, which nothing else needs here. Raises HostError, UnsupportedError."""
        config = self._config
        if config.accelerator == "tcg":
            return Accelerator("tcg", "as configured")
        try:
            kernel = await asyncio.to_thread(
                lambda: find_kernel(config.cache_dir, config.kernel) or fetch_kernel(config.cache_dir, config.kernel)
            )
        except HostError as error:
            if config.accelerator == "kvm":
                raise
            return Accelerator("tcg", f"KVM was not tried: {error.message}")
        return await choose_accelerator(config.accelerator, qemu, kernel, cache=config.cache_dir)

    def _shown(self, facts: _Facts) -> Probe:
        emulated, keeps = facts.driver.accelerator == "tcg", facts.driver.qemu.keeps_templates
        shown = {
            "monitor": facts.driver.qemu.text,
            "processor": f"emulated: {facts.reason}" if emulated else "kvm",
            "uefi": _uefi_words(facts.driver),
            "templates": "read only" if keeps else "writable by monitors (QEMU before 8.2)",
        }
        return Probe(True, facts=shown, weak=weaknesses(emulated=emulated, keeps_templates=keeps))

    # ---- create ----------------------------------------------------------------------------------

    async def _wanted(self, instance: InstanceSpec) -> _Wanted:
        check_spec(instance)
        if instance.spec.network is not NetworkMode.NONE:
            await asyncio.to_thread(check_own_net, (await self._renewed()).driver.qemu)
        if instance.machine:
            return await self._wanted_from(instance)
        image = await asyncio.to_thread(self.images.get, image_name(instance.spec.environment))
        image = with_data(image, instance.layers)
        return _Wanted(image, shape_of(instance, image), await self._renewed())

    async def _wanted_from(self, instance: InstanceSpec) -> _Wanted:
        """A saved machine has its image with it."""
        facts = await self._renewed()
        saved = await asyncio.to_thread(self.saved.get, instance.machine, self._needs(facts))
        shape = msgspec.convert(saved.manifest.shape, Shape)
        check_same(shape, instance.spec)
        manifest = msgspec.convert(saved.manifest.more, Manifest)
        image = with_data(MachineImage(saved.id, saved.directory, manifest), instance.layers)
        return _Wanted(image, shape, facts, saved)

    async def _make(
        self, instance: InstanceSpec, wanted: _Wanted, record: FullvmRecord, cgroups: CgroupPlan
    ) -> FullvmInstance:
        if wanted.saved is not None:
            return await self._clone(instance, wanted, record, cgroups, wanted.saved.template)
        async with self._templates.held(lambda: self._template(wanted)) as template:
            record = msgspec.structs.replace(record, template=template.key)
            return await self._clone(instance, wanted, record, cgroups, template)

    async def _clone(
        self, instance: InstanceSpec, wanted: _Wanted, record: FullvmRecord, cgroups: CgroupPlan, template: Template
    ) -> FullvmInstance:
        driver, directory = wanted.facts.driver, Path(record.directory)
        await asyncio.to_thread(self._place.lay_out, record, cgroups)
        await asyncio.to_thread(driver.prepare_clone, directory, template, wanted.shape, record.uid)
        confines = self._confines(record, driver)
        confines, argv = driver.clone_plan(template, directory, wanted.image, wanted.shape, confines)
        process = driver.start(confines, argv)
        record = msgspec.structs.replace(record, pid=process.pid, start_ticks=process.start_ticks)
        made = FullvmInstance(self, record, process)
        async with self._starting(made, process):
            stand = instance.attach is not None
            made.take(await driver.start_clone(process, template, confines.sockets, confines.uid, stand=stand))
            await made.run_attached(instance.attach)
            await self._awaken(made, instance, wanted)
        if instance.spare and wanted.saved is None:
            made.spare_of = _kind(instance, wanted)
        return made

    async def _awaken(self, made: FullvmInstance, instance: InstanceSpec, wanted: _Wanted) -> None:
        if made.facts.agent is Agent.QGA:
            await _tell_time(Path(made.facts.sockets), made.facts.uid)
        if made.facts.agent is Agent.DSEC:
            args = None if instance.spare else claim_args(instance, wanted.image.manifest.env)
            await awaken(made, instance, args, wanted.saved, wait_s=_AGENT_S)

    def _confines(self, record: FullvmRecord, driver: FullDriver) -> Confines:
        return self._place.confines(record, kvm=driver.accelerator == "kvm")

    def _record(self, name: str, uid: int, cgroups: CgroupPlan, wanted: _Wanted) -> FullvmRecord:
        return FullvmRecord(
            sandbox=name,
            boot_id=self._place.boot_id,
            uid=uid,
            sockets=str(self._place.sockets_of(name)),
            directory=str(self._place.directory_of(name)),
            cgroup2=cgroups.cgroup2,
            cgroup1=cgroups.cgroup1,
            agent=wanted.shape.agent,
            saved=wanted.saved.id if wanted.saved is not None else "",
            shape=msgspec.to_builtins(wanted.shape),
            more=msgspec.to_builtins(wanted.image.manifest),
        )

    def _disk_of(self, saved: SavedMachine) -> MachineDisk:
        image = MachineImage(saved.id, saved.directory, msgspec.convert(saved.manifest.more, Manifest))
        below = (image.disk,) if image.disk.exists() else ()
        above = tuple(saved.directory / name for name in (machine.DISK_NAME, *saved.template.overlays))
        size = msgspec.convert(saved.manifest.shape, Shape).disk_bytes
        return MachineDisk(below, image.manifest.layers, above, image.manifest.format, size)

    def _needs(self, facts: _Facts) -> dict[str, str]:
        return facts.identity

    def _source(self, record: FullvmRecord, origin: Path, overlays: int) -> Source:
        assert self._facts is not None
        shape = msgspec.convert(record.shape, Shape)
        names = (machine.DISK_NAME, *(OVERLAY.format(number) for number in range(1, overlays + 1)))
        below = [Below(f"{TEMPLATE}/{name}", name, (origin / name,)) for name in names]
        if shape.above + 1 > len(record.more.get("layers", ())):  # its lowest file is no layer of the node
            below.append(Below(machine.BASE, "disk", (origin / "disk", *(image.disk for image in self.images.list()))))
        return Source(
            sandbox=record.sandbox,
            pid=record.pid,
            uid=record.uid,
            directory=Path(record.directory),
            disk=machine.DISK_NAME,
            memory_bytes=shape.memory_bytes,
            disk_bytes=shape.disk_bytes,
            below=below,
            overlays=overlays,
            copied=(machine.VARIABLES_NAME,) if shape.firmware is Firmware.UEFI else (),
            screen=True,
            memory_mode=self._facts.driver.memory_mode,
        )

    # ---- templates -------------------------------------------------------------------------------

    async def _template(self, wanted: _Wanted) -> Template:
        made_of = {**wanted.facts.identity, "shape": repr(wanted.shape), "image": wanted.shape.image}

        async def build(directory: Path) -> None:
            await self._build_template(directory, wanted)

        # A first boot takes longer than its first caller may wait for: it goes on for the next one.
        making = self._templates.get(template_key(made_of), made_of, build)
        task = asyncio.get_running_loop().create_task(making)
        self._booting.add(task)
        task.add_done_callback(self._booted)
        return await asyncio.shield(task)

    def _booted(self, task: asyncio.Task[Template]) -> None:
        self._booting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a machine did not boot", error=str(error))

    async def _build_template(self, directory: Path, wanted: _Wanted) -> None:
        """Booted until it is up."""
        driver = wanted.facts.driver
        async with self._nobodys(wanted) as record:
            confines = self._confines(record, driver)
            async with driver.booting(directory, wanted.image, wanted.shape, confines) as monitor:
                await self._until_up(wanted.shape.agent, confines.sockets, confines.uid)
                await asyncio.sleep(wanted.shape.boot_wait_s)
                await driver.save(monitor, directory)

    async def _until_up(self, agent: Agent, sockets: Path, owner: int) -> None:
        if agent is Agent.DSEC:
            ports = AgentPorts(sockets, owner=owner)
            try:
                client = await AgentClient.connect(
                    lambda factory: ports.connect(factory, timeout_s=self._config.boot_s),
                    sandbox="tpl",
                    open_timeout_s=self._config.boot_s,
                )
                try:
                    await client.usage()  # what it needs is in its memory then
                    await rehearse(client)
                finally:
                    client.close()
            finally:
                ports.close()
        elif agent is Agent.QGA:
            async with guest_agent(sockets / machine.QGA, owner=owner) as guest:
                await guest.wait_until_up(timeout_s=self._config.boot_s)

    # ---- spares ----------------------------------------------------------------------------------

    async def shape(self, instance: InstanceSpec) -> bytes | None:
        return _kind(instance, await self._wanted(instance))

    async def claim(self, spare: Instance, instance: InstanceSpec) -> FullvmInstance:
        """Its agent, if it has ours, names it, as told by the caller."""
        assert isinstance(spare, FullvmInstance)
        if not instance.machine and spare.spare_of != await self.shape(instance):
            raise LaunchError("the image has been made anew since the spare was", step="claim")
        self.instances[instance.id] = self.instances.pop(spare.id, spare)
        spare.become(msgspec.structs.replace(spare.facts, sandbox=instance.id))
        return spare

    def image_of(self, environment: Environment) -> MachineImage:
        return self.images.get(image_name(environment))

    @asynccontextmanager
    async def written(self, id: str) -> AsyncIterator[tuple[MachineImage, list[Path]]]:
        """The image that it began as, and its files above that, lowest first, which are there while the block runs; an
        image of another name will do, if it is the same. Raises ConflictError, GoneError."""
        made = self.instances.get(id)
        if made is None:
            raise GoneError("the machine runs no more", sandbox=id)
        record = made.facts

        async def find() -> Template:
            return self._templates.find(record.template)

        own = Path(record.directory, machine.DISK_NAME)
        if record.saved:
            with self.saved.held(record.saved):
                below = self.saved.get(record.saved, {}, whole=False).template
                names = (machine.DISK_NAME, *below.overlays)
                yield await self._image_of(record.shape.get("image")), [*(below.directory / n for n in names), own]
            return
        async with self._templates.held(find) as template:
            image = await self._image_of(self._templates.made_of(template.key).get("image"))
            yield image, [template.directory / machine.DISK_NAME, own]

    async def _image_of(self, sha256: str | None) -> MachineImage:
        images = await asyncio.to_thread(self.images.list)
        found = next((image for image in images if image.manifest.sha256 == sha256), None)
        if found is None:
            raise ConflictError("the image that the machine began as has been removed")
        return found

    # ---- what is there ---------------------------------------------------------------------------

    def _size(self, record: FullvmRecord) -> Shape:
        return msgspec.convert(record.shape, Shape)

    async def _stand(self, record: FullvmRecord, saved: SavedMachine, layers: tuple[Layer, ...]) -> MonitorProcess:
        assert self._facts is not None
        driver, template = self._facts.driver, saved.template
        manifest = msgspec.convert(record.more, Manifest)
        image = with_data(MachineImage(saved.id, saved.directory, manifest), layers)
        confines = self._confines(record, driver)
        confines, argv = driver.clone_plan(template, Path(record.directory), image, self._size(record), confines)
        process = driver.start(confines, argv)
        try:
            monitor = await driver.start_clone(process, template, confines.sockets, confines.uid, stand=True)
        except BaseException:
            await asyncio.shield(process.end())
            process.forget()
            raise
        monitor.close()
        return process

    def _adopted(self, record: FullvmRecord, process: MonitorProcess | None) -> FullvmInstance:
        return FullvmInstance(self, record, process)

    async def keep_layers(self, digests: Collection[str]) -> None:
        """Machines are made of images, whose templates go with them; running clones hold what they use."""
        await asyncio.to_thread(self._forget_images)

    def _forget_images(self) -> None:
        kept = {image.manifest.sha256 for image in self.images.list()}
        self._templates.drop_made_of(lambda made_of: made_of.get("image") in kept)

    async def sweep(self, records: Collection[bytes]) -> None:
        await super().sweep(records)
        await asyncio.to_thread(self.images.sweep)

    async def close(self) -> None:
        for task in list(self._booting):
            task.cancel()
        await asyncio.gather(*self._booting, return_exceptions=True)
        await super().close()


def _kind(instance: InstanceSpec, wanted: _Wanted) -> bytes:
    """Of a spare: what it may become."""
    return pack([repr(wanted.shape), instance.spec.cpu])


def image_name(environment: Environment) -> str:
    """Raises InvalidArgumentError: an image is one, and has neither tags nor parts."""
    reference = parse_reference(environment.base)
    if len(environment.names()) > 1 or reference.digest is not None or reference.tag != TAG_DEFAULT:
        raise InvalidArgumentError(
            "a full machine begins as one machine image, by its plain name", hint="`dsec vm ls` lists them"
        )
    return reference.name


def with_data(image: MachineImage, layers: Sequence[Layer]) -> MachineImage:
    """Raises ConflictError when the image is another one than that whose layers were got."""
    if tuple(layer.digest for layer in layers) != image.manifest.layers:
        raise ConflictError(f"the image {image.name} has just been made anew", hint="ask again")
    return replace(image, data=tuple(layer.blob for layer in layers if layer.blob is not None))


def check_spec(instance: InstanceSpec) -> None:
    """Raises UnsupportedError or InvalidArgumentError for what no full machine can give."""
    spec = instance.spec
    if instance.volumes or spec.volumes:
        raise UnsupportedError("full machines have no volumes", hint="use backend='container'")
    if spec.memory_bytes < _MEMORY_BYTES_MIN:
        raise InvalidArgumentError(f"a full machine has at least {_MEMORY_BYTES_MIN // MIB} MiB of memory")


def shape_of(instance: InstanceSpec, image: MachineImage) -> Shape:
    """Raises InvalidArgumentError."""
    spec, manifest = instance.spec, image.manifest
    if spec.disk_bytes is not None and spec.disk_bytes < manifest.disk_bytes:
        raise InvalidArgumentError(
            f"the disk of {image.name} has {manifest.disk_bytes} bytes, and a machine of it no fewer"
        )
    return Shape(
        image=manifest.sha256,
        format=manifest.format,
        firmware=manifest.firmware,
        agent=manifest.agent,
        bus=manifest.bus,
        boot_wait_s=manifest.boot_wait_s,
        command_line=manifest.command_line,
        processors=processors_of(spec),
        memory_bytes=memory_of(spec),
        disk_bytes=disk_of(spec.disk_bytes or manifest.disk_bytes),
        above=len(image.files) - 1,
        network=spec.network is NetworkMode.PROXIED,
    )


def claim_args(instance: InstanceSpec, env: Mapping[str, str]) -> ClaimArgs:
    return ClaimArgs(
        sandbox=instance.id,
        env={key.encode(): value.encode("utf-8", "surrogateescape") for key, value in {**env, **instance.env}.items()},
        user=instance.user,
        workdir=instance.workdir.encode("utf-8", "surrogateescape") if instance.workdir else None,
        hostname=instance.hostname,
    )


async def _tell_time(sockets: Path, owner: int) -> None:
    with contextlib.suppress(MonitorError, TimeoutError, OSError):
        async with guest_agent(sockets / machine.QGA, owner=owner) as guest:
            await guest.set_time(time.time(), timeout_s=_TIME_S)


def _uefi_words(driver: FullDriver) -> str:
    try:
        return str(driver.uefi().code)
    except DsecError as error:
        return f"none: {error.message}"
