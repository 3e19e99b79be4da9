"""What a node that was broken out to can do to other nodes: what links of its own members allow, and nothing else.

Each attempt is made beside the one that is allowed, so that nothing is refused for another reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from dsec.backends.fake.transfers import ECHO_PORT
from dsec.cluster.certificates import API_NAME, node_name, node_named
from dsec.cluster.link.client import RemoteRpc
from dsec.core import limits
from dsec.core.errors import CapacityError, DsecError, ForbiddenError, NotFoundError, UnavailableError, UnsupportedError
from dsec.core.ids import NodeId
from dsec.core.spec import Link
from dsec.testing.clock import ManualClock
from dsec.wire.cluster import OwnGroup
from dsec.wire.codec import pack
from dsec.wire.frames import Channel, FrameType, data_frame, data_of
from dsec.wire.link import CallHead, Kind, with_head
from dsec.wire.node import Caller, Method, Right, Stream
from dsec.wire.peers import PEER_LINK, LinkDial
from dsec.wire.records import ListQuery
from tests.contract.far_nodes import DB, GROUP, FarNodes, far_nodes
from tests.contract.served import until
from tests.security.raw_peer import Raw

OTHERS: Final = OwnGroup(project="/others", name="bank", id="job_2")
EVERYTHING: Final = Caller(principal="root", project="/", rights=frozenset(Right))


@pytest.fixture
async def far(tmp_path: Path) -> AsyncIterator[FarNodes]:
    """The first node is the one that was broken out to. It has `web`, which reaches `db` on the second; the third has
    `job`, which reaches `vault` there, and members of a group in which the first has nothing."""
    async with far_nodes(tmp_path, 3) as found:
        found.note(
            nodes={"web": 0, "db": 1, "job": 2, "vault": 1, "own": 0},
            across={"web": [(DB.name, DB.port)], "job": [("vault", ECHO_PORT), (DB.name, ECHO_PORT)]},
        )
        found.note(OTHERS, nodes={"teller": 2, "safe": 1}, across={"teller": [("safe", ECHO_PORT)]})
        second = found.nodes[1]
        for member, group in (("db", GROUP), ("vault", GROUP), ("safe", OTHERS)):
            await second.create(member, group=group)
        yield found


@contextlib.asynccontextmanager
async def rpc_of(far: FarNodes, name: str | None = None) -> AsyncIterator[RemoteRpc]:
    """With the first node's certificate, and no scruples."""
    tls = far.peered.certificates.client(name or node_name(far.nodes[0].id))
    rpc = RemoteRpc(far.peered.places, tls)
    try:
        yield rpc
    finally:
        await rpc.close()


def dial(**changes: Any) -> LinkDial:
    """What the first node may ask of the second."""
    allowed = LinkDial(project="/team", job="shop", id="job_1", source="web", target="db", port=ECHO_PORT)
    return msgspec.structs.replace(allowed, **changes)


async def ask(rpc: RemoteRpc, node: NodeId, body: bytes) -> Stream:
    """Connected. Raises what the node says."""
    stream = await rpc.open(node, PEER_LINK, body, caller=EVERYTHING)
    try:
        frame = await stream.recv()
        if frame is None or frame.type != FrameType.RES:
            raise UnavailableError("it closed")
    except BaseException:
        await stream.close()
        raise
    return stream


async def echoes(stream: Stream) -> bool:
    await stream.send(data_frame(Channel.IN, 0, 0, b"hello"))
    frame = await stream.recv()
    return frame is not None and data_of(frame).payload == b"hello"


WRONG: Final = {
    "as a member of another node": dial(source="job", target="vault"),
    "as a member of another node that may": dial(source="job"),
    "a member that it has no link to": dial(target="vault"),
    "another port": dial(port=22),
    "as nobody": dial(source=""),
    "a member that has no links": dial(source="own"),
    "another job's id": dial(id="job_3"),
    "another project": dial(project="/"),
    "another group": dial(project="/others", job="bank", id="job_2", source="teller", target="safe"),
    "another group, as its own member": dial(project="/others", job="bank", id="job_2", target="safe"),
    "its own member there": dial(target="own"),
}


