"""A node service and a replica's Rpc to it over TCP, for tests."""

from __future__ import annotations

import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from dsec.cluster.certificates import API_NAME, Authority, client_context, node_name, server_context
from dsec.cluster.directory import Address
from dsec.cluster.engine.desk import places_for
from dsec.cluster.link.client import RemoteRpc
from dsec.cluster.link.server import NodeListener
from dsec.cluster.peers import PeerLinks
from dsec.cluster.rosters import Rosters
from dsec.core.clock import Clock, SystemClock
from dsec.core.errors import ForbiddenError, NodeRetiredError, UnavailableError
from dsec.core.ids import NodeId
from dsec.core.limits import PEER_FRAME_BYTES_MAX, PEER_STREAMS_MAX
from dsec.node.node import Node
from dsec.node.service import Service
from dsec.wire.cluster import GroupPlaces, OwnGroup
from dsec.wire.groups import GroupNote
from dsec.wire.node import NodeService


@dataclass
class Places:
    """A Directory that is told where nodes are."""

    known: dict[NodeId, Address] = field(default_factory=dict)

    def address(self, node: NodeId) -> Address:
        if node not in self.known:
            raise NodeRetiredError(f"there is no node {node} here")
        return self.known[node]


class Certificates:
    """An authority of a test, and what it has issued."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._now = datetime.datetime.now(datetime.UTC)
        self.authority = Authority.create("test", now=self._now)
        (directory / "ca.pem").write_bytes(self.authority.certificate)

    def node(self, node: NodeId) -> ssl.SSLContext:
        return server_context(self._directory / "ca.pem", *self._files(node_name(node), serves=True))

    def client(self, name: str = API_NAME) -> ssl.SSLContext:
        return client_context(self._directory / "ca.pem", *self._files(name, serves=False))

    def _files(self, name: str, *, serves: bool) -> tuple[Path, Path]:
        issued = self.authority.issue([name], now=self._now, serves=serves, asks=True)
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.write_bytes(issued.certificate)
        key.write_bytes(issued.key)
        return certificate, key


@dataclass
class Peered:
    """Nodes whose links reach each other, and what replicas would tell them of groups."""

    certificates: Certificates
    notes: dict[OwnGroup, GroupNote] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    listeners: dict[NodeId, NodeListener] = field(default_factory=dict)
    asked: list[tuple[NodeId, OwnGroup]] = field(default_factory=list)
    away: bool = False  # the replicas
    _stacks: dict[NodeId, contextlib.AsyncExitStack] = field(default_factory=dict)

    async def join(self, node: Node, *, clock: Clock | None = None) -> PeerLinks:
        """As `dsec node` does it; at another address each time."""
        stack = self._stacks[node.id] = contextlib.AsyncExitStack()

        async def ask(group: OwnGroup) -> GroupPlaces:
            self.asked.append((node.id, group))
            if self.away:
                raise UnavailableError("no replica is there")
            note = self.notes.get(group)
            found = None if note is None else places_for(node.id, note, self.places.address)
            if found is None:
                raise ForbiddenError("nothing of such a group")
            return found

        rosters = Rosters(ask, clock or SystemClock())
        stack.push_async_callback(rosters.close)
        rpc = RemoteRpc(
            rosters,
            self.certificates.client(node_name(node.id)),
            streams_max=PEER_STREAMS_MAX,
            frame_bytes_max=PEER_FRAME_BYTES_MAX,
        )
        stack.push_async_callback(rpc.close)
        peers = PeerLinks(node.id, rosters, rpc, node.links)
        stack.callback(peers.close)
        node.links.far = peers
        term = self.places.known[node.id].term + 1 if node.id in self.places.known else 1
        listener = NodeListener(
            Service(node), node.id, tls=self.certificates.node(node.id), term=lambda: term, peers=peers
        )
        stack.push_async_callback(listener.close)
        host, port = await listener.listen("127.0.0.1", 0)
        self.places.known[node.id] = Address(host, port, term)
        self.listeners[node.id] = listener
        return peers

    async def leave(self, node: NodeId) -> None:
        """It answers nobody any more; where it was is known yet."""
        await self._stacks.pop(node).aclose()

    async def close(self) -> None:
        for node in list(self._stacks):
            await self.leave(node)


@dataclass
class Linked:
    rpc: RemoteRpc
    listener: NodeListener
    places: Places
    certificates: Certificates


@contextlib.asynccontextmanager
async def linked(service: NodeService, node: NodeId, directory: Path, *, term: int = 1) -> AsyncIterator[Linked]:
    """`service` as `node`, and an Rpc that knows it."""
    certificates = Certificates(directory / "certificates")
    listener = NodeListener(service, node, tls=certificates.node(node), term=lambda: term)
    host, port = await listener.listen("127.0.0.1", 0)
    places = Places({node: Address(host, port, term)})
    rpc = RemoteRpc(places, certificates.client())
    try:
        yield Linked(rpc, listener, places, certificates)
    finally:
        await rpc.close()
        await listener.close()
