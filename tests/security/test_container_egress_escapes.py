"""Root inside a container with a network and a small allow-list reaches nothing but what is on that list."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.testing.outside import ALLOWED, METADATA, OTHER, PRIVATE
from dsec.testing.waiting import eventually
from tests.security import container_probes
from tests.system.egress_site import ABLE, Site, egress_site

pytestmark = [
    pytest.mark.root,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not ABLE, reason="needs root, ip, iptables and nsenter"),
]

_PROBES = Path(container_probes.__file__).parent
_PORT = 7000
# It is sent, and the node's forwarder answers: no name server has it.
ANSWERED = {"datagram_to_a_name_server"}
# Each attempt is a line: what came of it, as an error, or as bytes that somebody has answered.
_ATTEMPTS = r"""
import json, os, socket, struct, sys

def tcp(address, port, said=b"GET / HTTP/1.0\r\n\r\n"):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as link:
        link.settimeout(30)
        link.connect((address, port))
        link.sendall(said)
        return link.recv(64)

def udp(address, port, said=b"x"):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.settimeout(3)
        link.connect((address, port))
        link.send(said)
        return link.recv(512)

def question(name, kind=1):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)

def addresses(answer):
    return answer if answer[3] & 15 == 0 and answer[6:8] != b"\0\0" else b""

def ask(address, name, kind=1):
    return addresses(udp(address, 53, question(name, kind)))

def ask_by_tcp(address, name):
    asked = question(name)
    return addresses(tcp(address, 53, struct.pack(">H", len(asked)) + asked)[2:])

def packet(kind, protocol):
    socket.socket(kind, socket.SOCK_RAW, protocol)
    return b"a raw socket"

facts = json.load(sys.stdin)
asked = [(server, name) for server, name in facts["names"]]
attempts = {
    **{f"tcp {address} {port}": (lambda a=address, p=port: tcp(a, p)) for address, port in facts["tcp"]},
    **{f"udp {address} {port}": (lambda a=address, p=port: udp(a, p)) for address, port in facts["udp"]},
    **{f"name {name} of {server}": (lambda s=server, n=name: ask(s, n)) for server, name in asked},
    **{f"name {name} of {server} by tcp": (lambda s=server, n=name: ask_by_tcp(s, n)) for server, name in asked},
    "another host by the address of the allowed one": lambda: tcp(
        facts["allowed"], 80, b"GET / HTTP/1.1\r\nHost: other.example.org\r\n\r\n"
    ),
    "raw ipv4": lambda: packet(socket.AF_INET, 255),
    "raw icmp": lambda: packet(socket.AF_INET, 1),
    "packet": lambda: packet(17, 0x300),
}
found = {}
for name, attempt in attempts.items():
    try:
        got = attempt()
        found[name] = f"got {got!r}" if got else "nothing"
    except OSError as error:
        found[name] = type(error).__name__
print(json.dumps(found))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with egress_site(small_store, tmp_path_factory.mktemp("outside")) as site:
        yield site


@contextmanager
def listening(site: Site, directory: Path) -> Iterator[Path]:
    """On all addresses of the node's host, its loopback too, at one port; a file has a line for each that comes."""
    log = directory / "reached"
    program = (
        "import socket, sys; found = socket.create_server(('::', int(sys.argv[1])), dualstack_ipv6=True, "
        "family=socket.AF_INET6); log = open(sys.argv[2], 'a', buffering=1); log.write('up\\n')\n"
        "while True: link, peer = found.accept(); log.write(f'{peer}\\n'); link.sendall(b'reached'); link.close()"
    )
    command = [*site.outside.wrap, sys.executable, "-c", program, str(_PORT), str(log)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield log
    finally:
        process.kill()
        process.wait()


async def attack(site: Site, directory: Path, *names: str) -> dict[str, dict[str, str]]:
    """These probes, or all, in a sandbox with a network; none of them may come to the host."""
    secret = directory / "secret"
    secret.write_text("of the host")
    memory = 512 << 20
    facts: dict[str, Any] = {
        **{"host_pid": os.getpid(), "port": _PORT, "abstract": f"dsec-test-{os.getpid()}", "shm_key": 1},
        **{"file": str(secret), "id_base": 0x7000_0000, "memory_bytes": memory, "cpus": 1},
        **{"cgroup_parent": site.place.name, "directory": str(site.place.directory)},
    }
    with listening(site, directory) as log, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + facts["abstract"])
        abstract.listen()
        await eventually(log.exists)
        async with await site.create("allowed.example.org", memory=memory, cpu=1, pids=256) as sandbox:
            await sandbox.upload(_PROBES, "/probes/container_probes")
            command = ["python3", "-m", "container_probes", *names]
            result = await sandbox.exec(command, cwd="/probes", stdin=json.dumps(facts), timeout_s=200)
        assert result.exit_code == 0, result.stderr
        assert log.read_text().split("\n")[1:-1] == []
    verdicts: dict[str, dict[str, str]] = json.loads(result.stdout)
    return verdicts


