"""What a hostile program in a sandbox tries against dsec-egress, as root of its network and with every right there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import resource
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from dsec.testing.waiting import eventually
from dsec.wire.egress import OWN_ADDRESS
from tests.native.egress_site import (
    INSIDE,
    METADATA,
    OTHER,
    WEB,
    Site,
    Space,
    able,
    everything_of,
    question_of,
    rule,
    site,
    space,
)

pytestmark = [pytest.mark.root, pytest.mark.skipif(not able(), reason="needs root, ip, unshare and nsenter")]

FORWARDERS_OWN = "198.18.0.2"  # where its sockets are bound


@pytest.fixture
def run_dir(native_binaries: dict[str, Path]) -> Iterator[Path]:
    """A short path: it holds a socket."""
    with tempfile.TemporaryDirectory(prefix="egr-") as name:
        yield Path(name)


@pytest.fixture
async def place(run_dir: Path) -> AsyncIterator[Site]:
    async with site(run_dir) as found:
        for address in (WEB, OTHER, INSIDE, METADATA):
            found.internet.serve(address, 443)
        found.internet.name("index.example", WEB)
        yield found


async def test_its_sockets_can_neither_be_reached_nor_replaced(place: Site) -> None:
    await place.attach(rule("index.example"))
    place.ask("index.example")
    for port in (1, 53, 443):
        if port != 53:
            assert place.is_refused(FORWARDERS_OWN, port)
    for address in (WEB, "0.0.0.0", FORWARDERS_OWN):
        for port in (1, 443):
            with place.sandbox.socket() as thief:
                for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                    thief.setsockopt(socket.SOL_SOCKET, option, 1)
                with contextlib.suppress(OSError):  # in use, where it is our own port
                    thief.bind((address, port))
                thief.listen()
                thief.setblocking(False)
                assert place.says(WEB, 443) == f"{WEB} \1hello".encode()
                with pytest.raises(BlockingIOError):
                    thief.accept()
    with place.sandbox.socket(kind=socket.SOCK_DGRAM) as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("0.0.0.0", 53))
        assert place.ask("index.example") == (0, [WEB])


async def test_raw_packets_stay_in_the_sandbox(place: Site) -> None:
    """Whole packets, by the network layer and by the device below it: to where rules do not lead, from anywhere."""
    await place.attach(rule("index.example"))
    for source in (OWN_ADDRESS, "81.2.69.1", INSIDE, "127.0.0.1"):
        for target in (OTHER, INSIDE, METADATA):
            with place.sandbox.socket(kind=socket.SOCK_RAW, protocol=socket.IPPROTO_RAW) as raw:
                raw.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
                with contextlib.suppress(OSError):
                    raw.sendto(_syn(source, target, 443), (target, 0))
            with place.sandbox.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as frames:
                frames.bind(("lo", 0x0800))
                frames.sendto(_syn(source, target, 443), ("lo", 0x0800))
    # A question from where nobody has asked, and from ourselves: answers to answers would have no end.
    for client in (f"{WEB}", FORWARDERS_OWN, OWN_ADDRESS):
        with place.sandbox.socket(kind=socket.SOCK_RAW, protocol=socket.IPPROTO_RAW) as raw:
            raw.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
            raw.sendto(_datagram(client, "198.18.0.53", 53, 53, question_of("evil.example")), ("198.18.0.53", 0))

    async def denied() -> int:
        return (await place.egress.counts())[place.name].denied

    await eventually(lambda: _is(denied, 3))
    assert place.ask("index.example") == (0, [WEB])
    assert place.says(WEB, 443)
    assert await denied() == 3
    assert set(place.internet.called) == {(WEB, 443)}


async def test_urgent_bytes_end_their_connection(place: Site) -> None:
    """They and what follows are never moved: to be told of them again and again is all there would be."""
    await place.attach(rule("index.example"))
    place.ask("index.example")
    with place.sandbox.connect(WEB, 443) as link:
        link.sendall(b"\1")
        said = b""
        while said != f"{WEB} \1".encode():
            said += (part := link.recv(100))
            assert part
        link.send(b"!", socket.MSG_OOB)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            _say(link, b"more")

    async def is_closed() -> bool:
        return (await place.egress.counts())[place.name].open == 0

    await eventually(is_closed)


def _say(link: socket.socket, data: bytes) -> bytes:
    link.sendall(data)
    return everything_of(link)


async def test_with_every_right_in_its_network_there_is_no_other_way(place: Site) -> None:
    """Routes away from the forwarder lead nowhere: what it makes ends in it."""
    await place.attach()
    place.sandbox.ip("route", "del", "local", "default", "dev", "lo", "table", "local")
    place.sandbox.ip("link", "add", "more", "type", "veth", "peer", "name", "end")
    place.sandbox.ip("link", "set", "end", "up")
    place.sandbox.ip("link", "set", "more", "up")
    place.sandbox.ip("route", "add", "default", "dev", "more")
    with place.sandbox.socket() as link:
        link.settimeout(0.5)
        with pytest.raises((TimeoutError, OSError)):
            link.connect((WEB, 443))
    assert place.internet.called == []
    # Attached again it is as it was.
    await place.egress.detach(place.name)
    await place.attach(rule("index.example"))
    assert place.ask("index.example") == (0, [WEB])
    assert place.says(WEB, 443)


async def test_a_flood_of_questions_leaves_others_theirs(place: Site) -> None:
    await place.attach(rule("index.example"))
    with space() as calm:
        await place.egress.attach("calm", calm.pid, calm.start, (rule("index.example"),))
        chance = random.Random(1)
        with place.sandbox.socket(kind=socket.SOCK_DGRAM) as flood:
            for number in range(20_000):
                message = question_of("index.example") if number % 2 else chance.randbytes(chance.randrange(1, 1400))
                with contextlib.suppress(BlockingIOError):
                    flood.sendto(message, socket.MSG_DONTWAIT, ("1.1.1.1", 53))
                if number % 5_000 == 0:
                    place.sandbox, calm = calm, place.sandbox
                    assert place.ask("index.example") == (0, [WEB])
                    place.sandbox, calm = calm, place.sandbox
        place.sandbox, calm = calm, place.sandbox
        assert place.ask("index.example") == (0, [WEB])
        place.sandbox, calm = calm, place.sandbox
    counts = await place.egress.counts()
    assert counts[place.name].questions < 9_000  # of 10,000 good ones: a test that takes long gets more answers
    assert _resident(place.egress.pid) < 64 << 20


async def test_more_connections_than_it_may_have_are_refused_and_others_have_theirs(place: Site) -> None:
    await place.attach(everything=True, connections=50)
    with space() as calm, contextlib.ExitStack() as stack:
        await place.egress.attach("calm", calm.pid, calm.start, None)
        held = [stack.enter_context(place.sandbox.connect(WEB, 443)) for _ in range(50)]
        assert all(link.recv(100) for link in held)
        assert place.is_refused(WEB, 443)
        with calm.connect(WEB, 443) as link:
            assert link.recv(100)
        held.pop().close()
        await eventually(lambda: not place.is_refused(WEB, 443))
    await eventually(lambda: any(d.reason == "connections" for d in place.denied))


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss")
async def test_what_the_host_holds_for_connections_that_are_not_read_is_bounded(place: Site) -> None:
    """The kernel would let each grow to tens of MiB, out of what all connections of the machine have together."""
    await place.attach(everything=True)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            assert stack.enter_context(place.sandbox.connect(WEB, 443)).recv(100)
        for shown in (_sockets_of(place.host, "dst", WEB), _sockets_of(place.sandbox, "src", WEB)):
            found = re.findall(r"skmem:\(r[0-9]+,rb([0-9]+),t[0-9]+,tb([0-9]+),", shown)
            assert len(found) == 20
            most = str(2 * (64 << 10))
            assert found.count((most, most)) >= 4


@pytest.mark.slow
async def test_ten_thousand_connections_that_never_read_cost_little_and_end(place: Site) -> None:
    """Of which the most are refused; a server sends to the others without end, and nobody reads."""
    endless = b"x" * 65_536

    def pour(link: socket.socket) -> None:
        while True:
            link.sendall(endless)

    place.internet.serve(WEB, 9)
    place.internet.serve(OTHER, 9, pour)
    await place.attach(everything=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    begun: list[socket.socket] = []
    with space() as calm:
        await place.egress.attach("calm", calm.pid, calm.start, None)
        try:
            for number in range(10_000):
                link = place.sandbox.socket()
                link.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    link.connect((OTHER if number % 20 == 0 else WEB, 9))
                begun.append(link)
                if number % 2_000 == 0:
                    with calm.connect(WEB, 9) as other:
                        assert other.recv(100)
            counts = (await place.egress.counts())[place.name]
            assert counts.open <= 1024
            assert _resident(place.egress.pid) < 128 << 20
            with calm.connect(WEB, 9) as other:
                other.sendall(b"\1")
                other.shutdown(socket.SHUT_WR)
                assert everything_of(other) == f"{WEB} \1".encode()
        finally:
            for link in begun:
                link.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        async def none_open() -> bool:
            return (await place.egress.counts())[place.name].open == 0

        await eventually(none_open)


@pytest.mark.slow
async def test_fifty_megabytes_both_ways_arrive_whole_beside_a_slow_reader(place: Site) -> None:
    place.internet.serve(WEB, 9)
    await place.attach(everything=True)
    data = os.urandom(1 << 20) * 50
    with place.sandbox.connect(WEB, 9) as slow, place.sandbox.connect(WEB, 9) as link:
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                slow.send(data[: 1 << 20])  # what comes back is never read
        loop = asyncio.get_running_loop()
        sending = loop.run_in_executor(None, link.sendall, data)
        sending.add_done_callback(lambda _: link.shutdown(socket.SHUT_WR))
        came = await loop.run_in_executor(None, everything_of, link)
    assert came == f"{WEB} ".encode() + data


async def _is(found: Callable[[], Awaitable[int]], wanted: int) -> bool:
    return await found() == wanted


def _sockets_of(where: Space, *which: str) -> str:
    return subprocess.run([*where.wrap, "ss", "-Htmn", *which], capture_output=True, text=True, check=True).stdout


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _sum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _packet(source: str, target: str, protocol: int, body: bytes) -> bytes:
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, protocol, 0) + addresses
    return head[:10] + struct.pack(">H", _sum(head)) + head[12:] + body


def _syn(source: str, target: str, port: int) -> bytes:
    body = struct.pack(">HHIIBBHHH", 4711, port, 1, 0, 0x50, 2, 1024, 0, 0)
    pseudo = socket.inet_aton(source) + socket.inet_aton(target) + struct.pack(">BBH", 0, 6, len(body))
    return _packet(source, target, 6, body[:16] + struct.pack(">H", _sum(pseudo + body)) + body[18:])


def _datagram(source: str, target: str, source_port: int, port: int, payload: bytes) -> bytes:
    return _packet(source, target, 17, struct.pack(">HHHH", source_port, port, 8 + len(payload), 0) + payload)
