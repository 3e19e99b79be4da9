"""Containers for calls: made by the node like spares, and in the journal as such, so that none outlives its service."""

from __future__ import annotations

from collections.abc import Callable

from dsec.agent.client import AgentClient
from dsec.backends.base import Backend, InstanceSpec
from dsec.backends.fncall.calls import CallsConfig
from dsec.backends.fncall.worker import Launched
from dsec.core import limits
from dsec.core.errors import UnsupportedError
from dsec.core.ids import new_sandbox_id
from dsec.core.spec import Environment, SandboxSpec, Substrate
from dsec.node.admission import Room, refusal
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
        config: CallsConfig,
    ) -> None:
        self._services = services
        self._backends = backends
        self._environments = environments
        self._room = room
        self._boot_id = boot_id
        self._config = config
        self._tasks = Tasks("places for calls")
        self._removal = Removal(services, self._tasks, backends)

    async def launch(self, environment: Environment) -> Launched:
        """Raises EnvironmentNotFoundError, CapacityError, LaunchError; nothing is left then."""
        config, journal = self._config, self._services.journal
        spec = SandboxSpec(
            environment=environment, cpu=config.place_cpu, memory_bytes=config.place_memory_bytes, pids_max=_PIDS
        )
        refused = refusal(spec, self._room())
        if refused is not None:
            raise refused
        backend = self._backends(Substrate.CONTAINER)
        resolved = await self._environments.acquire(environment)
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
                env=resolved.env,
                user=None,
                workdir=None,
                upper_in_memory=True,
            )
            instance = await backend.create(made, intend=intend, deadline_s=_LAUNCH_S)
            client = await AgentClient.connect(instance.connect, sandbox=id)
        except BaseException:
            if client is not None:
                client.close()
            resolved.hold.release()
            if row is not None:
                self._tasks.spawn(self._removal.discard(row), finishes=True)
            raise

        async def end() -> None:
            await self._removal.until_done(instance.destroy, id)
            resolved.hold.release()

        return Launched(
            instance=instance,
            client=client,
            memory_bytes=spec.memory_bytes,
            env=resolved.env,
            remove=lambda: self._tasks.spawn(end(), finishes=True),
        )

    async def close(self) -> None:
        """After the call service: waits until what it gave up is removed."""
        self._removal.closed = True
        await self._tasks.close()
