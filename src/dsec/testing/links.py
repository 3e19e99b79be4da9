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
from dsec.cluster.link.client import RemoteRpc
from dsec.cluster.link.server import NodeListener
from dsec.core.errors import NodeRetiredError
from dsec.core.ids import NodeId
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
