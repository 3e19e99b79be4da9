"""Full machines: create from templates of images, adopt, discard."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dsec.agent.client import AgentClient
from dsec.backends.base import Capabilities, Instance, InstanceSpec, Intend, Probe
from dsec.backends.fullvm import machine
from dsec.backends.fullvm.config import FullvmConfig
from dsec.backends.fullvm.driver import FullDriver
from dsec.backends.fullvm.guestagent import guest_agent
from dsec.backends.fullvm.images import MachineImage, MachineImages
from dsec.backends.fullvm.instance import FullvmInstance
from dsec.backends.fullvm.machine import Shape
from dsec.backends.fullvm.record import FullvmRecord
from dsec.backends.vm.accelerator import Accelerator, choose_accelerator
from dsec.backends.vm.kernel import fetch_kernel, find_kernel
from dsec.backends.vm.monitor import Confines
from dsec.backends.vm.place import Place, holder, launch_error, template_name
from dsec.backends.vm.ports import AgentPorts
from dsec.backends.vm.qemu import Qemu, find_qemu, weaknesses
from dsec.backends.vm.qmp import MonitorError
from dsec.backends.vm.record import parse_record
from dsec.backends.vm.templates import Template, Templates, template_key
from dsec.binaries import find_binary
from dsec.core.errors import (
    DsecError,
    HostError,
    InvalidArgumentError,
    LaunchError,
    StorageError,
    UnsupportedError,
)
from dsec.core.ids import NodeId, SandboxId
from dsec.core.limits import MIB
from dsec.core.machines import Agent
from dsec.core.references import TAG_DEFAULT, parse_reference
from dsec.core.spec import Environment, NetworkMode, Substrate
from dsec.density.cgroups import CgroupPlan
from dsec.observe.logs import get_logger
from dsec.wire.agent import ClaimArgs

log = get_logger(__name__)

_MEMORY_BYTES_MIN: Final = 16 * MIB  # a firmware, and something to start
_PROCESSORS_MAX: Final = 64
_SEED_BYTES: Final = 64
_AGENT_S: Final = 60.0
_TIME_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Facts:
    driver: FullDriver
    identity: dict[str, str]  # of everything that is the same for all templates


class FullvmBackend:
    """One per node. Instances run on when it is closed."""

    def __init__(self, config: FullvmConfig, *, node: NodeId) -> None:
        self._config = config
        self._place = Place(config, node)
        self.images = MachineImages(config.images_dir)
        self._templates = Templates(config.templates_dir, kept_max=config.templates_max, disk=machine.DISK_NAME)
        self._facts: _Facts | None = None
        self._reason = ""
        self._opening = asyncio.Lock()
        self._probe: Probe | None = None
        self.instances: dict[str, FullvmInstance] = {}  # by sandbox
        self._booting: set[asyncio.Task[Template]] = set()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            substrate=Substrate.FULLVM,
            networks=frozenset({NetworkMode.NONE}),
            pause=True,
            survives_node=True,
            own_machine=True,
            layers=False,
            screen=True,
            memory_limit=True,
            cpu_limit=self._place.host.limits("cpu") is not None,
            pids_limit=False,
            disk_limit="disk",
            resource_view="live",
        )

    async def probe(self) -> Probe:
        if self._probe is None:
            self._probe = await self._try()
        return self._probe

    async def _try(self) -> Probe:
        if os.geteuid() != 0:
            return Probe(False, "full machines need root on the node", "start `dsec up` as root")
        try:
            facts = await self._open()
        except DsecError as error:
            return Probe(False, error.message, error.hint)
        emulated = facts.driver.accelerator == "tcg"
        shown = {
            "monitor": facts.driver.qemu.text,
            "processor": f"emulated: {self._reason}" if emulated else "kvm",
            "uefi": _uefi_words(facts.driver),
            "templates": "read only" if facts.driver.qemu.keeps_templates else "writable by monitors (QEMU before 8.2)",
        }
        keeps = facts.driver.qemu.keeps_templates
        return Probe(True, facts=shown, weak=weaknesses(emulated=emulated, keeps_templates=keeps))

    # ---- create ----------------------------------------------------------------------------------

    async def create(self, instance: InstanceSpec, *, intend: Intend, deadline_s: float) -> FullvmInstance:
        check_spec(instance)
        image = await asyncio.to_thread(self.images.get, image_name(instance.spec.environment))
        shape = shape_of(instance, image)
        facts = await self._open()
        place = self._place
        cgroups = self._cgroups(instance.id, shape, instance.spec.cpu)
        uid = place.ids.take(holder(cgroups))
        record = self._record(instance.id, uid, cgroups, shape.agent)
        try:
            await intend(record.to_bytes())
        except BaseException:
            place.ids.give_back(uid)
            raise
        try:
            async with asyncio.timeout(deadline_s):
                return await self._make(instance, image, shape, facts, record, cgroups)
        except asyncio.CancelledError:
            place.clean_later(self.remove(record))
            raise
        except Exception as error:
            # Its caller may be cancelled now, too.
            await asyncio.shield(place.clean_later(self.remove(record)))
            raise launch_error(instance.id, error) from error

    async def _make(
        self,
        instance: InstanceSpec,
        image: MachineImage,
        shape: Shape,
        facts: _Facts,
        record: FullvmRecord,
        cgroups: CgroupPlan,
    ) -> FullvmInstance:
        async with self._templates.held(lambda: self._template(image, shape, facts)) as template:
            return await self._clone(instance, image, shape, facts, record, cgroups, template)

    async def _clone(
        self,
        instance: InstanceSpec,
        image: MachineImage,
        shape: Shape,
        facts: _Facts,
        record: FullvmRecord,
        cgroups: CgroupPlan,
        template: Template,
    ) -> FullvmInstance:
        driver, directory = facts.driver, Path(record.directory)
        await asyncio.to_thread(self._place.lay_out, record, cgroups)
        await asyncio.to_thread(driver.prepare_clone, directory, template, shape, record.uid)
        confines = self._confines(record, driver)
        confines, argv = driver.clone_plan(template, directory, image, shape, confines)
        process = driver.start(confines, argv)
        record = msgspec.structs.replace(
            record, pid=process.pid, start_ticks=process.start_ticks, template=template.key
        )
        made = FullvmInstance(self, record, process)
        self.instances[record.sandbox] = made
        try:
            try:
                made.take(await driver.start_clone(process, template, confines.sockets, confines.uid))
                await self._awaken(made, instance, image)
            except LaunchError:
                self._templates.drop(template.key)  # it may be the template's fault: the next one makes another
                raise
        except BaseException:
            await asyncio.shield(process.end())
            made.abandon()
            self.instances.pop(record.sandbox, None)
            raise
        return made

    async def _awaken(self, made: FullvmInstance, instance: InstanceSpec, image: MachineImage) -> None:
        """Before anything else runs in it: its clock, its randomness, its name. All clones have been one machine."""
        if made.facts.agent is Agent.QGA:
            await _tell_time(Path(made.facts.sockets), made.facts.uid)
        if made.facts.agent is not Agent.DSEC:
            return
        try:
            client = await AgentClient.connect(made.connect, sandbox=instance.id, open_timeout_s=_AGENT_S)
        except DsecError as error:
            raise LaunchError(f"the agent of a clone does not answer: {error.message}", step="agent") from error
        try:
            await client.clock(paused_s=0.0, wall_s=time.time())
            await client.reseed(secrets.token_bytes(_SEED_BYTES))
            await client.claim(claim_args(instance, image.manifest.env))
        finally:
            client.close()

    # ---- templates -------------------------------------------------------------------------------

    async def _template(self, image: MachineImage, shape: Shape, facts: _Facts) -> Template:
        made_of = {**facts.identity, "shape": repr(shape), "image": shape.image}
        key = template_key(made_of)

        async def build(directory: Path) -> None:
            await self._build_template(directory, image, shape, facts)

        # A first boot takes longer than its first caller may wait for: it goes on for the next one.
        task = asyncio.get_running_loop().create_task(self._templates.get(key, made_of, build))
        self._booting.add(task)
        task.add_done_callback(self._booted)
        return await asyncio.shield(task)

    def _booted(self, task: asyncio.Task[Template]) -> None:
        self._booting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a machine did not boot", error=str(error))

    async def _build_template(self, directory: Path, image: MachineImage, shape: Shape, facts: _Facts) -> None:
        """Booted as a sandbox of nobody, with its own range, cgroups and sockets, until it is up."""
        name = template_name()
        cgroups = self._cgroups(name, shape, float(shape.processors))
        uid = self._place.ids.take(holder(cgroups))
        record = self._record(name, uid, cgroups, shape.agent)
        try:
            await asyncio.to_thread(self._place.lay_out, record, cgroups)
            confines = self._confines(record, facts.driver)
            async with facts.driver.booting(directory, image, shape, confines) as monitor:
                await self._until_up(shape.agent, confines.sockets, uid)
                await asyncio.sleep(shape.boot_wait_s)
                await facts.driver.save(monitor, directory)
        finally:
            await asyncio.shield(self._place.clean_later(self._place.remove(record)))

    async def _until_up(self, agent: Agent, sockets: Path, owner: int) -> None:
        if agent is Agent.DSEC:
            ports = AgentPorts(sockets, owner=owner)
            try:
                client = await AgentClient.connect(
                    lambda factory: ports.connect(factory, timeout_s=self._config.boot_s),
                    sandbox="tpl",
                    open_timeout_s=self._config.boot_s,
                )
                await client.usage()  # what it needs is in its memory then
                client.close()
            finally:
                ports.close()
        elif agent is Agent.QGA:
            async with guest_agent(sockets / machine.QGA, owner=owner) as guest:
                await guest.wait_until_up(timeout_s=self._config.boot_s)

    # ---- spares: a clone is made as fast -----------------------------------------------------------

    async def shape(self, instance: InstanceSpec) -> bytes | None:
        check_spec(instance)
        return None

    async def claim(self, spare: Instance, instance: InstanceSpec) -> Instance:
        raise LaunchError("full machines have no spares", step="claim")

    # ---- adopt, discard, remove ------------------------------------------------------------------

    async def adopt(self, id: SandboxId, record: bytes) -> FullvmInstance:
        await self._open()
        known = parse_record(record, FullvmRecord)
        process = self._place.adopt(known)
        instance = FullvmInstance(self, known, process)
        self.instances[known.sandbox] = instance
        return instance

    async def discard(self, id: SandboxId, record: bytes) -> None:
        await self._open()
        known = parse_record(record, FullvmRecord)
        await self._place.end(known)
        await self.remove(known)

    async def remove(self, record: FullvmRecord) -> None:
        """Nothing of it is left on the host afterwards. Idempotent. Raises HostError if something resists."""
        if (known := self.instances.pop(record.sandbox, None)) is not None:
            known.abandon()
        await self._place.remove(record)

    async def keep_layers(self, digests: Collection[str]) -> None:
        """Machines are made of images, whose templates go with them; running clones hold what they use."""
        await asyncio.to_thread(self._forget_images)

    def _forget_images(self) -> None:
        kept = {image.manifest.sha256 for image in self.images.list()}
        self._templates.drop_made_of(lambda made_of: made_of.get("image") in kept)

    def names(self, records: Collection[bytes]) -> frozenset[str]:
        known = [parse_record(record, FullvmRecord) for record in records]
        return frozenset(Path(path).name for one in known for path in (one.directory, one.sockets))

    async def sweep(self, records: Collection[bytes]) -> None:
        try:
            known = self.names(records)
        except StorageError:
            return  # whose they are cannot be told
        await self._place.sweep(known)
        await asyncio.to_thread(self._templates.sweep)
        await asyncio.to_thread(self.images.sweep)

    async def close(self) -> None:
        for task in list(self._booting):
            task.cancel()
        await asyncio.gather(*self._booting, return_exceptions=True)
        for instance in list(self.instances.values()):
            instance.abandon()
        self.instances.clear()
        await self._place.close()

    # ---- inside ----------------------------------------------------------------------------------

    async def _open(self) -> _Facts:
        if self._facts is not None:
            return self._facts
        async with self._opening:
            if self._facts is None:
                self._facts = await self._prepare()
        return self._facts

    async def _prepare(self) -> _Facts:
        config = self._config
        qemu = find_qemu(config.qemu)
        find_binary("dsec-jail")
        chosen = await self._accelerator(qemu)
        self._reason = chosen.reason
        await asyncio.to_thread(self._place.open)
        identity = {"generation": str(machine.GENERATION), "monitor": qemu.text, "accelerator": chosen.name}
        return _Facts(FullDriver(qemu, chosen.name, config.uefi), identity)

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

    def _confines(self, record: FullvmRecord, driver: FullDriver) -> Confines:
        return self._place.confines(record, kvm=driver.accelerator == "kvm")

    def _cgroups(self, name: str, shape: Shape, cpu: float) -> CgroupPlan:
        return self._place.cgroups(name, processors=shape.processors, memory_bytes=shape.memory_bytes, cpu=cpu)

    def _record(self, name: str, uid: int, cgroups: CgroupPlan, agent: Agent) -> FullvmRecord:
        return FullvmRecord(
            sandbox=name,
            boot_id=self._place.boot_id,
            uid=uid,
            sockets=str(self._place.sockets_of(name)),
            directory=str(self._place.directory_of(name)),
            cgroup2=cgroups.cgroup2,
            cgroup1=cgroups.cgroup1,
            agent=agent,
        )


def image_name(environment: Environment) -> str:
    """Raises InvalidArgumentError: an image is one, and has neither tags nor parts."""
    reference = parse_reference(environment.base)
    if len(environment.names()) > 1 or reference.digest is not None or reference.tag != TAG_DEFAULT:
        raise InvalidArgumentError(
            "a full machine begins as one machine image, by its plain name", hint="`dsec vm ls` lists them"
        )
    return reference.name


def check_spec(instance: InstanceSpec) -> None:
    """Raises UnsupportedError or InvalidArgumentError for what no full machine can give."""
    spec = instance.spec
    if spec.network is not NetworkMode.NONE:
        raise UnsupportedError(
            f"full machines have no network mode {spec.network.value!r} yet", hint="use network='none'"
        )
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
        processors=max(1, min(_PROCESSORS_MAX, math.ceil(spec.cpu))),
        memory_bytes=-(-spec.memory_bytes // (2 * MIB)) * 2 * MIB,
        disk_bytes=-(-(spec.disk_bytes or manifest.disk_bytes) // MIB) * MIB,
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
