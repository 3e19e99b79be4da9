"""The processes of a cluster: API replicas, nodes, watchers. They share their parts with `dsec up`."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec import __version__
from dsec.cluster.endednames import EndedNames
from dsec.cluster.engine.buckets import EngineRegistry
from dsec.cluster.engine.connection import Engine, EngineSettings
from dsec.cluster.engine.desk import NodeDesk
from dsec.cluster.engine.intake import Intake
from dsec.cluster.engine.layout import Layout
from dsec.cluster.engine.log import EngineLog
from dsec.cluster.engine.own import OwnKeys, OwnLog, places_of
from dsec.cluster.engine.setup import prepare
from dsec.cluster.events import EventTail
from dsec.cluster.jobs.keeper import JobKeeper
from dsec.cluster.jobs.orders import Orders
from dsec.cluster.jobs.table import Jobs
from dsec.cluster.leases import RegistryLease
from dsec.cluster.link.client import RemoteRpc
from dsec.cluster.link.server import NodeListener
from dsec.cluster.many import ManyNodes
from dsec.cluster.members.fence import FencedService
from dsec.cluster.members.membership import Membership
from dsec.cluster.members.nodes import Nodes
from dsec.cluster.members.watcher import Watcher
from dsec.cluster.peers import PeerLinks
from dsec.cluster.publishing import EventPublisher
from dsec.cluster.rosters import Rosters
from dsec.cluster.tombstones import TombstoneRpc
from dsec.core.clock import SystemClock
from dsec.core.errors import DsecError, NodeRetiredError, PlatformError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.limits import (
    CARD_IMAGES_BYTES_MAX,
    DEVICE_KINDS_MAX,
    HEARTBEAT_BYTES_MAX,
    HEARTBEATS_BURST,
    HEARTBEATS_S,
    HEARTBEATS_WAITING_MAX,
    PEER_FRAME_BYTES_MAX,
    PEER_STREAMS_MAX,
)
from dsec.node.devices import Devices
from dsec.node.events import event_of
from dsec.node.facts import features_of
from dsec.node.journal import take_node_id
from dsec.node.names import drop_names
from dsec.node.node import Node
from dsec.node.service import Service as NodeService
from dsec.observe.logs import get_logger
from dsec.serve.cluster_settings import host_port
from dsec.serve.config import ServeConfig
from dsec.serve.identity import Identity, write_private
from dsec.serve.metricsport import MetricsPort
from dsec.serve.parts import ApiPart, NodePart
from dsec.serve.renewal import LiveIdentity, Renewal
from dsec.wire.cluster import Card
from dsec.wire.events import EventKind

log = get_logger(__name__)

_RETRY_S: Final = 1.0
_DESCRIBE_S: Final = 15.0  # an environment that was built is preferred that much later


class _Clustered:
    """What the three have in common."""

    def __init__(self, config: ServeConfig, *, node: bool) -> None:
        config.cluster.check_servers()
        self.config = config
        self.live = LiveIdentity(Path(config.cluster.identity))
        self.identity.check_role(node=node)
        self.clock = SystemClock()
        self.stack = AsyncExitStack()
        self.engine: Engine
        self.metrics: str | None = None

    @property
    def identity(self) -> Identity:
        return self.live.now

    def renew(self, renewal: Renewal) -> None:
        task = asyncio.create_task(renewal.run(), name="renew certificates")
        self.stack.push_async_callback(_ended, task)

    async def show_metrics(self) -> None:
        port = MetricsPort()
        place = await port.listen(self.config.cluster.metrics)
        self.metrics = None if place is None else f"{place[0]}:{place[1]}"
        self.stack.push_async_callback(port.close)

    async def start(self) -> None:
        try:
            self.renew(self.live.renewal())
            await self._start()
        except BaseException:
            await self.stack.aclose()
            raise

    async def close(self, *, hurry: asyncio.Event) -> None:
        await self.stack.aclose()

    async def failed(self) -> DsecError:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = {"engine": list(self.config.cluster.servers)}
        return told if self.metrics is None else {**told, "metrics": self.metrics}

    async def _start(self) -> None:
        raise NotImplementedError

    async def connect(self, who: str) -> None:
        """Waits until the engine is there."""
        settings = EngineSettings(
            self.config.cluster.servers,
            Layout(self.identity.unit),
            who,
            self.live,
            self.live.to_engine(),
        )
        while True:
            try:
                self.engine = await Engine.connect(settings)
                break
            except UnavailableError as error:
                log.warning("the engine is not there yet", error=error.message)
                await asyncio.sleep(_RETRY_S)
        self.stack.push_async_callback(self.engine.close)

    async def follow_nodes(self) -> Nodes:
        """After buckets and streams have been made. From then on it serves nodes what is their own."""
        cluster = self.config.cluster
        await prepare(self.engine, replicas=cluster.replicas, log_bytes_max=cluster.log_size())
        nodes = Nodes(EngineRegistry(self.engine), self.clock)
        self.stack.push_async_callback(nodes.close)
        await nodes.start()

        beats = Intake(
            self.engine,
            self.engine.layout.heartbeat,
            lambda node, message: nodes.heard(node, message.data),
            members=nodes.members,
            rate=HEARTBEATS_S,
            burst=HEARTBEATS_BURST,
            bytes_max=HEARTBEAT_BYTES_MAX,
            waiting_max=HEARTBEATS_WAITING_MAX,
            flooded=nodes.flooded,
        )
        self.stack.push_async_callback(beats.close)
        await beats.open()
        desk = NodeDesk(
            self.engine,
            retired=nodes.retired,
            members=nodes.members,
            flooded=nodes.flooded,
            address=nodes.address,
        )
        self.stack.push_async_callback(desk.close)
        await desk.open()
        return nodes

    async def follow_jobs(self, registry: EngineRegistry) -> Jobs:
        jobs = Jobs(registry, self.clock)
        self.stack.push_async_callback(jobs.close)
        await jobs.start()
        return jobs


class ApiProcess(_Clustered):
    """`dsec api`: keeps nothing of a sandbox; any other replica can answer instead."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config, node=False)
        self._api = ApiPart(config, self.stack)

    async def _start(self) -> None:
        await self.connect(f"api-{secrets.token_hex(6)}")
        nodes = await self.follow_nodes()
        registry = EngineRegistry(self.engine)
        remote = RemoteRpc(nodes, self.live.to_nodes(), heard=nodes.told)
        nodes.on_retired = remote.drop
        rpc = TombstoneRpc(remote, nodes, registry, self.clock)
        self.stack.push_async_callback(rpc.close)
        tail = EventTail(EngineLog(self.engine), self.identity.unit)
        await tail.start()
        self.stack.push_async_callback(tail.close)
        bursts = [rule.rule() for rule in self.config.cluster.bursts.values()]
        fleet = ManyNodes(rpc, nodes, registry, self.clock, events=tail, bursts=bursts)
        self.stack.push_async_callback(fleet.close)
        await self._api.start(rpc, fleet, await self.follow_jobs(registry), registry, EngineLog(self.engine))

    async def close(self, *, hurry: asyncio.Event) -> None:
        await self._api.stop(hurry)
        await self.stack.aclose()

    def told(self) -> dict[str, Any]:
        return {**super().told(), **self._api.told()}