async def test_a_node_reaches_what_its_members_may_reach_and_nothing_else(far: FarNodes) -> None:
    second = far.nodes[1]
    async with rpc_of(far) as rpc:
        for wrong in WRONG.values():
            with pytest.raises(ForbiddenError, match="there is no such link to this node"):
                await ask(rpc, second.id, pack(wrong))

        stream = await ask(rpc, second.id, pack(dial()))
        assert await echoes(stream)
        await stream.close()


async def test_an_ask_that_is_none_is_refused(far: FarNodes) -> None:
    async with rpc_of(far) as rpc:
        for body in (b"", b"\xc1", pack({"target": "db"}), pack({**msgspec.to_builtins(dial()), "more": 1})):
            with pytest.raises(ForbiddenError):
                await ask(rpc, far.nodes[1].id, body)


async def test_replicas_are_not_asked_for_what_a_node_has_made_up(far: FarNodes) -> None:
    async with rpc_of(far) as rpc:
        for number in range(20):
            with pytest.raises(ForbiddenError):
                await ask(rpc, far.nodes[1].id, pack(dial(id=f"job_x{number}")))
    assert far.peered.asked == []

    async with rpc_of(far) as rpc:
        for _ in range(20):
            with pytest.raises(ForbiddenError):
                await ask(rpc, far.nodes[1].id, pack(dial(port=22)))
    assert len(far.peered.asked) < 20


async def test_a_node_commands_no_other(far: FarNodes) -> None:
    second = far.nodes[1]
    before = [sandbox.id for sandbox in second.node.registry]
    async with rpc_of(far) as rpc:
        for method in Method:
            with pytest.raises(ForbiddenError, match="nothing else"):
                await rpc.call(second.id, method, pack(ListQuery()), caller=EVERYTHING, timeout_s=60)
            end = await rpc.open(second.id, method, b"", caller=EVERYTHING)
            with pytest.raises(ForbiddenError, match="nothing else"):
                await end.recv()
            await end.close()
        with pytest.raises(ForbiddenError, match="nothing else"):  # what it may ask for is no call
            await rpc.call(second.id, PEER_LINK, pack(dial()), caller=EVERYTHING, timeout_s=60)  # type: ignore[arg-type]
        assert rpc.load(second.id) is None
    assert [sandbox.id for sandbox in second.node.registry] == before


async def test_a_replica_has_no_links(far: FarNodes) -> None:
    async with rpc_of(far, API_NAME) as rpc:
        with pytest.raises(UnsupportedError):
            await ask(rpc, far.nodes[1].id, pack(dial()))


async def test_only_a_certificate_of_one_node_is_one_of_a_node(far: FarNodes) -> None:
    second = far.nodes[1]
    for name in ("node.dsec.internal", "evil.node.dsec.internal", f"x.{node_name(far.nodes[0].id)}", "nats-1"):
        assert node_named(name) is None
        async with rpc_of(far, name) as rpc:
            with pytest.raises(DsecError, match=r"only API replicas and nodes|closed"):
                await ask(rpc, second.id, pack(dial()))
    async with rpc_of(far, node_name(second.id)) as rpc:
        with pytest.raises(DsecError, match=r"only API replicas and nodes|closed"):
            await ask(rpc, second.id, pack(dial()))


async def test_a_sandbox_that_has_ended_is_reached_by_nobody(far: FarNodes) -> None:
    second = far.nodes[1]
    (db,) = [one.id for one in second.node.registry if one.row.spec.member == "db"]
    async with rpc_of(far) as rpc:
        stream = await ask(rpc, second.id, pack(dial()))
        await second.destroy(db)
        with contextlib.suppress(DsecError):
            async with asyncio.timeout(60):
                while await stream.recv() is not None:
                    pass
        await stream.close()
        with pytest.raises(ForbiddenError):
            await ask(rpc, second.id, pack(dial()))


async def test_a_node_that_is_none_of_the_cluster_any_more_is_refused_when_what_was_told_is_old(tmp_path: Path) -> None:
    clock = ManualClock()
    async with far_nodes(tmp_path, clock=clock) as far:
        far.note(nodes={"web": 0, "db": 1}, across={"web": [(DB.name, DB.port)]})
        first, second = far.nodes
        await second.create("db")
        async with rpc_of(far) as rpc:
            await (await ask(rpc, second.id, pack(dial()))).close()
            del far.peered.places.known[first.id]  # retired, or lost: replicas tell nothing of it
            await clock.advance(limits.GROUP_FRESH_S + 1)

            with pytest.raises(ForbiddenError):
                await ask(rpc, second.id, pack(dial()))


