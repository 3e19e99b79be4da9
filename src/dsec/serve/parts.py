"""The node part and the API part of a process, from their configuration to what can be asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsec import __version__
from dsec.api.admission import Admission
from dsec.api.app import Application
from dsec.api.gate import Gate
from dsec.api.keeper import Keeper
from dsec.api.request import Services
from dsec.api.routes import ROUTES
from dsec.api.routing import RouteTable
from dsec.api.server import HttpServer, TcpAddress, load_tls
from dsec.api.sharedaudit import SharedAudit
from dsec.api.sharediam import SharedIamStore, SharedSlices
from dsec.backends.base import Backend
from dsec.backends.egress import Egress
from dsec.backends.fake.egress import FakeForwarder
from dsec.backends.fake.host import FakeHost
from dsec.backends.forwarding import Forwarder
from dsec.backends.registry import BackendSettings, build_backends
from dsec.cluster.fleet import Fleet
from dsec.cluster.jobs.orders import Orders
from dsec.cluster.jobs.table import Jobs
from dsec.cluster.log import Log
from dsec.cluster.registry import Registry
from dsec.cluster.rpc import Rpc
from dsec.core.ids import NodeId
from dsec.core.spec import Substrate
from dsec.iam.service import Iam
from dsec.image.environments import EnvironmentStore
from dsec.node.environments import Environments, StoredEnvironments
from dsec.node.node import Node
from dsec.serve.config import ServeConfig
from dsec.serve.imagined import ImaginedEnvironments
from dsec.serve.renewal import Renewal
from dsec.storage.loader import Loader
from dsec.storage.remote import RemoteLayers
from dsec.storage.store.trusted import trusted_stores
from dsec.wire.egress import EgressDenied, HelloArgs


class NodePart:
    def __init__(self, config: ServeConfig, stack: AsyncExitStack) -> None:
        self._config = config
        self._stack = stack

    async def start(self) -> Node:
        config = self._config
        state_dir, run_dir = Path(config.state_dir), Path(config.run_dir)
        node = Node(
            replace(
                config.node.config(state_dir=state_dir, run_dir=run_dir),
                calls=config.calls.config(),
                labels=config.cluster.labels,
            ),
            make_backends=self._backends,
            environments=self._environments(),
            make_forwarder=self._forwarder,  # also where none is offered any more: of sandboxes of before
        )
        await node.start()
        self._stack.push_async_callback(node.close)
        return node

    def _backends(self, node: NodeId) -> Mapping[Substrate, Backend]:
        config = self._config
        settings = BackendSettings(
            node=node,
            run_dir=Path(config.run_dir),
            state_dir=Path(config.state_dir),
            container=config.containers(),
            microvm=config.machines(),
            fullvm=config.full_machines(),
        )
        return build_backends(settings, frozenset(config.node.substrates))

    def _forwarder(self, denied: Callable[[EgressDenied], None]) -> Forwarder:
        config = self._config
        if set(config.node.substrates) == {Substrate.FAKE}:
            return FakeForwarder(FakeHost(), denied)
        egress = config.node.egress
        settings = HelloArgs(resolvers=egress.resolvers, private=egress.private)
        return Egress(Path(config.run_dir), settings=settings, denied=denied)

    def _environments(self) -> Environments:
        config = self._config
        if set(config.node.substrates) == {Substrate.FAKE}:
            return ImaginedEnvironments()
        state = Path(config.state_dir)
        storage = config.storage
        loader = Loader(
            Path(config.run_dir), state / "cache", cache_bytes=storage.cache_size(), front=storage.loader_front
        )
        self._stack.callback(loader.close)  # it runs on: sandboxes read through it
        registries = config.registries.settings()
        remote = RemoteLayers(loader, trusted=trusted_stores(storage.stores), blocks=storage.block_devices)
        return StoredEnvironments(
            EnvironmentStore(state, record_keep_s=config.node.collect.record_keep_s),
            remote,
            registries=registries,
            pull=storage.pull,
        )


class ApiPart:
    def __init__(self, config: ServeConfig, stack: AsyncExitStack) -> None:
        self._config = config
        self._stack = stack
        self.addresses: list[TcpAddress] = []
        self.keeper = Keeper()
        self.server: HttpServer

    async def start(
        self, rpc: Rpc, fleet: Fleet, jobs: Jobs, registry: Registry | None = None, events: Log | None = None
    ) -> None:
        """`registry`: where replicas share projects, tokens and quotas, and `events`: what was done; None: this one is
        alone."""
        config = self._config
        iam = await self._iam(registry, events)
        self._stack.push_async_callback(iam.close)
        slices = None if registry is None else SharedSlices(registry)
        admission = Admission(iam.directory, rpc, fleet, slices=slices)
        self._stack.push_async_callback(admission.close)
        services = Services(
            rpc=rpc,
            fleet=fleet,
            iam=iam,
            gate=Gate(iam.directory),
            keeper=self.keeper,
            admission=admission,
            jobs=jobs,
            orders=Orders(rpc, fleet),
            version=__version__,
        )
        self._stack.push_async_callback(self.keeper.close)
        self.server = HttpServer(Application(RouteTable(ROUTES), services))
        self._stack.push_async_callback(self.server.close, grace_s=0.0)
        if (address := config.api.address()) is not None:
            tls = None
            if config.api.tls_certificate is not None and config.api.tls_key is not None:
                certificate, key = Path(config.api.tls_certificate), Path(config.api.tls_key)
                tls = load_tls(certificate, key)
                self._renew(tls, certificate, key)
            self.addresses = await self.server.listen_tcp(address, tls=tls, insecure=config.api.insecure)
        # Last: who can connect to the socket finds everything ready.
        await self.server.listen_unix(config.socket)

    def _renew(self, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        def take() -> None:
            load_tls(certificate, key)  # raises for what is not whole
            context.load_cert_chain(certificate, key)

        task = asyncio.create_task(Renewal([certificate, key], take).run(), name="renew certificate")

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(end)

    async def _iam(self, registry: Registry | None, events: Log | None) -> Iam:
        state_dir = Path(self._config.state_dir)
        if registry is None:
            return await Iam.open(state_dir)
        store = SharedIamStore(registry)
        await store.start()
        self._stack.push_async_callback(store.stop)
        return await Iam.shared(store, state_dir, share=lambda own: own if events is None else SharedAudit(own, events))

    async def stop(self, hurry: asyncio.Event) -> None:
        """Nothing new is taken; requests under way get their grace, unless `hurry` is set meanwhile."""
        await self.server.stop_accepting()
        grace = asyncio.create_task(self._settle())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({grace, hurried}, return_when=asyncio.FIRST_COMPLETED)
        for task in (grace, hurried):
            task.cancel()
        await asyncio.gather(grace, hurried, return_exceptions=True)

    async def _settle(self) -> None:
        grace_s = self._config.api.grace_s
        await asyncio.gather(self.server.settle(grace_s=grace_s), self.keeper.settle(deadline_s=grace_s))

    def told(self) -> dict[str, Any]:
        return {
            "socket": str(self._config.socket),
            "tcp": [f"{address.host}:{address.port}" for address in self.addresses],
        }