async def test_attempts_at_networks_are_refused_where_there_is_one(site: Site, tmp_path: Path) -> None:
    of_networks = [
        name
        for name, known in container_probes.PROBES.items()
        if name.startswith(("socket_", "connect_")) or known.run.__module__.endswith(".network")
    ]
    verdicts = await attack(site, tmp_path, *of_networks)

    assert len(verdicts) > 25
    assert {name for name, found in verdicts.items() if found["verdict"] != "blocked"} == ANSWERED, verdicts


@pytest.mark.slow
async def test_all_attempts_are_refused_where_there_is_a_network(site: Site, tmp_path: Path) -> None:
    verdicts = await attack(site, tmp_path)

    assert verdicts.keys() == set(container_probes.PROBES)
    left = {name: found for name, found in verdicts.items() if found["verdict"] != "blocked"}
    assert left.keys() == ANSWERED, left


async def test_nothing_but_the_list_is_reached_by_whatever_way(site: Site, tmp_path: Path) -> None:
    beyond = site.outside
    mapped = [f"::ffff:{METADATA}", "64:ff9b::a9fe:a9fe", "fd00:ec2::254", "::ffff:10.50.0.1", "2002:a32:1::1"]
    others = [METADATA, PRIVATE, OTHER, beyond.host, beyond.resolver, "198.18.0.1", "198.18.0.53", "127.0.0.1"]
    names = ("other.example.org", "secret.data.other.example.org", "inside.example.org", "localhost", "1.0.0.127")
    with listening(site, tmp_path) as log:
        await eventually(log.exists)
        async with (
            await site.create("allowed.example.org", "inside.example.org", "10.50.0.1:80") as sandbox,
            await site.create() as neighbour,
        ):
            server = "import socket as s\nf = s.create_server(('', 7001))\nwhile 1: f.accept()[0].sendall(b'reached')"
            await neighbour.start(["python3", "-c", server])
            await neighbour.exec("until exec 3<>/dev/tcp/127.0.0.1/7001; do sleep 0.1; done", timeout_s=60, check=True)
            facts = {
                "allowed": ALLOWED,
                "tcp": [[a, p] for a in (*others, *mapped) for p in (80, 22, 7001, _PORT)] + [[ALLOWED, 8000]],
                "udp": [[a, p] for a in (METADATA, OTHER, beyond.host, ALLOWED) for p in (123, 443)],
                "names": [[a, n] for a in ("198.18.0.53", beyond.resolver) for n in names],
            }
            asked = len(beyond.seen)
            result = await sandbox.exec(["python3", "-c", _ATTEMPTS], stdin=json.dumps(facts), timeout_s=300)
            assert result.exit_code == 0, result.stderr
            seen = beyond.seen[asked:]
        reached = log.read_text().split("\n")[1:-1]

    found = json.loads(result.stdout)
    assert len(found) > 60
    assert {name: said for name, said in found.items() if said.startswith("got")} == {}
    assert reached == []
    # A name that is on the list is asked for; where it leads is not gone to.
    assert set(seen) <= {"dns inside.example.org"}
