"""Node and API in one process, from their configuration to the last thing closed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Protocol

from dsec.api.server import TcpAddress
from dsec.cluster.embedded.database import Database
from dsec.cluster.embedded.registry import EmbeddedRegistry
from dsec.cluster.fleet import OneNode
from dsec.cluster.jobs.keeper import JobKeeper
from dsec.cluster.jobs.orders import Orders
from dsec.cluster.jobs.table import Jobs
from dsec.cluster.rpc import EmbeddedRpc, Rpc
from dsec.core.clock import SystemClock
from dsec.core.errors import DsecError
from dsec.node.node import Node
from dsec.node.service import Service as NodeService
from dsec.serve.config import ServeConfig
from dsec.serve.parts import ApiPart, NodePart

SHARED_STATE: Final = "shared.db"  # in the state directory: what replicas of a cluster share in its engine


class Running(Protocol):
    """What a process of ours runs. `start` either gives a service that answers, or raises and leaves nothing."""

    async def start(self) -> None: ...

    async def close(self, *, hurry: asyncio.Event) -> None:
        """Work under way gets its grace, unless `hurry` is set meanwhile."""
        ...

    async def failed(self) -> DsecError:
        """Returns when it cannot go on: never, for most."""
        ...

    def told(self) -> dict[str, Any]:
        """What the log says once it is ready."""
        ...


class LocalService:
    """What `dsec up` runs."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.node: Node
        self._stack = AsyncExitStack()
        self._api = ApiPart(config, self._stack)

    @property
    def addresses(self) -> list[TcpAddress]:
        return self._api.addresses

    async def start(self) -> None:
        try:
            self.node = await NodePart(self.config, self._stack).start()
            rpc = EmbeddedRpc(NodeService(self.node), self.node.id)
            self._stack.push_async_callback(rpc.close)
            fleet = OneNode(rpc, self.node.id)
            self._stack.push_async_callback(fleet.close)
            jobs = await self._jobs(rpc, fleet)
            await self._api.start(rpc, fleet, jobs)
        except BaseException:
            await self._stack.aclose()
            raise

    async def _jobs(self, rpc: Rpc, fleet: OneNode) -> Jobs:
        """With their leases watched here: there is no watcher beside us."""
        clock = SystemClock()
        database = await Database.open(Path(self.config.state_dir) / SHARED_STATE)
        self._stack.push_async_callback(database.close)
        registry = EmbeddedRegistry(database, clock)
        self._stack.push_async_callback(registry.close)
        await registry.start()
        jobs = Jobs(registry, clock)
        self._stack.push_async_callback(jobs.close)
        await jobs.start()
        watching = asyncio.create_task(JobKeeper(jobs, Orders(rpc, fleet), clock).run(), name="leases of jobs")
        self._stack.push_async_callback(_ended, watching)
        return jobs

    async def close(self, *, hurry: asyncio.Event) -> None:
        """Sandboxes that can run on do."""
        await self._api.stop(hurry)
        await self._stack.aclose()

    async def failed(self) -> DsecError:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def told(self) -> dict[str, Any]:
        return {**self._api.told(), "node": self.node.id}


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
