"""Machines with network `proxied`, through the whole of it: what they reach, what they do not, and what becomes of it
in their lives. Emulated where KVM is not, so it is for a soak."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.backends.egress import Egress
from dsec.backends.fullvm.backend import FullvmBackend
from dsec.backends.microvm.backend import MicrovmBackend
from dsec.backends.microvm.instance import MicrovmInstance
from dsec.core import errors
from dsec.core.machines import GATEWAY, Bus
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve import parts
from dsec.serve.service import LocalService
from dsec.testing.machines import add_boot_sector
from dsec.testing.networks import able
from dsec.testing.outside import ALLOWED, METADATA, OTHER, PRIVATE, Outside, outside
from dsec.testing.waiting import eventually
from dsec.wire.egress import NAMESERVER
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(not able(), reason="needs root, ip, nsenter and iptables"),
]
in_module = pytest.mark.asyncio(loop_scope="module")

IMAGE = "server"
BOOT_S = 1_500.0
_FETCH = """
import socket, sys
for target in sys.argv[1:]:
    try:
        with socket.create_connection((target, 80), timeout=60) as link:
            link.sendall(f"GET / HTTP/1.0\\r\\nHost: {target}\\r\\n\\r\\n".encode())
            got = b""
            while data := link.recv(4096):
                got += data
        print(target, got.decode().splitlines()[-1])
    except OSError as error:
        print(target, "refused")
"""
# As root of a guest sends what no program would: each ends with a word, whatever comes of it.
_FRAMES = """
import os, socket, struct
ADDRESS, OTHER = socket.inet_aton("198.18.0.15"), socket.inet_aton("8.8.8.8")
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
link.bind(("eth0", 0))
own = open("/sys/class/net/eth0/address").read().strip()
mac, far = bytes.fromhex(own.replace(":", "")), b"\\xff" * 6
def total(data):
    data += b"\\0" * (len(data) % 2)
    found = sum(struct.unpack(f">{len(data) // 2}H", data))
    while found >> 16:
        found = (found & 0xffff) + (found >> 16)
    return struct.pack(">H", found ^ 0xffff)
def packet(source, target, protocol, body):
    head = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 1, 0, 64, protocol, 0, source, target)
    return b"\\x08\\0" + head[:10] + total(head) + head[12:] + body
def syn(source, target):
    body = struct.pack(">HHIIBBHHH", 4000, 80, 1, 0, 0x50, 2, 64000, 0, 0)
    check = total(source + target + struct.pack(">BBH", 0, 6, len(body)) + body)
    return packet(source, target, 6, body[:16] + check + body[18:])
targets = [socket.inet_aton(name) for name in TARGETS]
for target in targets:
    for source in (ADDRESS, OTHER, target, socket.inet_aton("127.0.0.1")):
        for sender in (mac, os.urandom(6)):
            link.send(far + sender + syn(source, target))
            link.send(bytes.fromhex("5255c612000e") + sender + syn(source, target))
arp = struct.pack(">HHBBH", 1, 0x800, 6, 4, 2) + mac + socket.inet_aton("198.18.0.14") + far + ADDRESS
link.send(far + mac + b"\\x08\\x06" + arp)
offer = struct.pack(">HHHH", 67, 68, 8 + 240, 0) + b"\\2" + bytes(239)
link.send(far + mac + packet(ADDRESS, b"\\xff" * 4, 17, offer))
for count in range(50):
    link.send(far + mac + os.urandom(600))
    link.send(far + mac + b"\\x86\\xdd" + os.urandom(600))