async def test_what_is_connected_is_cut_when_its_node_is_none_of_the_cluster_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.peers._LOOK_S", 0.05)
    clock = ManualClock()
    async with far_nodes(tmp_path, clock=clock) as far:
        far.note(nodes={"web": 0, "db": 1}, across={"web": [(DB.name, DB.port)]})
        first, second = far.nodes
        await second.create("db")
        async with rpc_of(far) as rpc:
            stream = await ask(rpc, second.id, pack(dial()))
            far.peered.away = True
            await clock.advance(limits.GROUP_STALE_S + 1)
            assert await echoes(stream)
            far.peered.away = False
            del far.peered.places.known[first.id]
            await clock.advance(limits.GROUP_STALE_S + 1)

            with pytest.raises(ForbiddenError):
                async with asyncio.timeout(60):
                    await stream.recv()
            await stream.close()


async def test_what_was_told_is_not_good_for_ever(tmp_path: Path) -> None:
    clock = ManualClock()
    async with far_nodes(tmp_path, clock=clock) as far:
        far.note(nodes={"web": 0, "db": 1}, across={"web": [(DB.name, DB.port)]})
        second = far.nodes[1]
        await second.create("db")
        async with rpc_of(far) as rpc:
            await (await ask(rpc, second.id, pack(dial()))).close()
            far.peered.away = True
            await clock.advance(limits.GROUP_STALE_S - 1)
            await (await ask(rpc, second.id, pack(dial()))).close()
            await clock.advance(2)
            with pytest.raises(UnavailableError):
                await ask(rpc, second.id, pack(dial()))


async def test_a_group_that_has_ended_is_refused(far: FarNodes) -> None:
    first = far.nodes[0]
    far.peered.notes.clear()
    with pytest.raises(ForbiddenError):
        await first.peers.dial(dial())
    web = await first.create("web", DB)
    reader, writer = await first.dial(web)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            assert await reader.read() == b""
    writer.close()


# ---- bounds --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def raw(far: FarNodes, *, name: str | None = None) -> AsyncIterator[Asking]:
    second = far.nodes[1].id
    address = far.peered.places.known[second]
    tls = far.peered.certificates.client(name or node_name(far.nodes[0].id))
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=tls, server_hostname=node_name(second)
    )
    try:
        yield await Asking(reader, writer).welcomed(second)
    finally:
        writer.transport.abort()


class Asking(Raw):
    """One that asks as nodes do, or nearly."""

    def ask(self, id: int, body: bytes, *, size: int | None = None, key: str | None = None) -> None:
        head = CallHead(
            method=PEER_LINK, caller=EVERYTHING, size=len(body) if size is None else size, stream=True, key=key
        )
        self.send(Kind.CALL, id, *with_head(pack(head), body))  # type: ignore[arg-type]


async def is_served(far: FarNodes) -> bool:
    """Others are."""
    async with rpc_of(far, node_name(far.nodes[2].id)) as other, rpc_of(far, API_NAME) as replica:
        stream = await ask(other, far.nodes[1].id, pack(dial(source="job", target="vault")))
        good = await echoes(stream)
        await stream.close()
        await replica.call(far.nodes[1].id, Method.LIST, pack(ListQuery()), caller=EVERYTHING, timeout_s=60)
    return good


@pytest.mark.parametrize(
    "what",
    [
        "a large ask",
        "a large head",
        "an ask in parts",
        "half an ask",
        "a large frame",
        pytest.param("no reading", marks=pytest.mark.slow),
    ],
)
async def test_a_node_that_wants_too_much_is_cut_off_and_others_are_served(far: FarNodes, what: str) -> None:
    async with raw(far) as peer:
        match what:
            case "a large ask":
                peer.ask(1, b"", size=limits.PEER_DIAL_BYTES_MAX + 1)
            case "a large head":
                peer.ask(1, b"", key="k" * limits.PEER_DIAL_BYTES_MAX)
            case "an ask in parts":
                peer.ask(1, b"x", size=2)
                peer.send(Kind.PART, 1, bytes(10))
            case "half an ask":  # as many of these as it likes would take memory, and the room of replicas
                half, rest = (whole := pack(dial()))[:9], whole[9:]
                peer.ask(1, half, size=len(whole))
                peer.send(Kind.PART, 1, rest)
                found: list[int] = []
                with contextlib.suppress(ConnectionError, OSError):
                    found = await peer.kinds(1)
                assert Kind.FRAME not in found
            case "a large frame":
                peer.ask(1, pack(dial()))
                assert await peer.kinds(1) == [Kind.FRAME]
                peer.send(Kind.FRAME, 1, bytes((FrameType.DATA,)), bytes(limits.PEER_FRAME_BYTES_MAX + 1))
            case "no reading":
                with contextlib.suppress(ConnectionError):
                    for number in range(1, 400_000):
                        peer.ask(number, b"\xc1")
                        await peer.writer.drain()
        assert await peer.is_cut()
    await until(lambda: not far.peered.listeners[far.nodes[1].id].of_peers())
    assert far.peered.listeners[far.nodes[1].id].incomplete_bytes == 0
    assert await is_served(far)


