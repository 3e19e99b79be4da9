"""Containers for calls: made by the node like spares, and in the journal as such, so that none outlives its service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dsec.agent.client import AgentClient
from dsec.backends.base import Backend, InstanceSpec
from dsec.backends.fncall.config import PoolConfig, Qos
from dsec.backends.fncall.worker import Launched
from dsec.core import limits
from dsec.core.errors import UnsupportedError
from dsec.core.ids import new_sandbox_id
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.node.admission import Room, refusal
from dsec.node.devices import Devices
from dsec.node.environments import Environments
from dsec.node.removal import Removal
from dsec.node.rows import SpareRow
from dsec.node.services import Services
from dsec.node.tasks import Tasks

_LAUNCH_S = 60.0
_PIDS = limits.CALL_PIDS_MAX + 64  # of a call, and of what serves it


class CallPlaces:
    """`launch` is what the call service makes its places with."""

    def __init__(
        self,
        services: Services,
        backends: Callable[[Substrate], Backend],
        environments: Environments,
        room: Callable[[], Room],
        boot_id: str,
        devices: Devices,
    ) -> None:
        self._services = services
        self._backends = backends
        self._environments = environments
        self._room = room
        self._boot_id = boot_id
        self._devices = devices
        self._tasks = Tasks("places for calls")
        self._removal = Removal(services, self._tasks, backends)

    async def launch(self, environment: Environment, config: PoolConfig) -> Launched:
        """Raises EnvironmentNotFoundError, CapacityError, LaunchError; nothing is left then."""
        journal = self._services.journal
        spec = SandboxSpec(
            environment=environment,
            cpu=config.place_cpu,
            memory_bytes=config.place_memory_bytes,
            pids_max=_PIDS,
        )
        refused = refusal(spec, self._room())
        if refused is not None:
            raise refused
        backend = self._backends(Substrate.CONTAINER)
        taken = self._take_devices(backend, config)
        try:
            devices = await asyncio.to_thread(self._devices.find, taken)
            resolved = await self._environments.acquire(environment)
        except BaseException:
            self._devices.give_back(taken, config.device_mode)
            raise
        env = {**dict(devices.env), **resolved.env}
        id = new_sandbox_id(journal.node_id)
        row: SpareRow | None = None

        async def intend(record: bytes) -> None:
            nonlocal row
            row = SpareRow(id=id, substrate=str(Substrate.CONTAINER), boot_id=self._boot_id, record=record)
            await journal.intend_spare(row)

        client: AgentClient | None = None
        try:
            if not backend.capabilities.memory_limit:
                raise UnsupportedError(
                    "calls need a limit of memory, which this host does not have", hint="dsec doctor"
                )
            made = InstanceSpec(
                id=id,
                node=journal.node_id,
                spec=spec,
                layers=resolved.layers,
                env=env,
                user=None,
                workdir=None,
                upper_in_memory=True,
                background=config.qos is Qos.BACKGROUND,
                cpus=config.cpus,
                devices=devices.nodes,
                volumes=devices.mounts,
            )
            instance = await backend.create(made, intend=intend, deadline_s=_LAUNCH_S)
            client = await AgentClient.connect(instance.connect, sandbox=id)
        except BaseException:
            if client is not None:
                client.close()
            self._tasks.spawn(self._undo(row, resolved.hold.release, taken, config), finishes=True)
            raise

        async def end() -> None:
            await self._removal.until_done(instance.destroy, id)
            resolved.hold.release()
            self._devices.give_back(taken, config.device_mode)

        return Launched(
            instance=instance,
            client=client,
            memory_bytes=spec.memory_bytes,
            env=env,
            remove=lambda: self._tasks.spawn(end(), finishes=True),
        )

    def _take_devices(self, backend: Backend, config: PoolConfig) -> tuple[str, ...]:
        if not config.devices:
            return ()
        if not backend.capabilities.devices:
            raise UnsupportedError("this node gives no devices to calls")
        return self._devices.take(config.devices, config.device_mode)

    async def _undo(
        self, row: SpareRow | None, release: Callable[[], None], taken: tuple[str, ...], config: PoolConfig
    ) -> None:
        """Of a place that did not come to be. Its devices are another's once it is gone for sure."""
        release()
        if row is not None:
            await self._removal.discard(row)
        self._devices.give_back(taken, config.device_mode)

    async def close(self) -> None:
        """After the call service: waits until what it gave up is removed."""
        self._removal.closed = True
        await self._tasks.close()
