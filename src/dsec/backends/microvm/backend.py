"""Microvms: create from templates, adopt, discard."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.agent.client import AgentClient
from dsec.backends.base import Capabilities, Instance, InstanceSpec, Intend, Keeps, Probe, Weakness
from dsec.backends.microvm.config import MicrovmConfig
from dsec.backends.microvm.instance import MicrovmInstance
from dsec.backends.microvm.monitors import choose_monitor, control_of
from dsec.backends.microvm.record import MicrovmRecord, parse_record
from dsec.backends.vm.disks import check_layers, has_blob, layer_binds
from dsec.backends.vm.drivers import VmDriver
from dsec.backends.vm.firecracker_driver import watch_memory
from dsec.backends.vm.machine import Shape
from dsec.backends.vm.monitor import Confines
from dsec.backends.vm.place import Place, holder, launch_error, template_name
from dsec.backends.vm.templates import Template, Templates, template_key
from dsec.core.errors import (
    DsecError,
    InvalidArgumentError,
    LaunchError,
    StorageError,
    UnsupportedError,
)
from dsec.core.ids import NodeId, SandboxId
from dsec.core.limits import MIB
from dsec.core.spec import NetworkMode, SandboxSpec, Substrate
from dsec.density.cgroups import (
    CgroupPlan,
)
from dsec.wire.agent import ClaimArgs
from dsec.wire.codec import pack

_MEMORY_BYTES_MIN: Final = 96 * MIB  # a kernel, an agent, and something to run
_PROCESSORS_MAX: Final = 64
_SEED_BYTES: Final = 64
_AGENT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Facts:
    driver: VmDriver[Any]
    identity: dict[str, str]  # of everything that is the same for all templates
    shown: dict[str, str]
    weak: dict[str, Weakness]


class MicrovmBackend:
    """One per node. Instances run on when it is closed."""

    def __init__(self, config: MicrovmConfig, *, node: NodeId) -> None:
        self._config = config
        self._place = Place(config, node)
        self._templates = Templates(config.templates_dir, kept_max=config.templates_max)
        self._facts: _Facts | None = None
        self._opening = asyncio.Lock()
        self._probe: Probe | None = None
        self.instances: dict[str, MicrovmInstance] = {}  # by sandbox

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            substrate=Substrate.MICROVM,
            networks=frozenset({NetworkMode.NONE}),
            pause=True,
            snapshot=Keeps.NOTHING,
            fork=Keeps.NOTHING,
            survives_node=True,
            own_machine=True,
            warm=True,
            memory_limit=True,
            cpu_limit=self._place.host.limits("cpu") is not None,
            pids_limit=True,
            disk_limit="disk",
            volumes=False,
            resource_view="live",
        )

    async def probe(self) -> Probe:
        if self._probe is None:
            self._probe = await self._try()
        return self._probe

    async def _try(self) -> Probe:
        if os.geteuid() != 0:
            return Probe(False, "microvms need root on the node", "start `dsec up` as root")
        try:
            facts = await self._open()
        except DsecError as error:
            return Probe(False, error.message, error.hint)
        return Probe(True, facts=facts.shown, weak=facts.weak)

    # ---- create ----------------------------------------------------------------------------------

    async def create(self, instance: InstanceSpec, *, intend: Intend, deadline_s: float) -> MicrovmInstance:
        shape = shape_of(instance, self._config)
        facts = await self._open()
        cgroups = self._cgroups(instance.id, shape, instance.spec)
        uid = self._place.ids.take(holder(cgroups))
        record = self._record(instance.id, uid, cgroups, facts.driver)
        try:
            await intend(record.to_bytes())
        except BaseException:
            self._place.ids.give_back(uid)
            raise
        try:
            async with asyncio.timeout(deadline_s):
                return await self._make(instance, shape, facts, record, cgroups)
        except asyncio.CancelledError:
            self._place.clean_later(self.remove(record))
            raise
        except Exception as error:
            # Its caller may be cancelled now, too.
            await asyncio.shield(self._place.clean_later(self.remove(record)))
            raise launch_error(instance.id, error) from error

    async def _make(
        self, instance: InstanceSpec, shape: Shape, facts: _Facts, record: MicrovmRecord, cgroups: CgroupPlan
    ) -> MicrovmInstance:
        layers = await asyncio.to_thread(layer_binds, instance.layers, self._config.images_dir)
        async with self._templates.held(lambda: self._template(shape, layers, facts)) as template:
            return await self._clone(instance, shape, facts, record, cgroups, template, layers)

    async def _clone(
        self,
        instance: InstanceSpec,
        shape: Shape,
        facts: _Facts,
        record: MicrovmRecord,
        cgroups: CgroupPlan,
        template: Template,
        layers: list[Any],
    ) -> MicrovmInstance:
        driver = facts.driver
        await asyncio.to_thread(self._lay_out, record, shape, cgroups, template, driver)
        confines = self._confines(record, driver)
        process = driver.spawn(template, Path(record.directory), shape, confines, layers)
        record = msgspec.structs.replace(
            record, pid=process.pid, start_ticks=process.start_ticks, template=template.key
        )
        found = driver.control(confines.sockets, owner=record.uid)
        made = MicrovmInstance(self, record, process, found, page_out=self._config.page_out)
        self.instances[record.sandbox] = made
        try:
            try:
                await driver.go_on(found, process, template, confines)
                await self._awaken(made, instance)
            except LaunchError:
                self._templates.drop(template.key)  # it may be the template's fault: the next one makes another
                raise
        except BaseException:
            await asyncio.shield(process.end())
            made.abandon()
            self.instances.pop(record.sandbox, None)
            raise
        return made

    async def _awaken(self, made: MicrovmInstance, instance: InstanceSpec) -> None:
        """Before anything else runs in it: its clock, its randomness, its name. All clones have been one machine."""
        try:
            client = await AgentClient.connect(made.connect, sandbox=instance.id, open_timeout_s=_AGENT_S)
        except DsecError as error:
            raise LaunchError(f"the agent of a clone does not answer: {error.message}", step="agent") from error
        try:
            await client.clock(paused_s=0.0, wall_s=time.time())
            await client.reseed(secrets.token_bytes(_SEED_BYTES))
            if not instance.spare:
                await client.claim(claim_args(instance))
        finally:
            client.close()

    def _lay_out(
        self, record: MicrovmRecord, shape: Shape, cgroups: CgroupPlan, template: Template, driver: VmDriver[Any]
    ) -> None:
        self._place.lay_out(record, cgroups)
        driver.prepare_clone(template, Path(record.directory), shape, record.uid)

    def _confines(self, record: MicrovmRecord, driver: VmDriver[Any]) -> Confines:
        return self._place.confines(record, kvm=driver.accelerator == "kvm")

    # ---- templates -------------------------------------------------------------------------------

    async def _template(self, shape: Shape, layers: list[Any], facts: _Facts) -> Template:
        made_of = {**facts.identity, "shape": repr(shape), "layers": " ".join(digest for digest, _ in shape.layers)}
        key = template_key(made_of)

        async def build(directory: Path) -> None:
            await self._build_template(directory, shape, layers, facts)

        return await self._templates.get(key, made_of, build)

    async def _build_template(self, directory: Path, shape: Shape, layers: list[Any], facts: _Facts) -> None:
        """Booted as a sandbox of nobody, with its own range, cgroups and sockets, until its agent answers."""
        name = template_name()
        cgroups = self._cgroups(name, shape, None)
        uid = self._place.ids.take(holder(cgroups))
        record = self._record(name, uid, cgroups, facts.driver)
        try:
            await asyncio.to_thread(self._place.lay_out, record, cgroups)
            confines = self._confines(record, facts.driver)
            async with facts.driver.booting(directory, shape, confines, layers) as found:
                client = await AgentClient.connect(
                    lambda factory: found.connect(factory, timeout_s=self._config.boot_s),
                    sandbox=name,
                    open_timeout_s=self._config.boot_s,
                )
                await client.usage()  # what it needs is in its memory then
                client.close()
                await facts.driver.save(found, directory)
        finally:
            await asyncio.shield(self._place.clean_later(self._place.remove(record)))

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

    # ---- adopt, discard, remove ------------------------------------------------------------------

    async def adopt(self, id: SandboxId, record: bytes) -> MicrovmInstance:
        await self._open()
        known = parse_record(record)
        process = self._place.adopt(known)
        watch_memory(process, Path(known.sockets), known.cgroups)
        control = control_of(known.monitor, Path(known.sockets), owner=known.uid)
        instance = MicrovmInstance(self, known, process, control, page_out=self._config.page_out)
        self.instances[known.sandbox] = instance
        return instance

    async def discard(self, id: SandboxId, record: bytes) -> None:
        await self._open()
        known = parse_record(record)
        await self._place.end(known)
        await self.remove(known)

    async def remove(self, record: MicrovmRecord) -> None:
        """Nothing of it is left on the host afterwards. Idempotent. Raises HostError if something resists."""
        if (known := self.instances.pop(record.sandbox, None)) is not None:
            known.abandon()
        await self._place.remove(record)

    async def keep_layers(self, digests: Collection[str]) -> None:
        """Images that were made of layers go with them, and so do the templates: running clones hold what they use."""
        kept = set(digests)
        await asyncio.to_thread(self._forget_layers, kept)

    def _forget_layers(self, kept: set[str]) -> None:
        self._templates.drop_made_of(lambda made_of: set(made_of.get("layers", "").split()) <= kept)
        for image in self._config.images_dir.glob("*.erofs"):
            if image.stem not in kept:
                image.unlink(missing_ok=True)

    def names(self, records: Collection[bytes]) -> frozenset[str]:
        known = [parse_record(record) for record in records]
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

    # ---- opening ---------------------------------------------------------------------------------

    async def _open(self) -> _Facts:
        if self._facts is not None:
            return self._facts
        async with self._opening:
            if self._facts is None:
                self._facts = await self._prepare()
        return self._facts

    async def _prepare(self) -> _Facts:
        chosen = await choose_monitor(self._config)
        await asyncio.to_thread(self._place.open)
        self._config.images_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _Facts(chosen.driver, chosen.identity, chosen.shown, chosen.weak)

    # ---- plain data ------------------------------------------------------------------------------

    def _cgroups(self, name: str, shape: Shape, spec: SandboxSpec | None) -> CgroupPlan:
        return self._place.cgroups(
            name,
            processors=shape.processors,
            memory_bytes=shape.memory_bytes,
            cpu=spec.cpu if spec is not None else float(shape.processors),
        )

    def _record(self, name: str, uid: int, cgroups: CgroupPlan, driver: VmDriver[Any]) -> MicrovmRecord:
        return MicrovmRecord(
            sandbox=name,
            monitor=driver.name,
            boot_id=self._place.boot_id,
            uid=uid,
            sockets=str(self._place.sockets_of(name)),
            directory=str(self._place.directory_of(name)),
            cgroup2=cgroups.cgroup2,
            cgroup1=cgroups.cgroup1,
        )


def shape_of(instance: InstanceSpec, config: MicrovmConfig) -> Shape:
    """Raises UnsupportedError or InvalidArgumentError for what a microvm cannot give."""
    spec = instance.spec
    if spec.network is not NetworkMode.NONE:
        raise UnsupportedError(f"microvms have no network mode {spec.network.value!r} yet", hint="use network='none'")
    if instance.volumes:
        raise UnsupportedError("microvms have no volumes yet", hint="use backend='container'")
    if spec.memory_bytes < _MEMORY_BYTES_MIN:
        raise InvalidArgumentError(f"a microvm has at least {_MEMORY_BYTES_MIN // MIB} MiB of memory")
    check_layers(instance.layers)
    return Shape(
        processors=max(1, min(_PROCESSORS_MAX, math.ceil(spec.cpu))),
        memory_bytes=-(-spec.memory_bytes // (2 * MIB)) * 2 * MIB,
        disk_bytes=-(-(spec.disk_bytes or config.disk_bytes) // MIB) * MIB,
        pids=spec.pids_max,
        layers=tuple((layer.digest, has_blob(layer)) for layer in instance.layers),
    )


def claim_args(instance: InstanceSpec) -> ClaimArgs:
    return ClaimArgs(
        sandbox=instance.id,
        env={key.encode(): value.encode("utf-8", "surrogateescape") for key, value in instance.env.items()},
        user=instance.user,
        workdir=instance.workdir.encode("utf-8", "surrogateescape") if instance.workdir else None,
        hostname=instance.hostname,
    )