async def test_streams_of_one_node_and_of_all_have_bounds(far: FarNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.cluster.link.server.PEER_STREAMS_MAX", 2)
    monkeypatch.setattr("dsec.cluster.link.server.PEERS_STREAMS_MAX", 3)
    second, others = far.nodes[1].id, pack(dial(source="job", target="vault"))
    async with rpc_of(far) as rpc, rpc_of(far) as again, rpc_of(far, node_name(far.nodes[2].id)) as other:
        held = [await ask(rpc, second, pack(dial())), await ask(again, second, pack(dial()))]
        for one in (rpc, again):
            with pytest.raises(CapacityError):
                await ask(one, second, pack(dial()))
        held.append(await ask(other, second, others))
        with pytest.raises(CapacityError):
            await ask(other, second, others)
        for stream in held:
            await stream.close()
        await until(lambda: not far.peered.listeners[second].streams_open)
        await (await ask(other, second, others)).close()


async def test_connections_of_one_node_are_few_and_take_no_places_of_replicas(
    far: FarNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.link.server.LINKS_MAX", 1)
    listener = far.peered.listeners[far.nodes[1].id]
    async with raw(far) as first, raw(far), raw(far):
        assert await first.is_cut()  # the oldest makes room
        await until(lambda: len(listener.of_peers()) == limits.PEER_CONNECTIONS_MAX)
        assert await is_served(far)


async def test_a_node_that_is_dialled_cannot_fill_who_has_dialled(far: FarNodes) -> None:
    """The other way round: what a target sends is bounded, too."""
    second = far.nodes[1]

    class Hostile:
        async def serve(self, peer: NodeId, body: bytes, stream: Stream) -> None:
            await stream.send(data_frame(Channel.OUT, 0, 0, bytes(limits.PEER_FRAME_BYTES_MAX + 1)))

    far.peered.listeners[second.id].peers = Hostile()
    stream = await far.nodes[0].peers.dial(dial())
    with pytest.raises(UnavailableError, match="lost"):
        await stream.recv()
    await stream.close()


async def test_a_target_that_breaks_the_rules_costs_the_connection_alone(far: FarNodes) -> None:
    second, web = far.nodes[1], await far.nodes[0].create("web", DB, Link("vault", ECHO_PORT))

    class Hostile:
        async def serve(self, peer: NodeId, body: bytes, stream: Stream) -> None:
            await stream.send(data_frame(Channel.IN, 0, 0, b"not what was asked for"))

    peers = far.peered.listeners[second.id].peers
    far.peered.listeners[second.id].peers = Hostile()
    reader, writer = await far.nodes[0].dial(web)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            assert await reader.read() == b""
    writer.close()

    far.peered.listeners[second.id].peers = peers
    reader, writer = await far.nodes[0].dial(web)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    writer.close()


async def test_who_is_told_of_a_group_is_told_of_its_own_links_alone(far: FarNodes) -> None:
    first, third = far.nodes[0], far.nodes[2]
    places = await first.peers._rosters.of(GROUP)
    assert places.links == {"web": [("db", ECHO_PORT)]}
    assert set(places.nodes) == {"web", "db", "own"}
    assert str(third.id) not in places.addresses
    with pytest.raises(ForbiddenError):
        await first.peers._rosters.of(OTHERS)
    with pytest.raises(NotFoundError):
        await first.peers.dial(dial(source="job", target="vault"))