print("sent")
"""


@dataclass(frozen=True)
class Site:
    place: Place
    service: LocalService
    client: AsyncClient
    outside: Outside

    async def create(self, *egress: str, **more: Any) -> AsyncSandbox:
        more = {"backend": "microvm", "memory": "192MiB", "network": "proxied", "egress": list(egress), **more}
        return await self.client.create(more.pop("environment", ENVIRONMENT), timeout_s=BOOT_S, **more)

    @property
    def forwarder(self) -> Egress:
        found = self.service.node._services.egress._forwarder
        assert isinstance(found, Egress)
        return found

    def instance(self, sandbox: AsyncSandbox) -> MicrovmInstance:
        backend = self.service.node.backends[Substrate.MICROVM]
        assert isinstance(backend, MicrovmBackend)
        return backend.instances[sandbox.id]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    with outside(tmp_path_factory.mktemp("outside")) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "Egress", functools.partial(Egress, wrap=found.wrap))
        settings = {"node": {"egress": {"resolvers": [found.resolver]}}, "fullvm": {"boot_s": BOOT_S}}
        with private_place(small_store, settings=settings) as place:
            async with served(place) as (service, client):
                probe = await service.node.backends[Substrate.MICROVM].probe()
                if not probe.usable:
                    pytest.skip(f"microvm: {probe.reason}")
                yield Site(place, service, client, found)


async def fetch(sandbox: AsyncSandbox, *targets: str) -> dict[str, str]:
    result = await sandbox.exec(["python3", "-c", _FETCH, *targets], timeout_s=600)
    assert result.exit_code == 0, result.stderr
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


# What a system does that knows nothing of us.
_DHCP = r"""
import os, socket, struct
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0300)
link.bind(("eth0", 0))
link.settimeout(60)
mac = os.urandom(6)
mac = bytes([mac[0] & 0xfc | 2]) + mac[1:]
asked = b"\1\1\6\0" + b"four" + bytes(20) + mac + bytes(202) + b"\x63\x82\x53\x63\x35\1\1\xff"
body = struct.pack(">HHHH", 68, 67, 8 + len(asked), 0) + asked
head = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 1, 0, 64, 17, 0, bytes(4), b"\xff" * 4)
total = sum(struct.unpack(">10H", head))
total = (total & 0xffff) + (total >> 16)
head = head[:10] + struct.pack(">H", total ^ 0xffff) + head[12:]
link.send(b"\xff" * 6 + mac + b"\x08\0" + head + body)
while True:
    frame = link.recv(2048)
    if frame[12:14] == b"\x08\0" and frame[23] == 17 and frame[34:38] == b"\0C\0D":
        break
offer, options = frame[42:], {}
at = 240
while offer[at] != 255:
    options[offer[at]] = offer[at + 2 : at + 2 + offer[at + 1]]
    at += 2 + offer[at + 1]
print(*(socket.inet_ntoa(address) for address in (offer[16:20], options[3], options[6])))
"""


# More than its monitor has descriptors, of both kinds.
_FLOOD = """
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (20000, 20000))
held = []
for number in range(4000):
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM if number % 2 else socket.SOCK_DGRAM)
    link.setblocking(False)
    try:
        link.connect((TARGET, 80))
        link.send(b"x")
    except OSError:
        pass
    held.append(link)
