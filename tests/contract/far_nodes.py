"""Nodes on the fake backend whose links reach each other over TCP with certificates, as those of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.fake.host import FakeHost
from dsec.backends.fake.transfers import ECHO_PORT
from dsec.cluster.peers import PeerLinks
from dsec.core.clock import Clock
from dsec.core.ids import NodeId, parse_sandbox_id
from dsec.core.spec import Link, SandboxSpec, link_addresses
from dsec.node.node import Node
from dsec.testing.links import Certificates, Peered
from dsec.testing.nodes import FAKE_SPEC, NodeClient, caller_of, make_fake_node
from dsec.wire.cluster import OwnGroup
from dsec.wire.groups import GroupNote
from dsec.wire.node import Method
from dsec.wire.records import CreateRequest, Sandbox, SandboxRef

DB: Final = Link("db", ECHO_PORT)
GROUP: Final = OwnGroup(project="/team", name="shop", id="job_1")


@dataclass
class FarNode:
    node: Node
    host: FakeHost
    peers: PeerLinks

    @property
    def id(self) -> NodeId:
        return self.node.id

    async def create(self, member: str, *links: Link, group: OwnGroup = GROUP) -> str:
        spec = msgspec.structs.replace(FAKE_SPEC, job=group.name, job_id=group.id, member=member, links=links)
        client = NodeClient(self.node, caller_of(group.project))
        return (await client.call(Method.CREATE, CreateRequest(spec=spec), Sandbox)).id

    async def destroy(self, id: str, project: str = GROUP.project) -> None:
        await NodeClient(self.node, caller_of(project)).call(Method.DESTROY, SandboxRef(id), Sandbox)

    async def dial(self, id: str, link: Link = DB) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """As a program in that sandbox would."""
        spec = SandboxSpec(environment=FAKE_SPEC.environment, job="shop", links=(link,))
        port = self.host.listening[parse_sandbox_id(id), link_addresses(spec)[link.name], link.port]
        return await asyncio.open_connection("127.0.0.1", port)


@dataclass
class FarNodes:
    peered: Peered
    nodes: list[FarNode] = field(default_factory=list)

    def note(self, group: OwnGroup = GROUP, *, nodes: dict[str, int], across: dict[str, list[tuple[str, int]]]) -> None:
        """As replicas write it down; nodes by their places here."""
        places = {member: str(self.nodes[place].id) for member, place in nodes.items()}
        self.peered.notes[group] = GroupNote(digest=b"", nodes=places, across=across)


@contextlib.asynccontextmanager
async def far_nodes(directory: Path, count: int = 2, *, clock: Clock | None = None) -> AsyncIterator[FarNodes]:
    found = FarNodes(Peered(Certificates(directory / "certificates")))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(found.peered.close)
        for number in range(count):
            host = FakeHost()
            node = make_fake_node(directory / f"node-{number}", host=host)
            await node.start()
            stack.push_async_callback(node.close)
            found.nodes.append(FarNode(node, host, await found.peered.join(node, clock=clock)))
        yield found
        await found.peered.close()


async def cut_off(reader: asyncio.StreamReader) -> bool:
    """It ended, and nothing more had come."""
    try:
        async with asyncio.timeout(60):
            return await reader.read() == b""
    except ConnectionError:
        return True
