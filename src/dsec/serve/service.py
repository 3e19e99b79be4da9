"""Node and API in one process, from their configuration to the last thing closed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from dsec import __version__
from dsec.api.admission import Admission
from dsec.api.app import Application
from dsec.api.gate import Gate
from dsec.api.keeper import Keeper
from dsec.api.request import Services
from dsec.api.routes import ROUTES
from dsec.api.routing import RouteTable
from dsec.api.server import HttpServer, TcpAddress, load_tls
from dsec.backends.base import Backend
from dsec.backends.registry import BackendSettings, build_backends
from dsec.cluster.rpc import EmbeddedRpc
from dsec.core.ids import NodeId
from dsec.core.spec import Substrate
from dsec.iam.service import Iam
from dsec.image.environments import EnvironmentStore
from dsec.node.environments import Environments, StoredEnvironments
from dsec.node.node import Node
from dsec.node.service import Service as NodeService
from dsec.observe.logs import get_logger
from dsec.serve.config import ServeConfig
from dsec.serve.imagined import ImaginedEnvironments
from dsec.storage.loader import Loader
from dsec.storage.remote import RemoteLayers
from dsec.storage.store.trusted import trusted_stores

log = get_logger(__name__)


class LocalService:
    """What `dsec up` runs. `start` either gives a service that answers, or raises and leaves nothing."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.addresses: list[TcpAddress] = []
        self.node: Node
        self._server: HttpServer
        self._keeper = Keeper()
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        try:
            rpc = await self._start_node()
            await self._start_api(rpc)
        except BaseException:
            await self._stack.aclose()
            raise

    async def close(self, *, hurry: asyncio.Event) -> None:
        """Requests under way get their grace, unless `hurry` is set meanwhile. Sandboxes that can run on do."""
        await self._server.stop_accepting()
        grace = asyncio.create_task(self._settle())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({grace, hurried}, return_when=asyncio.FIRST_COMPLETED)
        for task in (grace, hurried):
            task.cancel()
        await asyncio.gather(grace, hurried, return_exceptions=True)
        await self._stack.aclose()

    async def _settle(self) -> None:
        grace_s = self.config.api.grace_s
        await asyncio.gather(self._server.settle(grace_s=grace_s), self._keeper.settle(deadline_s=grace_s))

    async def _start_node(self) -> EmbeddedRpc:
        config = self.config
        state_dir, run_dir = Path(config.state_dir), Path(config.run_dir)
        self.node = Node(
            replace(config.node.config(state_dir=state_dir, run_dir=run_dir), calls=config.calls.config()),
            make_backends=self._backends,
            environments=self._environments(),
        )
        await self.node.start()
        self._stack.push_async_callback(self.node.close)
        rpc = EmbeddedRpc(NodeService(self.node), self.node.id)
        self._stack.push_async_callback(rpc.close)
        return rpc

    async def _start_api(self, rpc: EmbeddedRpc) -> None:
        config = self.config
        iam = await Iam.open(Path(config.state_dir))
        self._stack.push_async_callback(iam.close)
        admission = Admission(iam.directory, rpc, lambda: [self.node.id])
        self._stack.push_async_callback(admission.close)
        services = Services(
            rpc=rpc,
            node=self.node.id,
            iam=iam,
            gate=Gate(iam.directory),
            keeper=self._keeper,
            admission=admission,
            version=__version__,
        )
        self._stack.push_async_callback(self._keeper.close)
        self._server = HttpServer(Application(RouteTable(ROUTES), services))
        self._stack.push_async_callback(self._server.close, grace_s=0.0)
        if (address := config.api.address()) is not None:
            tls = None
            if config.api.tls_certificate is not None and config.api.tls_key is not None:
                tls = load_tls(Path(config.api.tls_certificate), Path(config.api.tls_key))
            self.addresses = await self._server.listen_tcp(address, tls=tls, insecure=config.api.insecure)
        # Last: who can connect to the socket finds everything ready.
        await self._server.listen_unix(config.socket)

    def _backends(self, node: NodeId) -> Mapping[Substrate, Backend]:
        config = self.config
        settings = BackendSettings(
            node=node,
            run_dir=Path(config.run_dir),
            state_dir=Path(config.state_dir),
            container=config.container.fields(),
        )
        return build_backends(settings, frozenset(config.node.substrates))

    def _environments(self) -> Environments:
        config = self.config
        if set(config.node.substrates) == {Substrate.FAKE}:
            return ImaginedEnvironments()
        state = Path(config.state_dir)
        storage = config.storage
        loader = Loader(
            Path(config.run_dir), state / "cache", cache_bytes=storage.cache_size(), front=storage.loader_front
        )
        self._stack.callback(loader.close)  # it runs on: sandboxes read through it
        registries = config.registries.settings()
        remote = RemoteLayers(loader, trusted=trusted_stores(storage.stores))
        return StoredEnvironments(
            EnvironmentStore(state, record_keep_s=self.config.node.collect.record_keep_s), remote, registries=registries
        )
