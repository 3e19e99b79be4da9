"""An outside of a test's own: a network for a node or a forwarder, and one beyond it with servers that look public.

Nothing of it is the machine's real network, and no packet leaves it: addresses that are somebody's in the world are
those of a loopback in a namespace here.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.testing.networks import Networks, networks

ALLOWED: Final = "93.184.215.14"
OTHER: Final = "151.101.64.223"
METADATA: Final = "169.254.169.254"
PRIVATE: Final = "10.50.0.1"
NAMES: Final = {"allowed.example.org": ALLOWED, "other.example.org": OTHER, "inside.example.org": PRIVATE}
ECHO_PORT: Final = 8000

_NEAR, _FAR = "near", "far"
_UP_S: Final = 60.0
_POLL_S: Final = 0.01

# In a program of its own, as it is in another network: HTTP at 80 of all addresses, an echo at 8000, names at 53.
_SERVERS: Final = r"""
import http.server, socketserver, struct, sys, threading
names = dict(pair.split("=") for pair in sys.argv[2:])
log = open(sys.argv[1], "a", buffering=1)

class Web(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        here = self.connection.getsockname()[0]
        log.write(f"http {here}\n")
        size = int(self.path.removeprefix("/bytes/")) if self.path.startswith("/bytes/") else 0
        body = b"x" * size if size else f"you reached {here}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        log.write(f"echo {self.request.getsockname()[0]}\n")
        try:
            while data := self.request.recv(65536):
                self.request.sendall(data)
        except ConnectionError:
            pass  # cut, as tests want it

class Names(socketserver.BaseRequestHandler):
    def handle(self):
        data, sock = self.request
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += data[at] + 1
        question, (kind,) = data[12 : at + 5], struct.unpack_from(">H", data, at + 1)
        name = ".".join(labels).lower()
        log.write(f"dns {name}\n")
        address = names.get(name) if kind == 1 else None
        flags = 0x8180 | (0 if name in names else 3)
        head = data[:2] + struct.pack(">HHHHH", flags, 1, 1 if address else 0, 0, 0)
        answer = b""
        if address:
            answer = struct.pack(">HHHIH", 0xC00C, 1, 1, 60, 4) + bytes(map(int, address.split(".")))
        sock.sendto(head + question + answer, self.client_address)

socketserver.ThreadingTCPServer.daemon_threads = socketserver.ThreadingTCPServer.allow_reuse_address = True
for server in (
    http.server.ThreadingHTTPServer(("0.0.0.0", 80), Web),
    socketserver.ThreadingTCPServer(("0.0.0.0", 8000), Echo),
):
    threading.Thread(target=server.serve_forever, daemon=True).start()
names_server = socketserver.ThreadingUDPServer(("0.0.0.0", 53), Names)
log.write("up\n")
names_server.serve_forever()
"""


@dataclass(frozen=True)
class Outside:
    between: Networks
    log: Path

    @property
    def wrap(self) -> tuple[str, ...]:
        """Words before a program that is to be there: a node, or a forwarder."""
        return self.between.wrap(_NEAR)

    @property
    def resolver(self) -> str:
        return self.between.address(_FAR)

    @property
    def host(self) -> str:
        """An address of the host that the node, or forwarder, is on."""
        return self.between.address(_NEAR)

    @property
    def seen(self) -> list[str]:
        """What servers were asked: `http ADDRESS`, `echo ADDRESS` and `dns NAME`."""
        return self.log.read_text().split("\n")[1:-1]


@contextmanager
def outside(directory: Path) -> Iterator[Outside]:
    """It takes root, and the programs of `dsec.testing.networks`."""
    with networks(_NEAR, _FAR) as between:
        made = Outside(between, directory / "outside.log")
        far = between.wrap(_FAR)
        for address in (ALLOWED, OTHER, METADATA, PRIVATE):
            _run(*far, "ip", "addr", "add", f"{address}/32", "dev", "lo")
        _run(*made.wrap, "ip", "route", "add", "default", "via", made.resolver)
        made.log.touch()
        names = [f"{name}={address}" for name, address in NAMES.items()]
        servers = subprocess.Popen(
            [*far, sys.executable, "-c", _SERVERS, str(made.log), *names], stdin=subprocess.DEVNULL
        )
        try:
            until_s = time.monotonic() + _UP_S
            while not made.log.read_text().startswith("up"):
                assert servers.poll() is None, "the servers have ended"
                assert time.monotonic() < until_s, "the servers did not come up"
                time.sleep(_POLL_S)
            yield made
        finally:
            servers.kill()
            servers.wait()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
