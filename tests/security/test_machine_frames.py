"""Frames of a machine whose root sends what it likes, on the device that its jail has made: the guest is this test."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

import pytest

from dsec.backends.egress import Egress
from dsec.backends.vm.monitor import Confines, MonitorProcess, jail_plan
from dsec.backends.vm.network import TAP, tap
from dsec.core.machines import ADDRESS, GATEWAY
from dsec.storage.syscalls import enter_network
from dsec.testing.egress import egress_of
from dsec.testing.networks import able
from dsec.testing.outside import ALLOWED, METADATA, OTHER, PRIVATE, Outside, outside
from dsec.testing.waiting import eventually
from dsec.wire.egress import NAMESERVER, EgressRule, HelloArgs

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not able(), reason="needs root, ip, nsenter and iptables"),
]

UID = 1_987_700
SANDBOX = "sbx_machine"
_TUNSETIFF = 0x400454CA
_TAP, _NO_PI, _VNET_HDR = 0x2, 0x1000, 0x4000
_HEAD = bytes(10)  # of virtio: nothing is left to the device
_MAC = bytes.fromhex("020000000001")
_ALL = b"\xff" * 6
_SYN, _RST, _PSH, _ACK = 2, 4, 8, 16
_FRAME_BYTES = 65_550


class Card:
    """The machine's end: whole frames, as a guest's driver has them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.heard: list[bytes] = []
        self.gateway = _ALL
        self._port = 40_000
        os.set_blocking(fd, False)

    def close(self) -> None:
        os.close(self._fd)

    def send(self, frame: bytes) -> None:
        os.write(self._fd, _HEAD + frame)

    def listen(self) -> None:
        """Answers who asks after us, as every system does."""
        while True:
            try:
                frame = os.read(self._fd, _FRAME_BYTES)[len(_HEAD) :]
            except BlockingIOError:
                return
            self.heard.append(frame)
            if frame[12:14] == b"\x08\x06" and frame[20:22] == b"\0\1" and frame[38:42] == packed(ADDRESS):
                self.send(frame[6:12] + _MAC + arp(2, _MAC, ADDRESS, frame[6:12], socket.inet_ntoa(frame[28:32])))

    async def hear(self, wanted: Callable[[bytes], bool]) -> bytes:
        def look() -> bytes | None:
            self.listen()
            return next((frame for frame in self.heard if wanted(frame)), None)

        found = await eventually(look)
        assert found is not None
        return found

    async def find_gateway(self) -> None:
        self.send(_ALL + _MAC + arp(1, _MAC, ADDRESS, bytes(6), GATEWAY))
        answer = await self.hear(lambda frame: frame[12:14] == b"\x08\x06" and frame[20:22] == b"\0\2")
        self.gateway = answer[6:12]

    def send_ip(self, protocol: int, target: str, body: bytes, *, source: str = ADDRESS) -> None:
        head = struct.pack(
            ">BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 1, 0, 64, protocol, 0, *map(packed, (source, target))
        )
        head = head[:10] + checksum(head) + head[12:]
        self.send(self.gateway + _MAC + b"\x08\0" + head + body)

    def send_tcp(self, target: str, port: int, flags: int, numbers: tuple[int, int] = (1, 0), **more: str) -> int:
        """Gives the port that it comes from."""
        self._port += 1
        self._tcp(self._port, target, port, flags, numbers, b"", **more)
        return self._port

    def _tcp(
        self, own: int, target: str, port: int, flags: int, numbers: tuple[int, int], data: bytes, source: str = ADDRESS
    ) -> None:
        body = struct.pack(">HHIIBBHHH", own, port, *numbers, 0x50, flags, 64_000, 0, 0) + data
        pseudo = packed(source) + packed(target) + struct.pack(">BBH", 0, 6, len(body))
        self.send_ip(6, target, body[:16] + checksum(pseudo + body) + body[18:], source=source)

    async def answer(self, own: int) -> tuple[str, int, tuple[int, int], bytes]:
        """Of TCP, the next one: from whom, flags, numbers, data."""
        frame = await self.hear(lambda frame: is_tcp(frame) and struct.unpack_from(">H", frame, 36)[0] == own)
        self.heard.remove(frame)
        return parsed(frame)

    async def connect(self, target: str, port: int) -> int:
        """The flags that are answered with."""
        own = self.send_tcp(target, port, _SYN)
        source, flags, _, _ = await self.answer(own)
        assert source == target
        return flags

    async def fetch(self, target: str, *, host: str) -> bytes:
        """What a server answers; nothing when it is cut."""
        own = self.send_tcp(target, 80, _SYN)
        _, flags, (theirs, _), _ = await self.answer(own)
        if not flags & _SYN:
            return b""
        request = f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode()
        self._tcp(own, target, 80, _ACK | _PSH, (2, theirs + 1), request)
        got, taken = b"", theirs + 1
        while True:
            _, flags, (number, _), data = await self.answer(own)
            if flags & _RST:
                return got
            if number == taken and data:
                got, taken = got + data, taken + len(data)
                self._tcp(own, target, 80, _ACK, (2 + len(request), taken), b"")
            if flags & 1:
                return got