open("/tmp/flooded", "w").close()
import time
time.sleep(3600)
"""


async def hardware_address(sandbox: AsyncSandbox) -> str:
    return (await sandbox.exec("cat /sys/class/net/e*/address")).stdout.strip()


def reached(address: str) -> str:
    return f"you reached {address}"


@in_module
async def test_a_machine_without_a_network_has_no_card(site: Site) -> None:
    async with await site.client.create(ENVIRONMENT, backend="microvm", memory="192MiB", timeout_s=BOOT_S) as sb:
        look = await sb.exec("ls /sys/class/net; ls /sys/bus/virtio/drivers; cat /etc/resolv.conf")
        line = Path(f"/proc/{site.instance(sb).pid}/cmdline").read_bytes()

    assert look.stdout.splitlines()[0] == "lo"
    assert "virtio_net" not in look.stdout
    assert "nameserver" not in look.stdout
    assert b"net" not in line.replace(b"/net/", b"")


@in_module
async def test_a_microvm_reaches_what_is_allowed_and_nothing_else(site: Site) -> None:
    before = len(site.outside.seen)
    more = (f"{METADATA}:80", f"{PRIVATE}:80", f"{site.outside.host}:80", "inside.example.org:80")
    async with await site.create("allowed.example.org:80", *more) as sb:
        targets = (
            "other.example.org",
            OTHER,
            METADATA,
            PRIVATE,
            site.outside.host,
            "inside.example.org",
            "198.18.0.14",
        )
        found = await fetch(sb, "allowed.example.org", *targets)

    assert found.pop("allowed.example.org") == reached(ALLOWED)
    assert found == dict.fromkeys(targets, "refused")
    asked = site.outside.seen[before:]
    assert f"http {ALLOWED}" in asked
    assert {line for line in asked if line.startswith("http")} == {f"http {ALLOWED}"}
    assert "dns other.example.org" not in asked


@in_module
async def test_what_its_root_sends_by_hand_reaches_nothing_and_the_machine_goes_on(site: Site) -> None:
    async with await site.create(f"{ALLOWED}:80") as sb:
        before = len(site.outside.seen)
        names = (OTHER, METADATA, PRIVATE, site.outside.host, "127.0.0.1", "224.0.0.1")
        sent = await sb.exec(["python3", "-c", f"TARGETS = {names!r}\n{_FRAMES}"], timeout_s=600)
        assert sent.stdout == "sent\n", sent.stderr
        renamed = "ip link set eth0 address 02:00:00:00:00:77 2>&1; ip addr add 10.9.9.9/24 dev eth0; true"
        await sb.exec(renamed)
        assert await fetch(sb, ALLOWED) == {ALLOWED: reached(ALLOWED)}
        assert site.outside.seen[before:] == [f"http {ALLOWED}"]


@in_module
async def test_a_system_that_asks_by_dhcp_is_told_all(site: Site) -> None:
    async with await site.create() as sb:
        told = await sb.exec(["python3", "-c", _DHCP], timeout_s=600)

    address, gateway, resolver = told.stdout.split()
    assert address.startswith("198.18.0.1"), told.stderr
    assert (gateway, resolver) == (GATEWAY, NAMESERVER)


@in_module
async def test_clones_and_forks_share_no_hardware_address_and_each_reaches_what_it_may(site: Site) -> None:
    first, second = await asyncio.gather(site.create(f"{ALLOWED}:80"), site.create(f"{OTHER}:80"))
    made = [first, second]
    try:
        assert await fetch(first, ALLOWED, OTHER) == {ALLOWED: reached(ALLOWED), OTHER: "refused"}
        assert await fetch(second, ALLOWED, OTHER) == {ALLOWED: "refused", OTHER: reached(OTHER)}
        made += await first.fork(2)
        for fork in made[2:]:
            assert await fetch(fork, ALLOWED, OTHER) == {ALLOWED: reached(ALLOWED), OTHER: "refused"}
        addresses = [await hardware_address(sandbox) for sandbox in made]
        assert len(set(addresses)) == len(made)
    finally:
        await asyncio.gather(*(sandbox.destroy() for sandbox in made))


@in_module
async def test_it_is_attached_again_when_it_wakes_when_its_rules_change_and_when_the_forwarder_died(site: Site) -> None:
    async with await site.create(f"{ALLOWED}:80") as sb:
        address, pid = await hardware_address(sb), site.instance(sb).pid
        await sb.pause(deep=True)
        assert (await sb.set_egress([f"{OTHER}:80"])).egress == [f"{OTHER}:80"]
        assert await fetch(sb, ALLOWED, OTHER) == {ALLOWED: "refused", OTHER: reached(OTHER)}
        assert site.instance(sb).pid != pid
        assert await hardware_address(sb) == address, "it is the same machine"

        await sb.set_egress([f"{ALLOWED}:80"])
        assert await fetch(sb, ALLOWED, OTHER) == {ALLOWED: reached(ALLOWED), OTHER: "refused"}

        forwarder = site.forwarder
        before = forwarder.pid
        os.kill(before, signal.SIGKILL)
        await eventually(lambda: forwarder.pid != before)

        async def again() -> bool:
            return await fetch(sb, ALLOWED) == {ALLOWED: reached(ALLOWED)}

        await eventually(again, deadline_s=300)


@in_module
async def test_what_goes_on_from_a_snapshot_has_what_its_own_rules_say(site: Site) -> None:
    async with await site.create(f"{ALLOWED}:80") as sb:
        snapshot = await sb.snapshot()
        address = await hardware_address(sb)
    async with await site.client.create(snapshot=snapshot.name, timeout_s=BOOT_S) as bare:
        assert await fetch(bare, ALLOWED) == {ALLOWED: "refused"}
    async with await site.client.create(snapshot=snapshot.name, network="proxied", timeout_s=BOOT_S) as child:
        assert await fetch(child, ALLOWED, OTHER) == {ALLOWED: reached(ALLOWED), OTHER: "refused"}
        assert await hardware_address(child) != address
    await snapshot.remove()


@in_module
async def test_a_guest_that_opens_more_than_its_monitor_can_hinders_nobody_else(site: Site) -> None:
    first, other = await asyncio.gather(site.create(f"{ALLOWED}:80"), site.create(f"{ALLOWED}:80"))
    async with first, other:
        flood = await first.start(["python3", "-c", f"TARGET = {ALLOWED!r}\n{_FLOOD}"])

        async def flooded() -> bool:
            return (await first.exec("test -e /tmp/flooded", timeout_s=300)).exit_code == 0

        await eventually(flooded, deadline_s=600)
        assert await fetch(other, ALLOWED) == {ALLOWED: reached(ALLOWED)}
        assert (await first.exec("echo still", timeout_s=300)).stdout == "still\n"
        await first.pause()
        await first.resume()
        await flood.kill()

        async def again() -> bool:
            return await fetch(first, ALLOWED) == {ALLOWED: reached(ALLOWED)}

        await eventually(again, deadline_s=600)


@in_module
async def test_a_machine_that_cannot_be_attached_is_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise errors.HostError("the kernel refuses")

    monkeypatch.setattr(Egress, "attach", fails)
    async with site.place.no_leaks():
        with pytest.raises(errors.LaunchError, match="no way out") as error:
            await site.create(f"{ALLOWED}:80")

    assert error.value.step == "network"


@in_module
@pytest.mark.parametrize(("bus", "card"), [(Bus.VIRTIO, b"virtio-net-pci"), (Bus.SATA, b"e1000e")])
async def test_a_full_machine_without_an_agent_has_a_card_and_is_attached(site: Site, bus: Bus, card: bytes) -> None:
    backend = site.service.node.backends[Substrate.FULLVM]
    assert isinstance(backend, FullvmBackend)
    await asyncio.to_thread(add_boot_sector, backend.images, f"plain-{bus}", bus=bus)
    plain = {"environment": f"plain-{bus}", "backend": "fullvm", "memory": "64MiB"}
    async with await site.create(f"{ALLOWED}:80", **plain) as vm:
        line = Path(f"/proc/{backend.instances[vm.id].pid}/cmdline").read_bytes()
        assert card in line
        assert vm.id in await site.forwarder.counts()
        assert (await vm.screen.size()).width > 0
        await vm.pause(deep=True)
        await vm.resume()
        assert (await site.forwarder.counts())[vm.id].alive


@in_module
async def test_a_debian_begins_with_its_network_and_reaches_what_is_allowed(site: Site) -> None:
    if shutil.which("mmdebstrap") is None:
        pytest.skip("there is no mmdebstrap")
    await site.client.machines.build(IMAGE, ["python3-minimal"])
    with_network = {"environment": IMAGE, "backend": "fullvm", "memory": "512MiB"}
    async with await site.create("allowed.example.org:80", **with_network) as vm:
        clone = await site.create("allowed.example.org:80", **with_network)
        found = await fetch(vm, "allowed.example.org", "other.example.org", METADATA)
        assert found == {"allowed.example.org": reached(ALLOWED), "other.example.org": "refused", METADATA: "refused"}
        assert await hardware_address(vm) != await hardware_address(clone)
        await clone.destroy()
    async with await site.client.create(IMAGE, backend="fullvm", memory="512MiB", timeout_s=BOOT_S) as vm:
        look = await vm.exec("ls /sys/class/net; systemctl is-active systemd-networkd")
        assert look.stdout.split() == ["lo", "inactive"]
