"""Who may speak to a node, and what a peer that breaks the rules of a connection gets."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.cluster.certificates import API_NAME, client_context, node_name
from dsec.cluster.directory import Address
from dsec.cluster.link.client import RemoteRpc
from dsec.core import limits
from dsec.core.errors import (
    CapacityError,
    LimitError,
    NodeRetiredError,
    Outcome,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.ids import NodeId
from dsec.testing.links import Certificates, Linked, linked
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import Frame, FrameType
from dsec.wire.link import CallHead, Failed, Hello, Kind, PacketDecoder, packet, with_head
from dsec.wire.node import Caller, Method, Stream
from dsec.wire.records import NodeLoad
from tests.contract.served import until
from tests.security.raw_peer import Raw

NODE, OTHER = NodeId("aaaaaaaa"), NodeId("bbbbbbbb")
CALLER = Caller(principal="p", project="/p")


class Service:
    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = 0
        self.go_on = asyncio.Event()

    def load(self) -> NodeLoad:
        return NodeLoad()

    async def call(self, method: Method, body: bytes, *, caller: Caller, key: str | None, timeout_s: float) -> bytes:
        self.calls += 1
        if method == Method.CREATE:
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return bytes(int(body[1:])) if body.startswith(b"#") else body

    async def serve_stream(self, method: Method, body: bytes, stream: Stream, *, caller: Caller) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
async def link(service: Service, tmp_path: Path) -> AsyncIterator[Linked]:
    async with linked(service, NODE, tmp_path, term=3) as link:
        yield link


async def ask(rpc: RemoteRpc, body: bytes = b"x", method: Method = Method.GET, node: NodeId = NODE) -> bytes:
    return await rpc.call(node, method, body, caller=CALLER, timeout_s=60)


@contextlib.asynccontextmanager
async def raw(link: Linked, tls: ssl.SSLContext | None = None) -> AsyncIterator[Raw]:
    address = link.places.known[NODE]
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=tls or link.certificates.client(), server_hostname=node_name(NODE)
    )
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


# ---- who -----------------------------------------------------------------------------------------


async def test_only_a_replicas_certificate_is_served(link: Linked, service: Service, tmp_path: Path) -> None:
    strangers = Certificates(tmp_path / "strangers")
    contexts = [
        link.certificates.client(node_name(OTHER)),  # another node, which has escaped
        strangers.client(API_NAME),  # of another authority: the node is not its either
        client_context(tmp_path / "certificates" / "ca.pem"),  # nobody
    ]
    for context in contexts:
        rpc = RemoteRpc(link.places, context)
        with pytest.raises((UnavailableError, Exception), match=r"only API replicas|closed|cannot be reached") as told:
            await ask(rpc)
        assert told.value.outcome == Outcome.UNCHANGED  # type: ignore[attr-defined]
        await rpc.close()

    assert service.calls == 0
    assert await ask(link.rpc) == b"x"


async def test_a_node_that_is_not_the_one_meant_is_not_spoken_to(link: Linked, service: Service) -> None:
    link.places.known[OTHER] = link.places.known[NODE]

    with pytest.raises(UnavailableError, match="cannot be reached") as told:
        await ask(link.rpc, node=OTHER)

    assert told.value.outcome == Outcome.UNCHANGED
    assert service.calls == 0


async def test_a_node_refuses_what_is_meant_for_another(link: Linked) -> None:
    async with raw(link) as peer:
        peer.send(Kind.HELLO, 0, pack(Hello(1, 1, OTHER)))
        data = await peer.reader.read(65_536)

    (failed,) = (unpack(found.body, Failed) for found in PacketDecoder().feed(data))
    assert failed.error.code == NodeRetiredError.code


async def test_a_process_of_an_older_term_is_not_spoken_to(link: Linked, service: Service) -> None:
    address = link.places.known[NODE]
    link.places.known[NODE] = Address(address.host, address.port, term=4)

    with pytest.raises(UnavailableError, match="not in charge"):
        await ask(link.rpc)

    assert service.calls == 0


async def test_versions_that_have_nothing_in_common_say_so(link: Linked) -> None:
    async with raw(link) as peer:
        peer.send(Kind.HELLO, 0, pack(Hello(7, 9, NODE)))
        data = await peer.reader.read(65_536)

    (failed,) = (unpack(found.body, Failed) for found in PacketDecoder().feed(data))
    assert failed.error.code == UnsupportedError.code


# ---- rules ---------------------------------------------------------------------------------------


def call(id: int, body: bytes = b"", *, size: int | None = None, method: str = "get", stream: bool = False) -> bytes:
    head = CallHead(method=method, caller=CALLER, size=len(body) if size is None else size, timeout_s=60, stream=stream)
    return b"".join(packet(Kind.CALL, id, *with_head(pack(head), body)))


GARBAGE = {
    "noise": b"GET / HTTP/1.1\r\n\r\n" * 4,
    "a length beyond all bounds": struct.pack(">IBI", 0xFFFF_FFFF, 3, 1),
    "a length below the header": struct.pack(">IBI", 1, 3, 1),
    "an unknown kind": b"".join(packet(Kind.HELLO, 0)).replace(b"\x01\x00", b"\x63\x00", 1),
    "a head beyond its packet": b"".join(packet(Kind.CALL, 1, b"\xff\xff\xff\xff")),
    "a head that is none": b"".join(packet(Kind.CALL, 1, *with_head(b"\xc1", b""))),
    "a size below 0": call(1, size=-1),
    "a size beyond the bound": call(1, size=limits.LINK_BODY_BYTES_MAX + 1),
    "a body longer than it said": call(1, b"12345", size=4),
    "a body that goes on": call(1, b"1", size=2) + b"".join(packet(Kind.PART, 1, b"23")),
    "one id twice": call(1, method="exec_attach", stream=True) + call(1),
    "an answer": b"".join(packet(Kind.ANSWER, 1, b"")),
    "an empty frame": call(1, method="exec_attach", stream=True) + b"".join(packet(Kind.FRAME, 1)),
    "a short credit": call(1, method="exec_attach", stream=True) + b"".join(packet(Kind.CREDIT, 1, b"1")),
    "more than was granted": call(1, method="exec_attach", stream=True)
    + b"".join(packet(Kind.FRAME, 1, b"\x05", bytes(500_000))) * 4,
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_who_breaks_the_rules_is_cut_off_and_others_are_served(link: Linked, service: Service, what: str) -> None:
    async with raw(link) as peer:
        await peer.welcomed(NODE)
        peer.writer.write(GARBAGE[what])
        assert await peer.is_cut()
    await until(lambda: not link.listener.links)

    assert await ask(link.rpc) == b"x"
    assert link.listener.incomplete_bytes == 0


async def test_who_says_nothing_is_cut_off(link: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.cluster.link.server.LINK_CONNECT_S", 0.05)
    async with raw(link) as peer:
        assert await peer.is_cut()


async def test_incomplete_bodies_have_a_bound_together(
    link: Linked, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.link.server.LINK_BODIES_BYTES_MAX", 1_000)
    async with raw(link) as peer:
        await peer.welcomed(NODE)
        peer.writer.write(call(1, b"1", size=900) + call(2, b"1", size=200) + call(3, b"whole"))
        assert sorted(await peer.kinds(2)) == [Kind.ANSWER, Kind.FAIL]
        assert link.listener.incomplete_bytes == 900
        peer.send(Kind.CANCEL, 1)
        peer.send(Kind.PART, 1, b"late")
        await until(lambda: link.listener.incomplete_bytes == 0)

    assert service.calls == 1


async def test_a_method_that_the_node_does_not_know_is_refused(link: Linked) -> None:
    async with raw(link) as peer:
        await peer.welcomed(NODE)
        peer.writer.write(call(1, method="fly"))
        assert await peer.kinds(1) == [Kind.FAIL]


async def test_bodies_are_large_and_bounded_both_ways(link: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    size = limits.LINK_BODY_BYTES_MAX
    assert len(await ask(link.rpc, b"x" * size)) == size

    with pytest.raises(LimitError):
        await ask(link.rpc, bytes(size + 1))
    with pytest.raises(LimitError):
        await ask(link.rpc, b"#%d" % (size + 1))
    assert await ask(link.rpc) == b"x"


# ---- losses --------------------------------------------------------------------------------------


async def test_a_node_that_cannot_be_reached_is_unavailable_and_nothing_has_happened(link: Linked) -> None:
    await link.listener.close()

    for _ in range(2):  # the second is told at once
        with pytest.raises(UnavailableError) as told:
            await ask(link.rpc)
        assert told.value.outcome == Outcome.UNCHANGED


async def test_what_was_under_way_when_the_connection_is_lost_is_unknown(link: Linked, service: Service) -> None:
    calling = asyncio.create_task(ask(link.rpc, method=Method.CREATE))
    stream = await link.rpc.open(NODE, Method.EXEC_ATTACH, b"", caller=CALLER)
    await until(lambda: service.calls)
    for one in list(link.listener.links):
        one.connection.abort("cut")

    with pytest.raises(UnavailableError) as lost:
        await calling
    with pytest.raises(UnavailableError):
        await stream.recv()
    with pytest.raises(UnavailableError):
        await stream.send(Frame(FrameType.DATA, 0, b""))
    await stream.close()
    await until(lambda: service.cancelled == 2)
    assert lost.value.outcome == Outcome.UNKNOWN
    assert link.rpc.streams_open == 0
    assert await ask(link.rpc) == b"x"  # over another connection


async def test_a_node_that_stops_finishes_what_is_under_way(link: Linked, service: Service) -> None:
    calling = asyncio.create_task(ask(link.rpc, method=Method.CREATE))
    await until(lambda: service.calls)
    closing = asyncio.create_task(link.listener.close(grace_s=60))
    await asyncio.sleep(0.05)
    service.go_on.set()

    assert await calling == b"x"
    await closing
    with pytest.raises(UnavailableError):
        await ask(link.rpc)


async def test_a_node_that_went_silent_is_noticed(
    link: Linked, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.link.connection.LINK_PING_S", 0.1)
    monkeypatch.setattr("dsec.cluster.link.connection.LINK_SILENCE_S", 2.0)
    calling = asyncio.create_task(ask(link.rpc, method=Method.CREATE))
    await until(lambda: service.calls)
    await asyncio.sleep(2.5)
    assert not calling.done()  # signs of life go both ways
    for one in link.listener.links:
        monkeypatch.setattr(one.connection, "send", lambda *_: None)

    with pytest.raises(UnavailableError, match="nothing was heard"):
        await calling


async def test_a_node_that_moved_is_found_where_it_is(link: Linked, service: Service, tmp_path: Path) -> None:
    assert await ask(link.rpc) == b"x"
    address = link.places.known[NODE]
    await link.listener.close()
    with pytest.raises(UnavailableError):
        await ask(link.rpc)

    other = type(link.listener)(service, NODE, tls=link.certificates.node(NODE), term=lambda: 4)
    host, port = await other.listen("127.0.0.1", 0)
    link.places.known[NODE] = Address(host, port, 4)
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(UnavailableError):
                    assert await ask(link.rpc) == b"x"
                    break
                await asyncio.sleep(0.05)
    finally:
        await other.close()
    assert (host, port) != address[:2]


async def test_too_many_calls_at_once_are_refused(
    link: Linked, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cluster.link.server.LINK_CALLS_MAX", 2)
    held = [asyncio.create_task(ask(link.rpc, method=Method.CREATE)) for _ in range(2)]
    await until(lambda: service.calls == 2)
    with pytest.raises(CapacityError):
        await ask(link.rpc)
    service.go_on.set()

    assert await asyncio.gather(*held) == [b"x", b"x"]