def packed(address: str) -> bytes:
    return socket.inet_aton(address)


def arp(operation: int, mac: bytes, address: str, other: bytes, wanted: str) -> bytes:
    return (
        b"\x08\x06" + struct.pack(">HHBBH", 1, 0x800, 6, 4, operation) + mac + packed(address) + other + packed(wanted)
    )


def checksum(data: bytes) -> bytes:
    total = sum(struct.unpack(f">{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", total ^ 0xFFFF)


def is_tcp(frame: bytes) -> bool:
    return frame[12:14] == b"\x08\0" and frame[23] == 6


def parsed(frame: bytes) -> tuple[str, int, tuple[int, int], bytes]:
    end = 14 + struct.unpack_from(">H", frame, 16)[0]
    numbers = struct.unpack_from(">II", frame, 38)
    return socket.inet_ntoa(frame[26:30]), frame[47], (numbers[0], numbers[1]), frame[34 + (frame[46] >> 4) * 4 : end]


@dataclass(frozen=True)
class Machine:
    """Of a monitor that only sleeps: what it would send, the test does."""

    card: Card
    process: MonitorProcess
    outside: Outside
    egress: Egress

    async def attach(self, *rules: EgressRule) -> None:
        await self.egress.attach(SANDBOX, self.process.pid, self.process.start_ticks, rules)


@pytest.fixture
async def machine(short_tmp: Path) -> AsyncIterator[Machine]:
    for name in ("root", "sockets", "run"):
        (short_tmp / name).mkdir()
    confines = Confines(uid=UID, cgroups=(), root=short_tmp / "root", sockets=short_tmp / "sockets", tap=tap())
    process = MonitorProcess.start(jail_plan(confines, ["/usr/bin/sleep", "600"]))
    try:
        await eventually(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        card = Card(opened_in(process.pid))
        with outside(short_tmp) as found:
            settings = HelloArgs(resolvers=(found.resolver,))
            async with egress_of(short_tmp / "run", wrap=found.wrap, settings=settings) as egress:
                yield Machine(card, process, found, egress)
        card.close()
    finally:
        await process.end()
        process.forget()


def opened_in(pid: int) -> int:
    """The device of that process's network, by a thread that nobody else needs."""
    made: list[int] = []

    def work() -> None:
        space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_network(space)
        finally:
            os.close(space)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", TAP.encode(), _TAP | _NO_PI | _VNET_HDR))
        made.append(fd)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (fd,) = made
    return fd


def rule(host: str, port: int = 80) -> EgressRule:
    return EgressRule(host, ((port, port),))


async def test_a_device_that_nothing_is_attached_behind_leads_nowhere(machine: Machine) -> None:
    card = machine.card
    await card.find_gateway()

    for target in (ALLOWED, METADATA, PRIVATE, machine.outside.host, "127.0.0.1"):
        card.send_tcp(target, 80, _SYN)
    assert await card.connect(GATEWAY, 80) & _RST, "it answered after those, and to this one only"
    assert [frame for frame in card.heard if is_tcp(frame)] == []
    assert machine.outside.seen == []


async def test_what_is_allowed_is_reached_and_nothing_else_is(machine: Machine) -> None:
    card = machine.card
    await card.find_gateway()
    await machine.attach(rule(ALLOWED), rule(METADATA), rule(PRIVATE), rule(machine.outside.host))

    got = await card.fetch(ALLOWED, host=ALLOWED)
    assert got.endswith(f"you reached {ALLOWED}".encode())
    for target in (OTHER, METADATA, PRIVATE, machine.outside.host, GATEWAY):
        assert await card.fetch(target, host=target) == b"", target
    assert machine.outside.seen == [f"http {ALLOWED}"]


async def test_frames_under_other_addresses_are_dropped(machine: Machine) -> None:
    card = machine.card
    await card.find_gateway()
    await machine.attach(rule(ALLOWED))
    await asyncio.to_thread(card.listen)
    card.heard.clear()

    for source in ("198.18.0.1", GATEWAY, "198.18.0.16", "127.0.0.1", "8.8.8.8", ALLOWED, "0.0.0.0", "224.0.0.1"):
        card.send_tcp(ALLOWED, 80, _SYN, source=source)
    card.send_tcp("127.0.0.1", 80, _SYN)
    card.send_tcp("255.255.255.255", 80, _SYN)
    got = await card.fetch(ALLOWED, host=ALLOWED)

    assert got.endswith(f"you reached {ALLOWED}".encode())
    assert [frame for frame in card.heard if is_tcp(frame)] == []
    counts = (await machine.egress.counts())[SANDBOX]
    assert (counts.connections, counts.denied) == (1, 0)


async def test_what_is_neither_tcp_nor_a_name_s_is_for_nobody(machine: Machine) -> None:
    card = machine.card
    await card.find_gateway()
    await machine.attach(rule(ALLOWED))

    echo = struct.pack(">BBHHH", 8, 0, 0, 1, 1)
    card.send_ip(1, ALLOWED, echo[:2] + checksum(echo) + echo[4:])
    offer = struct.pack(">HHHH", 67, 68, 8 + 240, 0) + bytes(240)  # as a DHCP server of its own
    card.send_ip(17, "255.255.255.255", offer)
    card.send_ip(17, ALLOWED, struct.pack(">HHHH", 5_000, 443, 12, 0) + b"quic")
    card.send_ip(47, ALLOWED, bytes(20))
    card.send(_ALL + _MAC + b"\x86\xdd" + bytes(60))  # IPv6
    card.send(_ALL + _MAC + b"\x81\0\0\1\x08\0" + bytes(60))  # of a VLAN
    card.send(_ALL + _MAC + b"\x08\x06" + b"\xff" * 60)
    card.send(b"\0" * 14)
    got = await card.fetch(ALLOWED, host=ALLOWED)

    assert got.endswith(f"you reached {ALLOWED}".encode())
    ip = [frame for frame in card.heard if frame[12:14] == b"\x08\0" and not is_tcp(frame)]
    assert {(frame[23], frame[34]) for frame in ip} <= {(1, 3)}, "that a port is unreachable may be told"
    assert [frame for frame in card.heard if frame[12:14] == b"\x86\xdd"] == []
    assert machine.outside.seen == [f"http {ALLOWED}"]


async def test_names_are_asked_for_by_way_of_the_same_resolver(machine: Machine) -> None:
    card = machine.card
    await card.find_gateway()
    await machine.attach(rule("allowed.example.org"))

    codes = {}
    for number, name in enumerate(("allowed.example.org", "other.example.org"), 1):
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
        question = struct.pack(">HHHHHH", number, 0x100, 1, 0, 0, 0) + labels + b"\0\0\1\0\1"
        card.send_ip(17, NAMESERVER, struct.pack(">HHHH", 5_000 + number, 53, 8 + len(question), 0) + question)
        answer = await card.hear(
            lambda frame, number=number: frame[23] == 17 and frame[42:44] == struct.pack(">H", number)
        )
        assert socket.inet_ntoa(answer[26:30]) == NAMESERVER
        codes[name] = answer[45] & 15, packed(ALLOWED) in answer
    got = await card.fetch(ALLOWED, host="allowed.example.org")

    assert codes == {"allowed.example.org": (0, True), "other.example.org": (3, False)}
    assert got.endswith(f"you reached {ALLOWED}".encode())
    assert machine.outside.seen == ["dns allowed.example.org", f"http {ALLOWED}"]
