"""Node and API in one process, from their configuration to the last thing closed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Protocol

from dsec.api.server import TcpAddress
from dsec.cluster.fleet import OneNode
from dsec.cluster.rpc import EmbeddedRpc
from dsec.core.errors import DsecError
from dsec.node.node import Node
from dsec.node.service import Service as NodeService
from dsec.serve.config import ServeConfig
from dsec.serve.parts import ApiPart, NodePart


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
            await self._api.start(rpc, OneNode(rpc, self.node.id))
        except BaseException:
            await self._stack.aclose()
            raise

    async def close(self, *, hurry: asyncio.Event) -> None:
        """Sandboxes that can run on do."""
        await self._api.stop(hurry)
        await self._stack.aclose()

    async def failed(self) -> DsecError:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def told(self) -> dict[str, Any]:
        return {**self._api.told(), "node": self.node.id}