class WatcherProcess(_Clustered):
    """`dsec watcher`: keeps nothing; any number may run, and one acts."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config, node=False)
        self._task: asyncio.Task[None]

    async def _start(self) -> None:
        await self.show_metrics()
        await self.connect(f"watcher-{secrets.token_hex(6)}")
        nodes = await self.follow_nodes()
        registry = EngineRegistry(self.engine)
        jobs = await self.follow_jobs(registry)
        rpc = RemoteRpc(nodes, self.live.to_nodes(), heard=nodes.told)
        nodes.on_retired = rpc.drop
        self.stack.push_async_callback(rpc.close)
        orders = Orders(rpc, ManyNodes(rpc, nodes, registry, self.clock))
        watcher = Watcher(
            registry,
            EngineLog(self.engine),
            nodes,
            RegistryLease(registry, self.clock),
            self.clock,
            engine_since=lambda: self.engine.connected_since,
            jobs=lambda acts: JobKeeper(jobs, orders, self.clock, acts=acts),
        )
        self._task = asyncio.create_task(watcher.run(), name="watcher")
        self.stack.push_async_callback(_ended, self._task)
        names = EndedNames(registry, EngineLog(self.engine), acts=lambda: watcher.acts)
        self.stack.push_async_callback(_ended, asyncio.create_task(names.run(), name="names of ended sandboxes"))

    async def failed(self) -> DsecError:
        await asyncio.wait({self._task})
        return PlatformError("the watcher has ended", hint="the log says why")


class NodeProcess(_Clustered):
    """`dsec node`: the sandboxes of this machine, for the replicas of its cluster."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config, node=True)
        self.node: Node
        self.membership: Membership
        self.address = ("", 0)
        self._described_until = 0.0

    async def _start(self) -> None:
        config, node_id = self.config, self.identity.node
        assert node_id is not None  # of a node's identity
        state_dir = Path(config.state_dir)
        await asyncio.to_thread(
            take_node_id, config.node.config(state_dir=state_dir, run_dir=Path(config.run_dir)).journal_path, node_id
        )
        await self.show_metrics()
        # First what is there of sandboxes, which runs on without the engine too.
        self.node = await NodePart(config, self.stack).start()
        await self.connect(node_id)
        installation = await asyncio.to_thread(_installation, state_dir)
        host, port = host_port(config.cluster.listen)
        self.membership = self._membership(installation)
        service = FencedService(NodeService(self.node), self.membership, knows=self.node.creation.knows)
        listener = NodeListener(
            service, node_id, tls=self.live.of_node(), term=lambda: self.membership.term, peers=self._peers(node_id)
        )
        self.address = await listener.listen(host, port)
        self.stack.push_async_callback(listener.close, grace_s=config.api.grace_s)
        self.membership.reached_at(*self._advertised())
        await self._join()
        self.stack.push_async_callback(self.membership.leave)
        self._publish()

    def _peers(self, node: NodeId) -> PeerLinks:
        rosters = Rosters(partial(places_of, self.engine, node), self.clock)
        self.stack.push_async_callback(rosters.close)
        rpc = RemoteRpc(
            rosters, self.live.to_nodes(), streams_max=PEER_STREAMS_MAX, frame_bytes_max=PEER_FRAME_BYTES_MAX
        )
        self.stack.push_async_callback(rpc.close)
        peers = PeerLinks(node, rosters, rpc, self.node.links)
        self.stack.callback(peers.close)
        self.node.links.far = peers
        return peers

    def _publish(self) -> None:
        journal = self.node.journal
        publisher = EventPublisher(
            OwnLog(self.engine, self.node.id), journal.events, journal.events_told(), journal.keep_events_told
        )
        self.stack.push_async_callback(_ended, asyncio.create_task(publisher.run(), name="tell events"))

    def _membership(self, installation: str) -> Membership:
        config = self.config
        able = {name: backend.capabilities for name, backend in self.node.backends.items()}
        card = Card(
            node=self.node.id,
            term=0,
            host="",
            port=0,
            version=__version__,
            substrates=tuple(sorted(map(str, able))),
            networks={str(name): tuple(sorted(map(str, one.networks))) for name, one in able.items()},
            features={str(name): tuple(sorted(features_of(one, relays=True))) for name, one in able.items()},
            labels=config.cluster.labels,
            started_at=self.node.started_at,
        )

        async def tell(body: bytes) -> None:
            await self.engine.tell(self.engine.layout.heartbeat(self.node.id), body)

        async def came_back() -> None:
            for sandbox in list(self.node.registry):
                await self.node.adoption.settled(sandbox.id)
            await drop_names(self.node.registry, self.node.journal)
            at = self.clock.wall_s()
            rows = [sandbox.row for sandbox in self.node.registry]
            await self.node.journal.note([event_of(row, EventKind.RETURNED, at) for row in rows])

        return Membership(
            OwnKeys(self.engine, self.node.id),
            tell,
            card,
            installation=installation,
            clock=self.clock,
            load=self.node.load,
            came_back=came_back,
            describe=self._described,
        )

    async def _described(self, card: Card) -> Card:
        """With what is on this node now, as far as a card has room for it."""
        if self.clock.monotonic_s() < self._described_until:
            return card
        images: list[str] = []
        room = CARD_IMAGES_BYTES_MAX
        try:
            found = sorted(await self.node.environments.list(), key=lambda info: -info.created_at)
        except DsecError as error:
            log.warning("the card does not say which environments there are", error=error.message)
            return card
        for info in found:
            room -= len(info.name) + 2
            if room < 0:
                break
            images.append(info.name)
        devices = await asyncio.to_thread(Devices(self.node.config.calls.cdi_dirs).kinds)
        self._described_until = self.clock.monotonic_s() + _DESCRIBE_S
        return msgspec.structs.replace(card, images=tuple(images), devices=devices[:DEVICE_KINDS_MAX])

    def _advertised(self) -> tuple[str, int]:
        """A port of 0 is the one that was got."""
        advertise = self.config.cluster.advertise
        if advertise is None:
            return self.address
        host, port = host_port(advertise)
        return host, port or self.address[1]

    async def _join(self) -> None:
        while True:
            try:
                await self.membership.join()
                return
            except UnavailableError as error:
                log.warning("the node cannot join yet", error=error.message)
                await asyncio.sleep(_RETRY_S)

    async def failed(self) -> DsecError:
        await self.membership.fenced.wait()
        return NodeRetiredError(
            f"this process is not in charge of node {self.node.id} any more", hint="the log says why"
        )

    def told(self) -> dict[str, Any]:
        return {**super().told(), "node": self.node.id, "listen": f"{self.address[0]}:{self.address[1]}"}


def _installation(state_dir: Path) -> str:
    """A random word that a state directory keeps: a machine that is set up anew has another."""
    path = state_dir / "installation"
    if not path.exists():
        write_private(path, secrets.token_hex(16).encode())
    return path.read_text().strip()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
