"""An API on a real socket, with a node behind it, for the tests of the API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from dsec.api.admission import Admission
from dsec.api.app import Application
from dsec.api.gate import Gate
from dsec.api.keeper import Keeper
from dsec.api.request import Services
from dsec.api.routes import ROUTES
from dsec.api.routing import RouteTable
from dsec.api.server import HttpServer, TcpAddress
from dsec.backends.fake.backend import FakeBackend
from dsec.cluster.embedded.database import Database
from dsec.cluster.embedded.registry import EmbeddedRegistry
from dsec.cluster.fleet import OneNode
from dsec.cluster.jobs.orders import Orders
from dsec.cluster.jobs.table import Jobs
from dsec.cluster.rpc import EmbeddedRpc
from dsec.core.clock import SystemClock
from dsec.core.ids import NodeId
from dsec.core.spec import Substrate
from dsec.iam.peers import Peer, local_principal
from dsec.iam.principals import highest_right
from dsec.iam.service import Iam
from dsec.node.config import NodeConfig
from dsec.node.node import Node
from dsec.node.service import Service
from dsec.serve.imagined import ImaginedEnvironments
from dsec.wire.node import NodeService

ADMIN = local_principal(Peer(pid=1, uid=0, gid=0))


@dataclass
class Served:
    socket: Path
    tcp: TcpAddress
    server: HttpServer
    rpc: EmbeddedRpc
    keeper: Keeper
    iam: Iam
    local: aiohttp.ClientSession  # over the UNIX socket, admin
    remote: aiohttp.ClientSession  # over TCP, without credentials
    fleet: OneNode

    async def token(self, project: str, *rights: str) -> dict[str, str]:
        right = highest_right(rights)
        text, _ = await self.iam.tokens.create("test", project=project, right=right, by=ADMIN)
        return {"Authorization": f"Bearer {text}"}

    async def quiet(self) -> None:
        """Waits until no request, stream or kept work is left."""
        await until(lambda: not self.server.state.tasks and not self.rpc.streams_open and not len(self.keeper))


@contextlib.asynccontextmanager
async def serve(service: NodeService, node: NodeId, directory: Path) -> AsyncIterator[Served]:
    iam = await Iam.open(directory)
    rpc = EmbeddedRpc(service, node)
    keeper = Keeper()
    fleet = OneNode(rpc, node)
    admission = Admission(iam.directory, rpc, fleet)
    database = await Database.open(directory / "shared.db")
    registry = EmbeddedRegistry(database, SystemClock())
    await registry.start()
    jobs = Jobs(registry, SystemClock())
    await jobs.start()
    services = Services(
        rpc=rpc,
        fleet=fleet,
        iam=iam,
        gate=Gate(iam.directory),
        keeper=keeper,
        admission=admission,
        jobs=jobs,
        orders=Orders(rpc, fleet),
        version="9",
    )
    server = HttpServer(Application(RouteTable(ROUTES), services))
    path = directory / "api.sock"
    await server.listen_unix(path)
    (address,) = await server.listen_tcp(TcpAddress("127.0.0.1", 0))
    async with (
        aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(str(path))) as local,
        aiohttp.ClientSession(f"http://127.0.0.1:{address.port}") as remote,
    ):
        try:
            yield Served(path, address, server, rpc, keeper, iam, local, remote, fleet)
        finally:
            await server.close(grace_s=0)
            await fleet.close()
            await keeper.close()
            await rpc.close()
            await admission.close()
            await iam.close()
            await jobs.close()
            await registry.close()
            await database.close()


async def until(condition: Callable[[], Any], *, deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110  any condition, not only those that tell
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serve_fake(directory: Path, backend: FakeBackend | None = None, **settings: Any) -> AsyncIterator[Served]:
    """Over a node of its own with imagined sandboxes; `settings` are of its NodeConfig."""
    found = FakeBackend() if backend is None else backend
    node = Node(
        NodeConfig(
            state_dir=directory / "s", run_dir=directory / "r", substrates=frozenset({Substrate.FAKE}), **settings
        ),
        make_backends=lambda _: {Substrate.FAKE: found},
        environments=ImaginedEnvironments(),
    )
    await node.start()
    try:
        async with serve(Service(node), node.id, directory) as served:
            yield served
    finally:
        await node.close()
